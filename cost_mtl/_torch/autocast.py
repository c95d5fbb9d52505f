"""Autocast around a whole step: it is meant for the closure, not for what is done with the gradients."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


def _device_types() -> tuple[str, ...]:
    return ("cpu", *([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else []))  # type: ignore[union-attr]


@dataclass(frozen=True)
class Autocast:
    """Autocast as the caller had it: (device type, dtype) of those that are on."""

    active: tuple[tuple[str, torch.dtype], ...]
    cached: bool

    @classmethod
    def capture(cls) -> Autocast:
        on = [d for d in _device_types() if torch.is_autocast_enabled(d)]
        return cls(tuple((d, torch.get_autocast_dtype(d)) for d in on), torch.is_autocast_cache_enabled())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which it is as it was."""
        with ExitStack() as stack:
            for device, dtype in self.active:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=self.cached))
            yield


@dataclass(frozen=True)
class Modes:
    """Grad mode and autocast of this thread: what torch's own contexts leave behind where an exception from a signal
    handler falls into their ``__exit__``."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool
    depth: int

    @classmethod
    def capture(cls) -> Modes:
        now = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _device_types())
        return cls(torch.is_grad_enabled(), now, torch.is_autocast_cache_enabled(), _autocast_depth())

    def restore(self) -> None:
        torch.set_grad_enabled(self.grad)
        for device, enabled, dtype in self.autocast:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(self.cached)
        while _autocast_depth() > self.depth:
            torch.autocast_decrement_nesting()
        if self.depth == 0:
            torch.clear_autocast_cache()


def _autocast_depth() -> int:
    """How many autocast contexts are on. Both calls in one bytecode, so that no signal handler comes between: a count
    that stays too high keeps autocast's cache of weights for good."""
    return int(list(map(operator.call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting)))[1])


@contextmanager
def no_autocast() -> Iterator[None]:
    """Context without autocast: backward passes belong outside of it, and products of gradients would be rounded to 8
    or 11 bits."""
    with ExitStack() as stack:
        for device in _device_types():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield

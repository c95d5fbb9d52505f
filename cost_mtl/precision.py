"""Autocast around a whole step: it is meant for the closure, not for what is done with the gradients."""

from __future__ import annotations

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


@contextmanager
def no_autocast() -> Iterator[None]:
    """Context without autocast: backward passes belong outside of it, and products of gradients would be rounded to 8
    or 11 bits."""
    with ExitStack() as stack:
        for device in _device_types():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield

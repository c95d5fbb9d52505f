"""The base optimizer's own step, and what is put back where it fails, or where a task is absent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl._torch import grad_scaler
from cost_mtl._torch.undo import commit

AtRest = Sequence[tuple[nn.Parameter, Tensor]]
"""(parameter, mask) pairs; the entries where the mask is True stay."""


def update(base: Optimizer, scaler: Any, at_rest: AtRest) -> None:
    """``base.step()``, through the scaler where there is one: from here on the step can't be taken back, unless it
    fails before a parameter has moved.

    Args:
        at_rest: entries of parameters, and of the base's state of them, that stay as they are.
    """
    held = [p for group in base.param_groups for p in group["params"]]
    versions = [p._version for p in held]
    try:
        if not at_rest:
            _step(base, scaler)
        else:
            with keeping_entries(base, at_rest):
                _step(base, scaler)
    except BaseException:
        if versions != [p._version for p in held]:
            commit()
        raise
    commit()


def _step(base: Optimizer, scaler: Any) -> None:
    if scaler is None:
        base.step()
    else:
        grad_scaler.step(scaler, base)


@contextmanager
def keeping_entries(base: Optimizer, at_rest: AtRest) -> Iterator[None]:
    """Context around the base optimizer's step that puts entries of parameters, and of its state of them, back."""
    kept = [(p, mask.to(p.device), p.detach().clone(), _entries(base, p)) for p, mask in at_rest]
    yield
    with torch.no_grad():
        for p, mask, value, entries in kept:
            p.copy_(torch.where(mask, value, p))
            now = _entries(base, p, copy=False)
            for key, old in entries.items():
                now[key].copy_(torch.where(mask, old, now[key]))


def _entries(base: Optimizer, p: nn.Parameter, *, copy: bool = True) -> dict[str, Tensor]:
    """The optimizer's state of the parameter that has one number for each of its entries."""
    state = base.state.get(p, {})
    same = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
    return {k: v.clone() for k, v in same.items()} if copy else same

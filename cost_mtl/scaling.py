"""Loss scaling inside a step: ``torch.amp.GradScaler`` refuses closures, so it can't be outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cost_mtl.parameters import held_by

REFUSAL = (
    "an enabled GradScaler called step: hand it over as COST(scaler=scaler) and call optimizer.step(closure) yourself; "
    "scaling, unscaling, skipping and update happen inside"
)


def scale_of(scaler: Any, base: Optimizer) -> Tensor | None:
    """The scaler's current factor [], or None without an enabled scaler."""
    if scaler is None or not scaler.is_enabled():
        return None
    factor: Tensor = scaler.scale(torch.ones((), device=held_by(base)[0].device))
    return factor


def step(scaler: Any, base: Optimizer) -> None:
    """``base.step()``, through the scaler where there is one. Gradients are unscaled and finite already: they are
    scaled once more (by a power of two, so exactly) for the scaler to do its part."""
    factor = scale_of(scaler, base)
    if factor is None:
        base.step()
        return
    for p in held_by(base):
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.device, p.grad.dtype))
    scaler.step(base)
    scaler.update()


def skip(scaler: Any, base: Optimizer) -> None:
    """Let the scaler see an overflow, so that it skips the step and lowers its factor."""
    p = next(p for p in held_by(base) if p.requires_grad)
    p.grad = torch.full_like(p, float("inf"))
    scaler.step(base)
    scaler.update()
    p.grad = None

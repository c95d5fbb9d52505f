"""Loss scaling inside a step: ``torch.amp.GradScaler`` refuses closures, so it can't be outside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from cost_mtl._torch.dtensor import local
from cost_mtl._torch.param_groups import held_by
from cost_mtl._torch.undo import undoing


def check(scaler: Any, base: Optimizer) -> None:
    """Refuse what can't work, when COST is made.

    Raises:
        TypeError: not a GradScaler.
        ValueError: parameters in float16, whose gradients torch's scaler does not unscale.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler: expected a torch.amp.GradScaler or None, got {type(scaler).__name__}")
    if is_on(scaler) and any(p.dtype == torch.float16 for p in held_by(base)):
        raise ValueError("scaler: expected parameters in float32 (autocast computes in float16 by itself), got float16 "
                         "parameters, which torch.amp.GradScaler does not support")  # fmt: skip


def refuse_outside(optimizer: Optimizer) -> None:
    """Refuse to be stepped by a scaler.

    Raises:
        RuntimeError: ``GradScaler.step`` is the caller: it leaves its findings as attributes of an optimizer that says
            it supports them, as COST does for this reason.
    """
    found = [name for name in ("found_inf", "grad_scale") if name in vars(optimizer)]
    for name in found:
        delattr(optimizer, name)
    if found:
        raise RuntimeError(
            "an enabled GradScaler called step: hand it over as COST(scaler=scaler) and call optimizer.step(closure) "
            "yourself; scaling, unscaling, skipping and update happen inside"
        )


def is_on(scaler: Any) -> bool:
    """Whether there is a scaler that does something."""
    return scaler is not None and bool(scaler.is_enabled())


def scale_of(scaler: Any, base: Optimizer) -> Tensor | None:
    """The scaler's current factor [], or None without an enabled scaler."""
    if not is_on(scaler):
        return None
    factor: Tensor = scaler.scale(torch.ones((), device=held_by(base)[0].device))
    return factor


def step(scaler: Any, base: Optimizer) -> None:
    """``base.step()``, through the scaler where there is one.

    Gradients are unscaled and finite already: they are scaled once more (by a power of two, so exactly) for the
    scaler to do its part, and unscaled by it before the base's step hooks look at them.
    """
    factor = scale_of(scaler, base)
    if factor is None:
        base.step()
        return
    began = _begin_again_on_failure(scaler, factor)
    for p in held_by(base):
        if p.grad is not None:
            local(p.grad).mul_(factor.to(p.grad.device, p.grad.dtype))
    scaler.unscale_(base)
    scaler.step(base)
    scaler.update()
    began.drop()


def skip(scaler: Any, base: Optimizer) -> None:
    """Let the scaler see an overflow, so that it lowers its factor; the base optimizer does not step."""
    factor = scale_of(scaler, base)
    if factor is None:
        return
    began = _begin_again_on_failure(scaler, factor)
    p = next(p for p in held_by(base) if p.requires_grad)
    p.grad = torch.full_like(p, float("inf"))
    scaler.unscale_(base)
    scaler.update()
    p.grad = None
    began.drop()


def _begin_again_on_failure(scaler: Any, factor: Tensor) -> undoing:
    """What makes the scaler forget that this optimizer is unscaled, unless dropped: after an exception between
    ``unscale_`` and ``update`` (a step hook's, say) it would refuse every later step."""
    return undoing(lambda: scaler.update(new_scale=factor)).__enter__()

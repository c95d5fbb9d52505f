"""Historical trajectory reuse (HTR): what a base optimizer keeps of its history after a teleport.

Zhou et al. (COST, 2025), Eqns 12-13: for the first update after a teleport the decay rates beta become sigma * beta.
The official code does it by setting Adam's betas for one step, which also shifts its bias correction. Here the state
is edited in place instead, just before the base optimizer's own step and once its gradient y is known, so that the
step itself needs no change and any optimizer can be the base:

========================================  ==============================================================
state                                     edit (sigma = 1: none; sigma = 0: as if it had just started)
========================================  ==============================================================
average x <- beta x + (1 - beta) y        x <- sigma x + (1 - sigma) y, since beta (sigma x + (1 - sigma) y)
                                          + (1 - beta) y = sigma beta x + (1 - sigma beta) y
the same with bias correction             x <- sigma x + (1 - sigma) (1 - beta^(t-1)) y, t the coming step
buffer or sum x <- mu x + y               x <- sigma x
========================================  ==============================================================

============  =========================  =====================================  ===================================
optimizer     first moment               second moment (``"both"`` only)        inexact
============  =========================  =====================================  ===================================
SGD           momentum_buffer (buffer)
Adam, AdamW   exp_avg (corrected)        exp_avg_sq, max_exp_avg_sq (corrected)  amsgrad: the maximum is blended too
NAdam, RAdam  exp_avg (corrected)        exp_avg_sq (corrected)                 NAdam's mu_product is left alone
Adamax        exp_avg (corrected)        exp_inf <- sigma exp_inf               a maximum has no exact blend
RMSprop       momentum_buffer (buffer)   square_avg, grad_avg (average)         a centred grad_avg is half of a variance
Adagrad                                  sum (sum)                              the accumulator's initial value, too
Adadelta                                 square_avg (average)                   acc_delta is left alone
Muon          momentum_buffer (average)
Adafactor                                row_var, col_var, variance             scaled, not blended
ASGD, Rprop                                                                     no history of this kind: left alone
others        exp_avg, momentum_buffer   exp_avg_sq                             recognised by name and taken as above
============  =========================  =====================================  ===================================

Coupled weight decay and ``maximize`` are part of y, as in the optimizers themselves. Step counters, other parameters,
param groups and schedulers are never touched (``rollback_`` excepted, which is about the step counter).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from cost_mtl.gradients.reductions import LEAST, MOST, dot, norm, widest

HTR = Literal["gradient", "momentum", "paper", "rollback", "keep", "reset"]
POLICIES: tuple[HTR, ...] = ("gradient", "momentum", "paper", "rollback", "keep", "reset")

NEED_DIRECTION: tuple[HTR, ...] = ("paper", "momentum")
"""The policies that compare the move with the last step's direction, which then has to be kept ([m])."""

_CORRECTED = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam")
_SECOND_AVERAGES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
_DECOUPLED = ("AdamW", "Muon", "Adafactor")
_SCALED = ("exp_inf", "sum", "row_var", "col_var", "variance")


def sigma_for(policy: HTR, *, before: Tensor, after: Tensor, delta: Tensor, direction: Tensor | None) -> float:
    """HTR's sigma in [0, 1] for one teleport.

    Args:
        policy: ``"gradient"`` (default of COST): cos of the mean gradients before and after, on the same batch; it
            asks whether the history still points the way. ``"paper"``: cos(g', Delta theta), Eqn 12, measured to be
            noise around 0 in high dimension, so that it wipes the history, which hurt training in every setting tried.
            ``"momentum"``: cos(-g', Delta theta), the sign that the history really has. ``"rollback"``: sigma of
            ``"gradient"``. ``"keep"``: 1. ``"reset"``: 0. Negative cosines count as 0.
        before, after: mean gradient g_0 [m] before and after the teleport.
        delta: the move [m].
        direction: g' [m], the combined direction of the last ordinary step; None before the first.
    """
    if policy == "keep":
        return 1.0
    if policy == "reset":
        return 0.0
    if policy in ("gradient", "rollback"):
        return max(0.0, _cosine(before, after))
    if direction is None:
        return 1.0
    return max(0.0, _cosine(direction if policy == "paper" else -direction, delta))


def _cosine(a: Tensor, b: Tensor) -> float:
    lengths = [float(norm(x)) for x in (a, b)]
    if not all(LEAST < length < MOST for length in lengths):  # squares that leave the range of float32
        a, b = a.to(widest(a.device)), b.to(widest(b.device))
        lengths = [float(norm(x, exact=True)) for x in (a, b)]
    return float(dot(a, b)) / lengths[0] / lengths[1] if all(lengths) else 0.0


def apply_htr_(base: Optimizer, params: Sequence[Tensor], policy: HTR, sigma: float) -> None:
    """What the policy does with the history of some parameters, in place, before ``base.step()``; sigma in [0, 1]."""
    if policy == "rollback":
        rollback_(base, params, sigma)
    else:
        reuse_trajectory_(base, params, sigma, moments="both" if policy in ("paper", "reset") else "first")


def history_of(base: Optimizer, params: Sequence[Tensor]) -> Callable[[], None]:
    """What puts the base optimizer's state of some parameters back as it is now, in place."""
    kept = [(base.state[p], key, value, value.clone()) for p in params if p in base.state
            for key, value in base.state[p].items() if isinstance(value, Tensor)]  # fmt: skip

    def back() -> None:
        with torch.no_grad():
            for state, key, tensor, value in kept:
                tensor.copy_(value)
                state[key] = tensor

    return back


def reuse_trajectory_(
    base: Optimizer,
    params: Sequence[Tensor],
    sigma: float,
    *,
    moments: Literal["first", "both"] = "first",
) -> None:
    """Blend the base optimizer's history of some parameters towards their current ``.grad``, in place.

    Call it after the gradients of the coming update are in ``.grad`` and before ``base.step()``. Parameters without
    ``.grad`` or without state are left alone; so is everything when sigma = 1.

    Args:
        base: any ``torch.optim`` optimizer; the table at the top of this file says what is done to which state.
        params: the parameters whose history is edited (COST: the shared ones).
        sigma: in [0, 1].
        moments: ``"first"``: averages of gradients only. ``"both"``: averages of squared gradients as well, as
            published; wiping them was measured to raise the loss by 18 to 40 % for a while.

    Raises:
        ValueError: sigma outside [0, 1].
    """
    if not 0.0 <= sigma <= 1.0:
        raise ValueError(f"sigma: expected a number in [0, 1], got {sigma}")
    if moments not in ("first", "both"):
        raise ValueError(f"moments: expected 'first' or 'both', got {moments!r}")
    if sigma == 1.0:
        return
    name = type(base).__name__
    groups = {id(p): group for group in base.param_groups for p in group["params"]}
    with torch.no_grad():
        for p in params:
            state = base.state.get(p)
            if state and p.grad is not None and id(p) in groups:
                _blend(name, state, groups[id(p)], p, sigma, both=moments == "both")


def _blend(name: str, state: dict[str, Any], group: Mapping[str, Any], p: Tensor, sigma: float, *, both: bool) -> None:
    y = _update_input(name, group, p)
    beta1, beta2 = _betas(group)

    def average(key: str, beta: float, value: Tensor) -> None:
        mass = 1.0 - beta ** float(state["step"]) if name in _CORRECTED and "step" in state else 1.0
        state[key].mul_(sigma).add_(value.to(state[key].dtype), alpha=(1.0 - sigma) * mass)

    if "exp_avg" in state:
        average("exp_avg", beta1, y)
    if state.get("momentum_buffer") is not None:
        if name == "Muon":
            average("momentum_buffer", group["momentum"], y)
        else:
            state["momentum_buffer"].mul_(sigma)
    if not both:
        return
    if "grad_avg" in state:  # only together with square_avg: alone it could make the variance negative
        average("grad_avg", beta2, y)
    for key in _SECOND_AVERAGES:
        if key in state:
            average(key, beta2, y * y)
    for key in _SCALED:
        if isinstance(state.get(key), Tensor):
            state[key].mul_(sigma)


def _update_input(name: str, group: Mapping[str, Any], p: Tensor) -> Tensor:
    """y: the gradient as the base optimizer's averages will see it."""
    y = p.grad
    if y is None:
        raise RuntimeError("a parameter without .grad has no coming update")
    if y.is_sparse:
        y = y.to_dense()
    if group.get("maximize", False):
        y = -y
    decoupled = group.get("decoupled_weight_decay", name in _DECOUPLED)
    decay = group.get("weight_decay", 0)
    return y if decoupled or not decay else y.add(p, alpha=float(decay))


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    beta1, beta2 = group.get("betas", (0.9, group.get("alpha", group.get("rho", 0.999))))
    return float(beta1), float(beta2)


def rollback_(base: Optimizer, params: Sequence[Tensor], sigma: float) -> None:
    """HTR for the Adam family by turning its clock back: exact, bias correction included.

    The step count t becomes t' = log((1 - sigma) / (1 - sigma beta_1)) / log beta_1, at which the coming corrected
    first moment is sigma beta_1 of history and 1 - sigma beta_1 of gradient; both averages are rescaled by
    (1 - beta^t') / (1 - beta^t) so that their corrected values stay. Optimizers without ``step`` and ``exp_avg`` get
    :func:`reuse_trajectory_` (first moment) instead.
    """
    if not 0.0 <= sigma <= 1.0:
        raise ValueError(f"sigma: expected a number in [0, 1], got {sigma}")
    groups = {id(p): group for group in base.param_groups for p in group["params"]}
    if type(base).__name__ not in ("Adam", "AdamW"):
        reuse_trajectory_(base, params, sigma)
        return
    with torch.no_grad():
        for p in params:
            state = base.state.get(p)
            if state and id(p) in groups and sigma < 1.0:
                beta1, beta2 = _betas(groups[id(p)])
                t = float(state["step"])
                back = math.log((1 - sigma) / (1 - sigma * beta1)) / math.log(beta1)
                if back < t:
                    _set_clock(state, t, back, beta1, beta2)


def _set_clock(state: dict[str, Any], t: float, back: float, beta1: float, beta2: float) -> None:
    state["exp_avg"].mul_((1 - beta1**back) / (1 - beta1**t))
    for key in ("exp_avg_sq", "max_exp_avg_sq"):
        if key in state:
            state[key].mul_((1 - beta2**back) / (1 - beta2**t))
    state["step"].fill_(back)


def second_moment_root(base: Optimizer, params: Sequence[Tensor]) -> list[Tensor] | None:
    """Root of the base optimizer's second moment of each parameter, or None where it keeps none (or not yet).

    The scale that the optimizer itself divides by, up to a common factor: bias correction is not applied.
    """
    roots = []
    for p in params:
        state = base.state.get(p, {})
        if "exp_inf" in state:
            roots.append(state["exp_inf"])
            continue
        squares = next((state[k] for k in ("exp_avg_sq", "square_avg", "sum") if k in state), None)
        if squares is None:
            return None
        roots.append(squares.sqrt())
    return roots or None

"""How long the combined gradient d = G^T w is: rules that multiply the weights with one number, from M and w alone.

None of them changes the direction of d. 1 is the vector of ones, so ||G^T 1||^2 = 1' M 1 is the squared norm of the
plain sum's gradient, g_sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cost_mtl.base import ObservingWeighting, State, StatefulWeighting, Weighed, WeightingInputs
from cost_mtl.weighting import resolve

Rule = Callable[[Tensor, Tensor], Tensor]
"""(M [K, K], w [K]), both float64 -> weights [K], a multiple of w."""

_TINY = 1e-300
"""Keeps 0 / 0 at 0: a direction of length 0 stays one."""

_RIDGE = 1e-6
"""FairGrad's: where d is that much shorter (squared) than its parts, the digits of M do not say where it points."""


def length(M: Tensor, w: Tensor) -> Tensor:
    """||G^T w|| []."""
    return (w @ M @ w).clamp_min(0).sqrt()


def sum_length(M: Tensor) -> Tensor:
    """||G^T 1|| [], of the plain sum's gradient."""
    return M.sum().clamp_min(0).sqrt()


def with_length(M: Tensor, w: Tensor, wanted: Tensor) -> Tensor:
    return w * (wanted / length(M, w).clamp_min(_TINY))


def clipped(M: Tensor, w: Tensor, bound: Tensor) -> Tensor:
    return w * (bound / length(M, w).clamp_min(_TINY)).clamp_max(1)


def raw(M: Tensor, w: Tensor) -> Tensor:
    """What the method returns, with its own default scale."""
    return w


def clip1(M: Tensor, w: Tensor) -> Tensor:
    """||d|| at most 1: the official scripts' clipping."""
    return clipped(M, w, M.new_ones(()))


def mean(M: Tensor, w: Tensor) -> Tensor:
    """Weights that sum to 1."""
    return w / w.sum()


def total(M: Tensor, w: Tensor) -> Tensor:
    """Weights that sum to K, as the plain sum's do."""
    return w * (len(w) / w.sum())


def total_clip(M: Tensor, w: Tensor) -> Tensor:
    """Weights that sum to K, then ||d|| at most ||g_sum||."""
    return clipped(M, total(M, w), sum_length(M))


def clip(M: Tensor, w: Tensor) -> Tensor:
    """||d|| at most ||g_sum||, never raised to it."""
    return clipped(M, w, sum_length(M))


def match(M: Tensor, w: Tensor) -> Tensor:
    """||d|| = ||g_sum||."""
    return with_length(M, w, sum_length(M))


def trace(M: Tensor, w: Tensor) -> Tensor:
    """||d||^2 = sum_i ||g_i||^2: the plain sum's length if the gradients were orthogonal."""
    return with_length(M, w, M.diagonal().sum().sqrt())


def project(M: Tensor, w: Tensor) -> Tensor:
    """d is the projection of g_sum on its own direction: ||d|| = ||g_sum|| |cos(d, g_sum)|. Among all multiples of
    d the one closest to g_sum, and the longest for which a rate that the sum bears can't raise the sum of the losses
    (to second order, without momentum). It goes to 0 where d is nothing but cancellation."""
    parts = (w.square() * M.diagonal()).sum()
    return w * (M.sum(0) @ w).abs() / torch.maximum(w @ M @ w, _RIDGE * parts).clamp_min(_TINY)


def root(M: Tensor, w: Tensor) -> Tensor:
    """Half-way between ``match`` and ``project``: ||d|| = ||g_sum|| sqrt(|cos(d, g_sum)|)."""
    cosine = (M.sum(0) @ w).abs() / (length(M, w) * sum_length(M)).clamp_min(_TINY)
    return match(M, w) * cosine.sqrt()


def largest(M: Tensor, w: Tensor) -> Tensor:
    """The largest weight is 1, as in the sum: no task's rate is above what it is in the sum."""
    return w / w.abs().max()


RULES: Mapping[str, Rule] = {
    "raw": raw, "clip1": clip1, "mean": mean, "total": total, "total_clip": total_clip, "clip": clip, "match": match,
    "trace": trace, "project": project, "root": root, "largest": largest,
}  # fmt: skip


@dataclass(frozen=True)
class Scaled:
    """A weighting with one rule put behind it, which keeps a list of ||d|| / ||g_sum||.

    Attributes:
        inner: the weighting.
        rule: applied to its weights.
        ratios: one entry a step.
    """

    inner: StatefulWeighting
    rule: Rule
    ratios: list[float] = field(default_factory=list)

    def initial_state(self, num_tasks: int) -> State:
        return self.inner.initial_state(num_tasks)

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        weighed = self.inner.weigh(inputs, state)
        M = inputs.gramian.double()
        w = self.rule(M, weighed.weights.double())
        self.ratios.append(float(length(M, w) / sum_length(M)))
        return Weighed(w.to(weighed.weights.dtype), weighed.state, solver=weighed.solver)


@dataclass(frozen=True)
class ScaledObserving(Scaled):
    """The same for a weighting that looks at the losses after the update (FAMO)."""

    def observe(self, losses_after: Tensor, state: State) -> State:
        assert isinstance(self.inner, ObservingWeighting)
        return self.inner.observe(losses_after, state)


def scaled(weighting: Any, rule: str) -> Scaled:
    """``weighting``, whatever COST takes as one, with the rule of that name.

    Raises:
        ValueError: there is no such rule.
    """
    if rule not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, got {rule!r}")
    inner = resolve(weighting)
    kind = ScaledObserving if isinstance(inner, ObservingWeighting) else Scaled
    return kind(inner, RULES[rule])

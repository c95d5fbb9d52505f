"""The conflict objective: the smallest cosine between a task gradient and the mean gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_mtl.gradients.gramian import cosines, norms
from cost_mtl.teleport.base import Acceptance
from cost_mtl.teleport.objectives.base import ObjectiveContext, Slope, Wording
from cost_mtl.teleport.objectives.gradient_functions import finite_differences, slope_of

MARGIN = 0.03
"""Smallest cosine with the mean gradient that the objective aims for. Little, since the harm a move does to the losses
elsewhere grows faster than its length (docs/ablation.md), and not 0: where the landscape itself has the conflict
(examples/toy_pareto.py) a move to its very border has to be made again and again."""

LEAST_RISE = 0.06
"""Least rise of that cosine to aim for: twice what an accepted move has to gain."""

SOFTNESS = 0.03
"""Difference of two cosines at which the larger one counts 1/e as much."""

DEGENERATE = 0.2
"""Sine of the angle between g_i and g_0 below which the objective has (nearly) no gradient: at exactly opposite or
exactly equal directions a cosine is at its extremum."""


class ConflictGain:
    """What a conflict objective is judged by: the fall of :func:`largest_angle`, in radians. That is about the rise of
    the smallest cosine where that is near 0, and still meaningful near -1, where a cosine hardly moves."""

    name = "conflict"
    wording = Wording("the largest angle to the mean gradient", "{:+.4f} rad", "{:.3f}", falls=True)

    def gain(self, before: Tensor, after: Tensor, /) -> float:
        return largest_angle(before) - largest_angle(after)

    def least(self, rule: Acceptance, /) -> float:
        return rule.min_angle

    def tolerated(self, rule: Acceptance, /) -> float:
        return abs(rule.min_angle)


@dataclass(frozen=True)
class Conflict(ConflictGain):
    """phi = sum_i p_i cos(g_i, g_0), p from :func:`near_worst` and constant; its gradient by finite differences."""

    def slope(self, context: ObjectiveContext, /) -> Slope:
        return slope_of(self, context, finite_differences)

    def value(self, M: Tensor, /) -> float:
        return float((near_worst(M) * cosines(M)).sum())

    def coefficients(self, M: Tensor, /) -> Tensor:
        """With c_i = cos(g_i, g_0) and unit vectors e: d cos_i / d g_0 = (e_i - c_i e_0) / ||g_0|| reaches every g_j
        with 1/K, and g_i itself with (e_0 - c_i e_i) / ||g_i|| as well."""
        K = len(M)
        p, c, n = near_worst(M), cosines(M), norms(M)
        n_0 = M.sum().clamp_min(0).sqrt() / K
        q = torch.where(n > 0, p / torch.where(n > 0, n, 1.0), 0.0)
        through_mean = q / (K * n_0) - (p * c).sum() / (K * K * n_0**2)
        itself = q / (K * n_0)
        A = through_mean.expand(K, K) + itself[:, None]
        return A - torch.diag(torch.where(n > 0, q * c / torch.where(n > 0, n, 1.0), 0.0))

    def wanted(self, M: Tensor, /) -> float:
        """The conflict resolved with a margin."""
        return max(MARGIN - float(cosines(M)[worst_task(M)]), LEAST_RISE)

    def rate(self, M: Tensor, /) -> float:
        """d angle = d cos / sin."""
        return 1 / max(math.sin(largest_angle(M)), DEGENERATE)

    def has_slope(self, M: Tensor, /) -> bool:
        """Whether phi has a usable gradient: there are two tasks, and no worst cosine at its extremum."""
        c = float(cosines(M)[worst_task(M)])
        return len(M) > 1 and (1 - c * c) ** 0.5 >= DEGENERATE


def worst_task(M: Tensor) -> int:
    """The task with the smallest cosine with the mean gradient, among those with a gradient."""
    active = norms(M) > 0
    return int(torch.where(active, cosines(M), torch.inf).argmin())


def near_worst(M: Tensor) -> Tensor:
    """Weights p [K], summing to 1, of the tasks whose cosine is near the smallest: a soft minimum, cut to the few that
    matter. Raising one cosine alone would only hand its place to the next one."""
    c = torch.where(norms(M) > 0, cosines(M), torch.inf)
    p = torch.exp(-(c - c.min()) / SOFTNESS)
    p = torch.where(p >= 0.1, p, 0.0)
    return p / p.sum()


def largest_angle(M: Tensor) -> float:
    """Largest angle between a task gradient and the mean gradient, in radians, over the tasks with a gradient."""
    c = cosines(M)[M.diagonal() > 0]
    return math.acos(max(-1.0, min(1.0, float(c.min())))) if len(c) else 0.0

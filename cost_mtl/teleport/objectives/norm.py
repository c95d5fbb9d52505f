"""The norm objective: balanced task gradient norms, the paper's aim (COST, Eqn 10)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cost_mtl.gradients.gramian import norms
from cost_mtl.teleport.base import Acceptance
from cost_mtl.teleport.objectives.base import ObjectiveContext, Slope, Wording
from cost_mtl.teleport.objectives.gradient_functions import finite_differences, slope_of

AIM = 0.1
"""Relative rise of the balanced gradient norms to aim for."""


class NormGain:
    """What a norm objective is judged by: the R-weighted geometric mean of the norm ratios minus 1 (relative), R from
    :func:`balance` before the move. Tasks without a gradient do not count."""

    name = "norm"
    wording = Wording("the balanced gradient norms", "{:+.2%}", "{:.1%}")

    def gain(self, before: Tensor, after: Tensor, /) -> float:
        active = before.diagonal() > 0
        R = balance(before)[active]
        ratios = norms(after)[active].log() - norms(before)[active].log()
        return float(((R * ratios).sum() / R.sum()).exp() - 1)

    def least(self, rule: Acceptance, /) -> float:
        return rule.min_norm

    def tolerated(self, rule: Acceptance, /) -> float:
        return abs(rule.min_norm)


@dataclass(frozen=True)
class Norm(NormGain):
    """phi = sum_i R_i log ||g_i||, R from :func:`balance` and constant; its gradient by finite differences."""

    def slope(self, context: ObjectiveContext, /) -> Slope:
        return slope_of(self, context, finite_differences)

    def value(self, M: Tensor, /) -> float:
        active = M.diagonal() > 0
        return float((balance(M) * norms(M).log())[active].sum())

    def coefficients(self, M: Tensor, /) -> Tensor:
        """a_i = R_i g_i / ||g_i||^2."""
        squares = M.diagonal()
        positive = squares > 0
        return torch.diag(torch.where(positive, balance(M) / torch.where(positive, squares, 1.0), 0.0))

    def wanted(self, M: Tensor, /) -> float:
        """Clearly larger norms."""
        return AIM * float(balance(M).sum())

    def rate(self, M: Tensor, /) -> float:
        """The weights R do not sum to 1."""
        return 1 / float(balance(M).sum())

    def has_slope(self, M: Tensor, /) -> bool:
        """Always."""
        return True


def balance(M: Tensor) -> Tensor:
    """R_i = K (1 - ||g_i|| / sum_j ||g_j||) [K]: tasks with a small gradient count more (COST, Eqn 10)."""
    lengths = norms(M)
    total = lengths.sum()
    if not total > 0:
        return torch.ones_like(lengths)
    return len(M) * (1 - lengths / total) if len(M) > 1 else torch.ones_like(lengths)

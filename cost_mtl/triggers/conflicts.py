"""Conflict conditions, one class each. All depend on the Gramian alone: g_i^T g_0 = (M 1)_i / K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cost_mtl._validation import one_of, share
from cost_mtl.gradients.gramian import cosines, norms


def conflicts_with_mean(gramian: Tensor) -> Tensor:
    """[K] bool: cos(g_i, g_0) < 0. A task with zero gradient is never in conflict."""
    return cosines(gramian) < 0


@dataclass(frozen=True)
class DominatedConflict:
    """A task whose gradient points against the mean gradient g_0 (COST, Zhou et al. 2025).

    Args:
        rule: ``"any"`` (default): some task has cos(g_i, g_0) < 0, the rule of the official code, with which the
            published tables were made. ``"smallest"``: the task with the smallest gradient norm has it, the paper's
            Eqn 3; a subset of the former. Tasks with zero gradient are passed over in both, and exactly 0 is no
            conflict (the official code's <= 0 fires on a task without labels in the batch).

    Example:
        >>> M = torch.tensor([[1.0, -2.0], [-2.0, 9.0]])  # task 0 points against the mean gradient
        >>> DominatedConflict()(M), DominatedConflict(rule="smallest")(M)
        (True, True)
        >>> DominatedConflict()(torch.eye(2))
        False
    """

    rule: Literal["any", "smallest"] = "any"

    def __post_init__(self) -> None:
        one_of("rule", self.rule, ("any", "smallest"))

    def __call__(self, gramian: Tensor, /) -> bool:
        conflict = conflicts_with_mean(gramian)
        if self.rule == "any":
            return bool(conflict.any())
        lengths = norms(gramian)
        smallest = torch.where(lengths > 0, lengths, torch.inf).argmin()
        return bool(conflict[smallest])


@dataclass(frozen=True)
class WeakConflict:
    """Two tasks whose gradients point against each other: cos(g_i, g_j) < 0 for some pair.

    Example:
        >>> WeakConflict()(torch.tensor([[1.0, -0.5], [-0.5, 4.0]]))
        True
    """

    def __call__(self, gramian: Tensor, /) -> bool:
        return bool((gramian < 0).any())


@dataclass(frozen=True)
class ConflictShare:
    """At least a share of the tasks conflicts with the mean gradient (COST paper, Eqn 4, for many tasks).

    With 40 tasks some task conflicts in nearly every step (97 % on CelebA), so that :class:`DominatedConflict` says
    nothing.

    Args:
        share: in (0, 1]; default 0.5. Tasks with zero gradient count neither way.

    Example:
        >>> M = torch.tensor([[1.0, -2.0], [-2.0, 9.0]])  # one task of two points against the mean gradient
        >>> ConflictShare(0.5)(M), ConflictShare(0.6)(M)
        (True, False)
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        share("share", self.share, zero=False)

    def __call__(self, gramian: Tensor, /) -> bool:
        active = int((gramian.diagonal() > 0).sum())
        return active > 0 and int(conflicts_with_mean(gramian).sum()) >= self.share * active

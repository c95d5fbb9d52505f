"""IMTL-G: a direction with the same projection on every task's gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cost_mtl.base import Solution
from cost_mtl.weighting._arrays import Array
from cost_mtl.weighting._problem import (
    CONVERGED,
    STATIONARY,
    Answer,
    Problem,
    Scale,
    Solver,
    check_scale,
    solve,
)
from cost_mtl.weighting._reference import equal_projections_reference

__all__ = ["IMTLG"]

_RIDGE = 1e-8
_ACCURATE = 1e-6


@dataclass(frozen=True)
class IMTLG:
    """IMTL-G (Liu et al., "Towards Impartial Multi-task Learning", ICLR 2021): g_i^T d / ||g_i|| is the same for all i.

    With C the matrix of cosines and w_i = v_i / ||g_i||, that is C v = const; the weights sum to 1, as in the paper,
    and can be negative. Where C is singular but the equation solvable (duplicated tasks), the v of least norm is taken.
    Status "stationary": no direction has equal projections other than zero; the weights are finite, sum to 1, and mean
    little. The residual is max |C v - 1|. A task with a zero gradient gets the mean weight of the others, which are
    solved as if it were absent; all-zero M: 1/K each.

    Args:
        scale: ``"raw"`` or ``"mean"`` (default ``"raw"``): sum 1; ``"sum"``, ``"tasks"``: sum K.
        max_norm: bound on ||G^T w||, None for none.
        solver: ``"auto"``, ``"host"`` or ``"device"``; ``"cvxpy"`` stands for a pseudo-inverse here.
    """

    scale: Scale = "raw"
    max_norm: float | None = None
    solver: Solver = "auto"

    def __post_init__(self) -> None:
        check_scale(self.scale, self.max_norm, self.solver)

    def __call__(self, gramian: Tensor) -> Tensor:
        """Weights [K] for the Gramian [K, K], in its dtype, on its device."""
        return self.solve(gramian).weights

    def solve(self, gramian: Tensor) -> Solution:
        """Weights [K] and how the solve went."""
        return solve(gramian, _weights, equal_projections_reference, self.scale, self.max_norm, self.solver)


def _weights(problem: Problem) -> Answer:
    arrays, M = problem.arrays, problem.M
    K = len(M)
    diagonal = M.diagonal()
    present = diagonal > 0
    inverse = arrays.where(present, 1 / arrays.where(present, diagonal, 1.0) ** 0.5, 0.0)
    C = arrays.add_diagonal(inverse[:, None] * M * inverse, arrays.where(present, 0.0, 1.0))
    ones = M[0] * 0 + 1
    ridge = max(_RIDGE, 4 * K * problem.noise)
    regularised = arrays.solver(arrays.add_diagonal(C, ridge * ones))
    v = regularised(ones)
    for _ in range(
        3
    ):  # refinement: the ridge's error shrinks by ridge / eigenvalue each time, null directions stay out
        v = v + regularised(ones - C @ v)
    w = arrays.where(present, inverse * v, 0.0)
    residual: Array = abs(C @ v - 1).max()
    # The sum can vanish without any of the weights doing so; the sum of their sizes cannot.
    total, size = w.sum(), abs(w).sum()
    degenerate = (abs(total) <= 1e-10 * size) | (residual > _ACCURATE)
    w = w / arrays.where(abs(total) > 1e-10 * size, total, arrays.where(size > 0, size, 1.0))
    count = arrays.at_least(arrays.where(present, 1.0, 0.0).sum(), 1.0)
    w = arrays.where(present, w, arrays.where(present.any(), w.sum() / count, 1 / K))
    return Answer(w, residual, arrays.scalar(0), arrays.where(degenerate, STATIONARY, CONVERGED))

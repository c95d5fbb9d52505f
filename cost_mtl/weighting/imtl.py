"""IMTL-G: a direction with the same projection on every task's gradient."""

from __future__ import annotations

from dataclasses import dataclass

from cost_mtl.weighting._arrays import Array
from cost_mtl.weighting._problem import CONVERGED, STATIONARY, Answer, Problem, SolvedWeighting
from cost_mtl.weighting._reference import equal_projections_reference

__all__ = ["IMTLG"]

_RIDGE = 1e-8
_ACCURATE = 1e-6


@dataclass(frozen=True)
class IMTLG(SolvedWeighting):
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

    def _method(self, problem: Problem) -> Answer:
        return _equal_projections(problem)

    def _reference(self, M: Array) -> Array:
        return equal_projections_reference(M)


def _equal_projections(problem: Problem) -> Answer:
    arrays, K = problem.arrays, len(problem.M)
    unit, ones = problem.units(), problem.ones()
    C, ridge = unit.cosines, max(_RIDGE, 4 * K * problem.noise)
    regularised = arrays.solver(arrays.add_diagonal(C, ridge * ones))
    v = regularised(ones)
    for _ in range(3):  # refinement: the ridge's error shrinks by ridge / eigenvalue, null directions stay out
        v = v + regularised(ones - C @ v)
    w = unit.inverse * v
    residual: Array = abs(C @ v - 1).max()
    # The sum can vanish without any of the weights doing so; the sum of their sizes cannot.
    total, size = w.sum(), abs(w).sum()
    vanishing = abs(total) <= 1e-10 * size
    w = w / arrays.where(vanishing, arrays.where(size > 0, size, 1.0), total)
    code = arrays.where(vanishing | (residual > _ACCURATE), STATIONARY, CONVERGED)
    return Answer(problem.filled(w, unit.present, 1 / K), residual, arrays.scalar(0), code)

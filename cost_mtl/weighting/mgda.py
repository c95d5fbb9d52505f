"""MGDA: the shortest vector in the convex hull of the task gradients."""

from __future__ import annotations

from dataclasses import dataclass

from cost_mtl.weighting._arrays import Array
from cost_mtl.weighting._constraint import ABSENT, on_plane
from cost_mtl.weighting._interior import ITERATIONS, solve_interior
from cost_mtl.weighting._problem import CONVERGED, NOT_CONVERGED, STATIONARY, Answer, Problem, SolvedWeighting
from cost_mtl.weighting._reference import min_norm_reference

__all__ = ["MGDA", "min_norm"]

_STATIONARY_NORM = 1e-12
"""Unit gradients that combine, with coefficients of norm 1, to a squared norm below this are stationary."""

_ACCURATE = 1e-8


def min_norm(problem: Problem) -> Answer:
    """lambda >= 0, sum lambda = 1, of least ||sum lambda_i g_i||, over the tasks whose gradient is not zero.

    Tasks with a zero gradient get 0 (with them the least norm is always 0, and tells nothing); if all are zero, each
    gets 1/K. The residual is the relative duality gap.
    """
    arrays, K, noise = problem.arrays, len(problem.M), problem.noise
    unit = problem.units(diagonal=4 * K * noise)
    present, C = unit.present, unit.cosines
    a = arrays.where(present, unit.shortest / unit.norms, ABSENT)
    point = solve_interior(arrays, C, a * 0, a, on_plane(arrays, a), 1e-13, ITERATIONS)
    weights = arrays.where(present, point.q * a, 0.0)
    weights = arrays.where(present.any(), weights / weights.sum(), 1 / K)
    stationary = point.q @ (C @ point.q) < max(_STATIONARY_NORM, 16 * K * noise) * (point.q @ point.q)
    converged = arrays.where(point.error < _ACCURATE, CONVERGED, NOT_CONVERGED)
    return Answer(weights, point.error, point.iterations, arrays.where(stationary, STATIONARY, converged))


@dataclass(frozen=True)
class MGDA(SolvedWeighting):
    """The multiple-gradient descent algorithm (Desideri 2012; Sener & Koltun, NeurIPS 2018, arXiv 1810.04650, Eqn 3).

    The weights are non-negative, sum to 1 and make ||sum_i w_i g_i|| as small as it can be. Where Sener and Koltun take
    250 Frank-Wolfe steps, whose last digits are slow, the problem is solved to a relative duality gap below 1e-8
    (usually 1e-13): the residual in the report. Status "stationary": the least norm is zero, the optimum all the same.

    A task with a zero gradient gets weight 0 and the others are solved without it (with it the least norm is 0).

    Args:
        scale: see :data:`~cost_mtl.weighting._problem.Scale`; ``"raw"`` (default) is the paper's, as is ``"mean"``.
        max_norm: bound on ||G^T w||, None for none.
        solver: ``"auto"``, ``"host"``, ``"device"`` or the slow reference ``"cvxpy"``.
    """

    def _method(self, problem: Problem) -> Answer:
        return min_norm(problem)

    def _reference(self, M: Array) -> Array:
        return min_norm_reference(M)

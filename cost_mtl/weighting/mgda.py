"""MGDA: the shortest vector in the convex hull of the task gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cost_mtl.weighting._solvers.nonnegative import hull_distance, shortest
from cost_mtl.weighting._solvers.problem import (
    CONVERGED,
    DETERMINED,
    NOT_CONVERGED,
    STATIONARY,
    Answer,
    Problem,
    SolvedWeighting,
)

__all__ = ["MGDA", "min_norm"]

_STATIONARY_NORM = 1e-12
"""Unit gradients whose convex hull has a squared distance from 0 below this are stationary."""

_ACCURATE = 1e-8


def min_norm(problem: Problem) -> Answer:
    """lambda >= 0, sum lambda = 1, of least ||sum lambda_i g_i||, over the tasks whose gradient is not zero.

    Tasks with a zero gradient get 0 (with them the least norm is always 0, and tells nothing). The residual is the
    relative duality gap.
    """
    C, norms, noise = problem.cosines, problem.norms, problem.noise
    a = norms.min() / norms
    found = shortest(C, a)
    weights = found.u * a
    weights /= weights.sum()
    # No unit gradient gains less than this along the shortest vector, so their hull is at least as far from 0:
    distance = max(found.square**0.5 * float(a.min()) - found.error, 0.0) ** 2
    if distance <= max(_STATIONARY_NORM, noise / DETERMINED):
        distance = hull_distance(C)
    stationary = distance <= max(_STATIONARY_NORM, noise / DETERMINED)
    rounding = noise / max(distance, noise)
    accurate = found.error < max(_ACCURATE, 4 * len(problem) * rounding)
    code = STATIONARY if stationary else CONVERGED if accurate else NOT_CONVERGED
    return Answer(problem.filled(weights, 0.0), found.error, found.rounds, code, rounding)


@dataclass(frozen=True)
class MGDA(SolvedWeighting):
    """The multiple-gradient descent algorithm (Desideri 2012; Sener & Koltun, NeurIPS 2018, arXiv 1810.04650, Eqn 3).

    The weights are non-negative, sum to 1 and make ||sum_i w_i g_i|| as small as it can be. Where Sener and Koltun take
    250 Frank-Wolfe steps, whose last digits are slow, the problem is solved by an active set method, to a relative
    duality gap below 1e-8 (usually 1e-14; more only where M's rounding errors weigh more): the residual in the report.
    Status "stationary": the unit gradients can be combined to zero, up to 1e-12 of their squared lengths or to what M's
    digits tell; the least norm is then zero, and the weights are the optimum all the same.

    A task with a zero gradient gets weight 0 and the others are solved without it (with it the least norm is 0).

    Args:
        scale: ``"raw"`` (default, the paper's) or ``"mean"``: sum 1; ``"sum"`` or ``"tasks"``: sum K.
            ``"project"``: a length of d for which the learning rate of the plain sum keeps working
            (docs/default_scale.md).
        max_norm: bound on ||G^T w||, None for none.

    Example:
        >>> M = torch.tensor([[1.0, -0.5], [-0.5, 4.0]], dtype=torch.float64)  # Gramian of two tasks in conflict
        >>> MGDA()(M)
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """

    _sums_to_one: ClassVar[bool] = True

    def _method(self, problem: Problem) -> Answer:
        return min_norm(problem)

"""FairGrad: alpha-fair shares of the improvement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from cost_mtl.base import Solution
from cost_mtl.weighting._arrays import Array
from cost_mtl.weighting._fairness import RIDGE, solve_fairness
from cost_mtl.weighting._problem import CONVERGED, Answer, Problem, Scale, Solver, check_scale, solve
from cost_mtl.weighting._reference import fairness_reference, min_norm_reference
from cost_mtl.weighting.mgda import min_norm

__all__ = ["FairGrad"]

_SMALLEST, _LARGEST = 0.05, 20.0


@dataclass(frozen=True)
class FairGrad:
    """FairGrad (Ban & Ji, ICML 2024, arXiv 2402.15638): d maximises the alpha-fair utility of the rates g_i^T d.

    The weights solve M w = w^(-1/alpha) elementwise (their Eqn 4), to a relative residual max_i |w_i^(1/alpha) (M w)_i
    - 1| below 1e-6, usually 1e-13. Where the authors take SciPy's least squares from w = 1/K, which is silently wrong
    once the task gradients differ in scale by 1e3, a damped Newton method solves the scaled equation (see
    _fairness.py). M -> s M gives w -> s^(-alpha / (1 + alpha)) w.

    Near a Pareto-stationary point (a convex combination of the gradients vanishes) no finite solution exists, or none
    that M's digits determine. The weights are then those of M + 1e-6 diag(M) and the status is "stationary".
    A task with a zero gradient (no labels in this batch) gets the mean weight of the others, which are solved as if it
    were absent; if all gradients are zero, the weights are ones.

    Args:
        alpha: 1: proportional fairness, Nash-MTL's equation; 2 (default): the authors' scripts. 0: linear
            scalarisation, all ones, the limit. ``math.inf``: max-min fairness, M w >= 1 with equality where w_i > 0,
            which is MGDA's direction over its squared norm. Otherwise 0.05 to 20, beyond which float64 cannot tell the
            weights from those limits.
        scale: ``"raw"`` (default): the solution itself; ``"tasks"``: times K; ``"sum"``, ``"mean"``: weights that sum
            to K or to 1.
        max_norm: bound on ||G^T w||, applied after ``scale``; None (default) for none. It is the clipping of the shared
            gradient that the authors' scripts do, taken from the Gramian.
        solver: ``"auto"``, ``"host"``, ``"device"`` or the slow reference ``"cvxpy"``.

    Raises:
        ValueError: a setting is out of range.
    """

    alpha: float = 2.0
    scale: Scale = "raw"
    max_norm: float | None = None
    solver: Solver = "auto"

    def __post_init__(self) -> None:
        if self.alpha not in (0, math.inf) and not _SMALLEST <= self.alpha <= _LARGEST:
            raise ValueError(
                f"alpha must be 0 (linear scalarisation), {_SMALLEST} to {_LARGEST}, or inf (max-min fairness), "
                f"got {self.alpha!r}"
            )
        check_scale(self.scale, self.max_norm, self.solver)

    @classmethod
    def official(cls, alpha: float = 2.0) -> FairGrad:
        """The recipe of the authors' scripts: times K, then the shared gradient clipped to norm 1."""
        return cls(alpha=alpha, scale="tasks", max_norm=1.0)

    @classmethod
    def libmtl(cls, alpha: float) -> FairGrad:
        """LibMTL's: the raw solution, neither times K nor clipped; its scripts set alpha."""
        return cls(alpha=alpha)

    def __call__(self, gramian: Tensor) -> Tensor:
        """Weights [K] for the Gramian [K, K], in its dtype, on its device."""
        return self.solve(gramian).weights

    def solve(self, gramian: Tensor) -> Solution:
        """Weights [K] and how the solve went."""
        if self.alpha == 0:
            method, reference = _ones, _ones_reference
        elif self.alpha == math.inf:
            method, reference = _max_min, _max_min_reference
        else:
            method = partial(solve_fairness, alpha=self.alpha)
            reference = partial(fairness_reference, alpha=self.alpha)
        return solve(gramian, method, reference, self.scale, self.max_norm, self.solver)


def _ones(problem: Problem) -> Answer:
    zero = problem.arrays.scalar(0.0)
    return Answer(problem.M[0] * 0 + 1, zero, zero, problem.arrays.scalar(CONVERGED))


def _ones_reference(M: Array) -> Array:
    return M[0] * 0 + 1


def _max_min(problem: Problem) -> Answer:
    """MGDA's weights over the squared norm of its direction, which is kept from vanishing as in the finite case."""
    arrays, M = problem.arrays, problem.M
    answer = min_norm(problem)
    w, diagonal = answer.weights, M.diagonal()
    present = diagonal > 0
    smallest = arrays.where(present, diagonal, diagonal.max()).min()
    divisor = arrays.at_least(w @ (M @ w), RIDGE * smallest)
    w = w / arrays.where(present.any(), divisor, 1 / len(M))
    mean = w.sum() / arrays.at_least(arrays.where(present, 1.0, 0.0).sum(), 1.0)
    return Answer(
        arrays.where(present, w, arrays.where(present.any(), mean, 1.0)),
        answer.residual,
        answer.iterations,
        answer.code,
    )


def _max_min_reference(M: Array) -> Array:
    w = min_norm_reference(M)
    return w / (w @ M @ w)

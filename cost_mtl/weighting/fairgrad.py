"""FairGrad: alpha-fair shares of the improvement."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from cost_mtl._validation import is_number
from cost_mtl.weighting._solvers.fairness import RIDGE, solve_fairness
from cost_mtl.weighting._solvers.problem import STATIONARY, Answer, Problem, SolvedWeighting
from cost_mtl.weighting.mgda import min_norm

__all__ = ["FairGrad"]

_SMALLEST, _LARGEST = 0.05, 20.0


@dataclass(frozen=True)
class FairGrad(SolvedWeighting):
    """FairGrad (Ban & Ji, ICML 2024, arXiv 2402.15638): d maximises the alpha-fair utility of the rates g_i^T d.

    The weights solve M w = w^(-1/alpha) elementwise (their Eqn 4), to a relative residual max_i |w_i^(1/alpha) (M w)_i
    - 1| below 1e-6, usually 1e-13. Where the authors take SciPy's least squares from w = 1/K, which is silently wrong
    once the task gradients differ in scale by 1e3, a damped Newton method solves the scaled equation (see
    _fairness.py). M -> s M gives w -> s^(-alpha / (1 + alpha)) w.

    Near a Pareto-stationary point (a convex combination of the gradients vanishes) no finite solution exists, or none
    that M's digits determine to 1 %. The weights are then those of M + ridge diag(M), ridge = 1e-6 or 4 K times M's
    rounding error where that is more, and the status is "stationary". For alpha >= 1 they are bounded: sum_i M_ii w_i^2
    is at most ridge^(-2 alpha / (1 + alpha)) times what it would be if each task were alone.

    With alpha < 1 or norms spread over many decades a rate (M w)_i can be smaller than the rounding of its terms
    although the weights are known to many digits. The residual is then taken relative to that rounding, 1e-9 K of the
    terms. Status "not_converged": the residual stayed above 1e-6, or M's rounding errors may change a weight by more
    than 1 % (equal tasks with small alpha, say, between which nothing decides).

    Hand in float64, as ``COST`` does: the weights come back in M's dtype, and the report's residual is that of the
    float64 weights before they are rounded to it. Where plain rounding to float32 would spoil the equation, digits that
    do not are looked for (see _rounding.py): on the Gramians of benchmarks/weightings.py, K = 2 to 100, float32 weights
    keep the residual below 1e-4 in all 45 cases for alpha = 1 and in 43 for alpha = 2 (conflicting gradients with norms
    over 1e6, K = 40 and 100: 1.4e-4 and 2.1e-4). Other alphas amplify rounding more: for 0.5 and 5 it is above 1e-4 in
    17 cases of 90, all with norms spread over 1e6 or more. Half precision has three or four digits anyway.

    A task with a zero gradient (no labels in this batch) gets the mean weight of the others, which are solved as if it
    were absent; if all gradients are zero, the weights are ones.

    Args:
        alpha: 1: proportional fairness, Nash-MTL's equation; 2 (default): the authors' scripts. 0: linear
            scalarisation, all ones, the limit. ``math.inf``: max-min fairness, M w >= 1 with equality where w_i > 0
            (to the rounding of the terms), which is MGDA's direction over its squared norm; a squared norm below 1e-6
            of the shortest gradient's counts as that and as stationary. Otherwise 0.05 to 20, beyond which float64
            cannot tell the weights from those limits.
        scale: ``"raw"`` (default): the solution itself; ``"tasks"``: times K; ``"sum"``, ``"mean"``: weights that sum
            to K or to 1. ``"project"``: a length of d for
            which the learning rate of the plain sum keeps working (docs/default_scale.md).
        max_norm: bound on ||G^T w||, applied after ``scale``; None (default) for none. It is the clipping of the shared
            gradient that the authors' scripts do, taken from the Gramian.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> M = torch.tensor([[1.0, -0.5], [-0.5, 4.0]], dtype=torch.float64)  # Gramian of two tasks in conflict
        >>> w = FairGrad(alpha=2.0)(M)
        >>> torch.allclose(M @ w, w**-0.5)
        True
        >>> round(float(FairGrad(alpha=2.0, scale="mean")(M).sum()), 6)
        1.0
    """

    alpha: float = 2.0
    _keeps_rates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        limit = is_number(self.alpha) and self.alpha in (0, math.inf)
        if not limit and not (is_number(self.alpha) and _SMALLEST <= self.alpha <= _LARGEST):
            raise ValueError(
                f"alpha: expected 0 (linear scalarisation), a number from {_SMALLEST} to {_LARGEST}, or inf (max-min "
                f"fairness), got {self.alpha!r}"
            )
        super().__post_init__()

    @classmethod
    def official(cls, alpha: float = 2.0) -> FairGrad:
        """The recipe of the authors' scripts: times K, then the shared gradient clipped to norm 1."""
        return cls(alpha=alpha, scale="tasks", max_norm=1.0)

    @classmethod
    def libmtl(cls, alpha: float) -> FairGrad:
        """LibMTL's: the raw solution, neither times K nor clipped; its scripts set alpha."""
        return cls(alpha=alpha)

    def _method(self, problem: Problem) -> Answer:
        if self.alpha == 0:
            return Answer(np.ones(len(problem.present)))
        return _max_min(problem) if self.alpha == math.inf else solve_fairness(problem, self.alpha)


def _max_min(problem: Problem) -> Answer:
    """MGDA's weights over the squared norm of its direction, which is kept from vanishing as in the finite case."""
    answer = min_norm(problem)
    w = answer.weights[problem.present]
    square, least = float(w @ (problem.M @ w)), RIDGE * float(problem.norms.min()) ** 2
    code = STATIONARY if square < least else answer.code
    return replace(answer, weights=problem.filled(w / max(square, least)), code=code)

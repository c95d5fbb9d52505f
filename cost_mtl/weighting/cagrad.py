"""CAGrad: the direction near the mean gradient that serves the worst-off task best."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from cost_mtl._validation import finite, one_of
from cost_mtl.weighting._solvers.interior import InteriorPoint, solve_ball
from cost_mtl.weighting._solvers.matrix import Array, add_diagonal
from cost_mtl.weighting._solvers.nonnegative import hull_distance
from cost_mtl.weighting._solvers.problem import (
    CONVERGED,
    DETERMINED,
    NOT_CONVERGED,
    STATIONARY,
    Answer,
    Problem,
    Scale,
    SolvedWeighting,
)

__all__ = ["CAGrad"]

_ACCURATE = 1e-6
_RIDGE = 1e-8
_STATIONARY_NORM = 1e-10
"""Unit gradients that combine, with coefficients of norm 1, to a squared norm below this are stationary."""


@dataclass(frozen=True)
class CAGrad(SolvedWeighting):
    """Conflict-averse gradient descent (Liu et al., NeurIPS 2021, arXiv 2110.14048).

    d = argmax min_i g_i^T d  subject to  ||d - g_0|| <= c ||g_0||,  with g_0 the mean gradient. Through the dual, min
    over the simplex of g_w^T g_0 + c ||g_0|| ||g_w||, d = g_0 + c ||g_0|| g_w / ||g_w||. The weights w [K] returned
    give G^T w = K d / (1 + c^2) with the defaults: the official code's direction, times K "to match the sum of the
    losses".

    Solved to 1e-6 of the terms of the dual at worst, usually 1e-13, which is the residual in the report, with no
    absolute epsilon: scaling the losses by 1e-8 or 1e8 scales d and leaves w as it is. ||d|| >= (1 - c) ||g_0||; c = 0
    is the mean gradient; for c -> infinity d points along MGDA's.

    Status "stationary", up to what M's digits determine to 1 %:

    - g_0 = 0: then d = g_0.
    - c >= 1 and the gradients can be combined to zero: the maximum is 0 and reached by many d. The answer is one that
      no task objects to, the nearest to g_0 up to 1e-4 of its length (a few percent with norms spread over 1e3).
    - d = 0 (c >= 1): what is left of d is rounding.

    Differs from the official code, which stops SciPy's SLSQP at its default tolerance and adds 1e-8 to the norms. A
    task with a zero gradient takes part in g_0 but not in the minimum.

    Args:
        c: radius of the ball, c >= 0. 0.4 is the paper's for NYUv2 (CityScapes: 0.4 or 0.6).
        rescale: 0: d; 1 (default, the official scripts'): d / (1 + c^2); 2: d / (1 + c).
        scale: ``"tasks"`` (default): times K; ``"raw"``: the direction itself; ``"sum"``, ``"mean"``: weights that sum
            to K or 1. ``"project"``: a length of d for
            which the learning rate of the plain sum keeps working (docs/default_scale.md).
        max_norm: bound on ||G^T w||, None (default) for none.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> M = torch.tensor([[1.0, -0.5], [-0.5, 4.0]], dtype=torch.float64)  # Gramian of two tasks in conflict
        >>> CAGrad(c=0.0, rescale=0)(M)  # the mean gradient, times K
        tensor([1., 1.], dtype=torch.float64)
        >>> bool((M @ CAGrad(c=0.4)(M) > 0).all())  # no loss rises
        True
    """

    c: float = 0.4
    rescale: int = 1
    scale: Scale = field(default="tasks", kw_only=True)

    def __post_init__(self) -> None:
        finite("c", self.c, least=0)
        one_of("rescale", self.rescale, (0, 1, 2))
        super().__post_init__()

    @classmethod
    def official(cls, c: float = 0.4) -> CAGrad:
        """The recipe of the authors' scripts: K d / (1 + c^2), no clipping. It is the default."""
        return cls(c=c)

    @classmethod
    def libmtl(cls, c: float = 0.5) -> CAGrad:
        """LibMTL's: d / (1 + c^2) without the factor K, c = 0.5."""
        return cls(c=c, scale="raw")

    def _method(self, problem: Problem) -> Answer:
        answer = _direction(problem, self.c)
        return replace(answer, weights=self._rescaled(answer.weights))

    def _rescaled(self, w: Array) -> Array:
        return w / (1.0, 1 + self.c**2, 1 + self.c)[self.rescale]


def _direction(problem: Problem, c: float) -> Answer:
    """w with G^T w = d: 1/K + (||g_0|| / ||g_i||) q_i, where d = g_0 + ||g_0|| sum_i q_i g_i / ||g_i||."""
    M, norms, noise = problem.M, problem.norms, problem.noise
    K = len(problem.present)
    equal = np.full(K, 1 / K)
    if c == 0:
        return Answer(equal)
    row_sums = M.sum(0)
    total, terms = float(row_sums.sum()), float(norms.sum()) ** 2
    # The sum of the gradients, from entries that are rounded: below this it is noise.
    rounding = noise * terms / max(total, noise * terms)
    if rounding > DETERMINED:
        return Answer(equal, code=STATIONARY, rounding=rounding)
    length = math.sqrt(total)
    C = add_diagonal(problem.cosines, 1e-15 * K)  # rounding must leave a matrix that can be inverted
    b, a = row_sums / norms / length, norms.min() / norms
    stationary = c >= 1 and hull_distance(C) <= max(_STATIONARY_NORM, noise / DETERMINED)
    point, doubt = _solve_ball(C, b, a, c, noise, stationary)
    weights = problem.filled((1 + length / norms * point.q) / K, 1 / K)
    # With c >= 1 the direction itself can be a sum that vanishes.
    part = weights[problem.present]
    square, size = float(part @ (M @ part)), float(part @ norms) ** 2
    doubt = max(doubt, rounding, noise * size / max(square, noise * size))
    code = STATIONARY if doubt > DETERMINED else CONVERGED if point.error < _ACCURATE else NOT_CONVERGED
    return Answer(weights, point.error, point.iterations, code, doubt)


def _solve_ball(C: Array, b: Array, a: Array, c: float, noise: float, stationary: bool) -> tuple[InteriorPoint, float]:
    """The multipliers, of C itself or of C + ridge where they are not determined (see the class, "stationary"), and how
    far rounding may change their norm, relative."""
    if not stationary:
        exact = solve_ball(C, b, a, c)
        q = exact.q
        doubt = noise * float(q.sum()) ** 2 / c**2
        if exact.error < _ACCURATE and doubt <= DETERMINED and c**2 > _STATIONARY_NORM * float(q @ q):
            return exact, doubt
    return solve_ball(add_diagonal(C, max(_RIDGE, 4 * len(C) * noise)), b, a, c), 1.0

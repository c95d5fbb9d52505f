"""CAGrad: the direction near the mean gradient that serves the worst-off task best."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from cost_mtl.weighting._arrays import Array, Arrays
from cost_mtl.weighting._constraint import ABSENT, InteriorPoint, on_ball
from cost_mtl.weighting._interior import ITERATIONS, solve_interior
from cost_mtl.weighting._problem import CONVERGED, NOT_CONVERGED, STATIONARY, Answer, Problem, Scale, SolvedWeighting
from cost_mtl.weighting._reference import cagrad_reference

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

    Where the gradients can be combined to zero and c >= 1, the maximum is 0 and reached by many d. The answer is then
    one that no task objects to, the nearest to g_0 up to 1e-4 of its length (a few percent with norms spread over 1e3),
    and the status "stationary". The same status with d = g_0 stands for g_0 = 0 up to rounding.

    Differs from the official code, which stops SciPy's SLSQP at its default tolerance and adds 1e-8 to the norms. A
    task with a zero gradient takes part in g_0 but not in the minimum.

    Args:
        c: radius of the ball, c >= 0. 0.4 is the paper's for NYUv2 (CityScapes: 0.4 or 0.6).
        rescale: 0: d; 1 (default, the official scripts'): d / (1 + c^2); 2: d / (1 + c).
        scale: ``"tasks"`` (default): times K; ``"raw"``: the direction itself; ``"sum"``, ``"mean"``: weights that sum
            to K or 1.
        max_norm: bound on ||G^T w||, None (default) for none.
        solver: ``"auto"``, ``"host"``, ``"device"`` or the slow reference ``"cvxpy"``.

    Raises:
        ValueError: a setting is out of range.
    """

    c: float = 0.4
    rescale: int = 1
    scale: Scale = field(default="tasks", kw_only=True)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.c) and self.c >= 0):
            raise ValueError(f"c must be finite and >= 0, got {self.c!r}")
        if self.rescale not in (0, 1, 2):
            raise ValueError(f"rescale must be 0, 1 or 2, got {self.rescale!r}")
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

    def _reference(self, M: Array) -> Array:
        return self._rescaled(cagrad_reference(M, self.c) / len(M))

    def _rescaled(self, w: Array) -> Array:
        return w / (1.0, 1 + self.c**2, 1 + self.c)[self.rescale]


def _direction(problem: Problem, c: float) -> Answer:
    """w with G^T w = d: 1/K + (||g_0|| / ||g_i||) q_i, where d = g_0 + ||g_0|| sum_i q_i g_i / ||g_i||."""
    arrays, M = problem.arrays, problem.M
    K = len(M)
    if c == 0:
        zero = arrays.scalar(0.0)
        return Answer(problem.ones() / K, zero, zero, arrays.scalar(CONVERGED))
    # Rounding must leave the unit gradients a Gramian that can be inverted.
    unit = problem.units(diagonal=1e-15 * K)
    row_sums = M.sum(0)
    total = row_sums.sum()
    # The sum of the gradients, from entries that are rounded: below this it is noise.
    degenerate = total <= 8 * K * problem.noise * arrays.where(unit.present, unit.norms, 0.0).sum() ** 2
    length = arrays.where(degenerate, 1.0, total) ** 0.5
    b = arrays.where(unit.present, row_sums * unit.inverse / length, 1.0)
    a = arrays.where(unit.present, unit.shortest / unit.norms, ABSENT)

    if arrays.stop(degenerate):
        point = InteriorPoint(a * 0, arrays.scalar(0.0), arrays.scalar(0.0), arrays.scalar(0))
        unique = degenerate
    else:
        point, unique = _solve_ball(arrays, unit.cosines, b, a, c, 4 * K * problem.noise)
    q = arrays.where(unit.present & ~degenerate, point.q, 0.0)
    code = arrays.where(point.error < _ACCURATE, CONVERGED, NOT_CONVERGED)
    code = arrays.where(unique & ~degenerate, code, STATIONARY)
    error = arrays.where(degenerate, 0.0, point.error)
    return Answer((1 + length * unit.inverse * q) / K, error, point.iterations, code)


def _solve_ball(arrays: Arrays, C: Array, b: Array, a: Array, c: float, noise: float) -> tuple[InteriorPoint, Array]:
    """The multipliers, and whether they are those of C itself or of C + ridge (see the class, "stationary")."""
    exact = solve_interior(arrays, C, b, a, on_ball(arrays, C, c), 1e-13, ITERATIONS)
    q = exact.q
    unique = (exact.error < _ACCURATE) & (q @ (C @ q) > max(_STATIONARY_NORM, noise) * (q @ q))
    if arrays.stop(unique):
        return exact, unique
    blurred = arrays.add_diagonal(C, a * 0 + max(_RIDGE, noise))
    other = solve_interior(arrays, blurred, b, a, on_ball(arrays, blurred, c), 1e-13, ITERATIONS)
    picked = (arrays.pick(unique, x, y) for x, y in zip(exact, other, strict=True))
    return InteriorPoint(*picked), unique

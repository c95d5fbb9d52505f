"""The two small convex programs of this folder, by one primal-dual interior-point method.

Both look for q >= 0 [K] and a multiplier mu with

    y = C q + b - mu a >= 0,   q_i y_i = 0,   and either  q^T C q = radius^2  (the ball)  or  a^T q = 1  (the plane).

MGDA's least-norm point of the convex hull is the plane with b = 0 (mu is then the squared norm). CAGrad's direction is
the ball: d = g_0 + sum_i q_i g_i maximises min_i g_i^T d within the ball around g_0, mu being that minimum. C is the
matrix of the cosines of the gradients, so that nothing depends on how differently the tasks are scaled; the norms are
in a alone (a_i = min_j ||g_j|| / ||g_i||).

Method. Mehrotra's predictor and corrector on the conditions with q_i y_i = sigma, sigma -> 0. The ball's condition is
not linearised: along the direction (dq linear in dmu) it is a quadratic equation for dmu, solved exactly. That makes
the method converge from one fixed start on everything that was tried, where plain Newton steps do not.
"""

from __future__ import annotations

import math

from cost_mtl.weighting._arrays import Array, Arrays
from cost_mtl.weighting._constraint import TINY, Constraint, InteriorPoint, condition_error
from cost_mtl.weighting._pivoting import pivot

__all__ = ["ITERATIONS", "solve_interior"]

ITERATIONS = 64
"""Bound on the iterations (on the device: their number). 6 to 10 are usual, 25 with norms spread over 1e6; the most
that thousands of random Gramians took was 59."""

_STEP = 0.9


def _longest(arrays: Arrays, q: Array, dq: Array, y: Array, dy: Array) -> Array:
    """Largest t with q + t dq >= 0 and y + t dy >= 0."""
    return 1 / arrays.at_least(arrays.at_least((-dq / q).max(), (-dy / y).max()), TINY)


def _start(arrays: Arrays, C: Array, b: Array, a: Array, constraint: Constraint) -> tuple[Array, Array, Array]:
    """q, y, mu near the central path: mu low enough to make every y positive, q in inverse proportion to y."""
    q = constraint.scaled(a * 0 + 1)
    gradient = C @ q + b
    mu = 2 * arrays.at_most((gradient / a).min(), 0.0)
    y = arrays.at_least(gradient - mu * a, 0.1 * (q @ (C @ q)) ** 0.5)
    return constraint.scaled(1 / y), y, mu


def _shared_by_twins(arrays: Arrays, C: Array, a: Array, q: Array) -> Array:
    """q with equal shares for equal tasks, whose shares the conditions leave open and rounding would decide."""
    same = (C > 1 - 1e-12) & (abs(a[:, None] - a) <= 1e-12 * a)
    twins = arrays.where(same, 1.0, 0.0)
    return (twins @ q) / twins.sum(1)


def solve_interior(
    arrays: Arrays, C: Array, b: Array, a: Array, constraint: Constraint, floor: float, iterations: int
) -> InteriorPoint:
    """Solves the conditions above.

    Args:
        arrays: where to compute.
        C: cosines [K, K], float64; b: [K]; a: [K], 0 < a <= 1.
        constraint: :func:`on_ball` or :func:`on_plane`.
        floor: the smallest value of q^T C q that matters; below it the complementarity q^T y is measured against it.
        iterations: bound on the iterations (on the device: their number).
    """
    shortcut = pivot(C, b, a, constraint) if arrays.on_host else None
    if shortcut is not None:
        return shortcut
    q, y, mu = _start(arrays, C, b, a, constraint)
    best = InteriorPoint(q, mu, arrays.scalar(math.inf), arrays.scalar(0))
    for k in range(iterations + 1):
        size, gap = q @ (C @ q), q @ y
        violation = C @ q + b - mu * a - y
        error = condition_error(arrays, C, b, a, q, y, mu, constraint, floor)
        better = error < best.error  # False for NaN
        now = InteriorPoint(q, mu, error, arrays.scalar(k))
        best = InteriorPoint(*(arrays.pick(better, new, old) for new, old in zip(now, best, strict=True)))
        at_floor = (best.error < 1e-8) & (best.iterations <= k - 3)
        if k == iterations or arrays.stop((error < 1e-13) | at_floor | (error != error)):
            break

        solve = arrays.solver(arrays.add_diagonal(C, y / q))
        # Predictor: straight to q y = 0. Corrector: to a mean value of q y, the smaller the further the predictor got.
        both = solve(arrays.columns(a, -violation - y))
        u, g = both[:, 0], both[:, 1]
        dq = g + u * constraint.step(q, g, u)
        dy = -y - y * dq / q
        t = arrays.at_most(_longest(arrays, q, dq, y, dy), 1.0)
        reached = arrays.at_least((q + t * dq) @ (y + t * dy) / gap, 0.0)
        target = arrays.at_least(arrays.at_least(arrays.at_most(reached, 1.0) ** 3, 1e-6) * gap, 1e-15 * size) / len(a)
        complementarity = y + (t * t * dq * dy - target) / q
        g = solve(-violation - complementarity)
        dmu = constraint.step(q, g, u)
        dq = g + u * dmu
        dy = -complementarity - y * dq / q
        t = arrays.at_most(arrays.at_least(1 - gap / size, _STEP) * _longest(arrays, q, dq, y, dy), 1.0)
        q, y, mu = constraint.scaled(q + t * dq), y + t * dy, mu + t * dmu
    return best._replace(q=_shared_by_twins(arrays, C, a, best.q))

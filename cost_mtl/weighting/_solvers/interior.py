"""The small convex program of CAGrad, by a primal-dual interior-point method.

Looks for q >= 0 [K] and a multiplier mu with

    y = C q + b - mu a >= 0,   q_i y_i = 0,   q^T C q = radius^2.

CAGrad's direction d = g_0 + sum_i q_i g_i maximises min_i g_i^T d within the ball around g_0, mu being that minimum. C
is the matrix of the cosines of the gradients, so that nothing depends on how differently the tasks are scaled; the
norms are in a alone (a_i = min_j ||g_j|| / ||g_i||).

Method. Mehrotra's predictor and corrector on the conditions with q_i y_i = sigma, sigma -> 0. The ball's condition is
not linearised: along the direction (dq linear in dmu) it is a quadratic equation for dmu, solved exactly. That makes
the method converge from one fixed start on everything that was tried, where plain Newton steps do not.
"""

from __future__ import annotations

import math

import numpy as np

from cost_mtl.weighting._solvers.ball import TINY, InteriorPoint, condition_error, scaled, step
from cost_mtl.weighting._solvers.matrix import Array, add_diagonal
from cost_mtl.weighting._solvers.nonnegative import shared_by_twins
from cost_mtl.weighting._solvers.pivoting import pivot

__all__ = ["InteriorPoint", "solve_ball"]

_ITERATIONS = 64
"""Bound on the iterations. 6 to 10 are usual, 25 with norms spread over 1e6; the most that thousands of random Gramians
took was 59."""

_STEP = 0.9


def _longest(q: Array, dq: Array, y: Array, dy: Array) -> float:
    """Largest t with q + t dq >= 0 and y + t dy >= 0."""
    return float(1 / max((-dq / q).max(), (-dy / y).max(), TINY))


def _start(C: Array, b: Array, a: Array, radius: float) -> tuple[Array, Array, float]:
    """q, y, mu near the central path: mu low enough to make every y positive, q in inverse proportion to y."""
    q = scaled(np.ones(len(a)), C, radius)
    gradient = C @ q + b
    mu = 2 * min(float((gradient / a).min()), 0.0)
    y = np.maximum(gradient - mu * a, 0.1 * (q @ (C @ q)) ** 0.5)
    return scaled(1 / y, C, radius), y, mu


def solve_ball(C: Array, b: Array, a: Array, radius: float) -> InteriorPoint:
    """Solves the conditions above.

    Args:
        C: cosines [K, K], float64, positive definite; b: [K]; a: [K], 0 < a <= 1.
        radius: of the ball, > 0.
    """
    shortcut = pivot(C, b, a, radius)
    if shortcut is not None:
        return shortcut
    q, y, mu = _start(C, b, a, radius)
    best = InteriorPoint(q, mu, math.inf, 0)
    for k in range(_ITERATIONS + 1):
        size, gap = q @ (C @ q), q @ y
        violation = C @ q + b - mu * a - y
        error = condition_error(C, b, a, q, y, mu, radius)
        if error < best.error:  # False for NaN
            best = InteriorPoint(q, mu, error, k)
        at_floor = best.error < 1e-8 and best.iterations <= k - 3
        if k == _ITERATIONS or error < 1e-13 or at_floor or math.isnan(error):
            break
        H = add_diagonal(C, y / q)
        # Predictor: straight to q y = 0. Corrector: to a mean value of q y, the smaller the further the predictor got.
        try:
            # NumPy has no factorisation to keep, but for these sizes a new one costs less than the inverse.
            u, g = np.linalg.solve(H, np.stack((a, -violation - y), axis=1)).T
            dq = g + u * step(q, g, u, C, radius)
            dy = -y - y * dq / q
            t = min(_longest(q, dq, y, dy), 1.0)
            reached = max(float((q + t * dq) @ (y + t * dy) / gap), 0.0)
            target = max(max(min(reached, 1.0) ** 3, 1e-6) * gap, 1e-15 * size) / len(a)
            complementarity = y + (t * t * dq * dy - target) / q
            g = np.linalg.solve(H, -violation - complementarity)
        except np.linalg.LinAlgError:  # the best iterate says how good it is
            break
        dmu = step(q, g, u, C, radius)
        dq = g + u * dmu
        dy = -complementarity - y * dq / q
        t = min(max(1 - float(gap / size), _STEP) * _longest(q, dq, y, dy), 1.0)
        q, y, mu = scaled(q + t * dq, C, radius), y + t * dy, mu + t * dmu
    return best._replace(q=shared_by_twins(C, a, best.q))

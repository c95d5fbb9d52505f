"""Least squares over non-negative numbers, and with it the shortest vector in the convex hull of some gradients.

All of it works on the matrix C of the cosines of the gradients, so that nothing depends on how differently the tasks
are scaled. Two active set methods on the normal equations: block principal pivoting (Portugal, Judice & Vicente 1994,
Math. Comp. 63), and where that does not end, Lawson & Hanson's ("Solving Least Squares Problems", 1974, chapter 23).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cost_mtl.weighting._solvers.matrix import EPS, Array, add_diagonal

__all__ = ["Shortest", "hull_distance", "shared_by_twins", "shortest"]


_BLOCKS = 12
"""Rounds of the first, faster attempt."""


class Shortest(NamedTuple):
    """u [K] >= 0 with a^T u = 1; u^T C u; the error: how far the optimality conditions are violated, in cosines between
    a gradient and the direction, or relative to u^T C u where that is more; and the rounds it took."""

    u: Array
    square: float
    error: float
    rounds: int


def shortest(C: Array, a: Array) -> Shortest:
    """min u^T C u over u >= 0, a^T u = 1. C: cosines [K, K], positive semidefinite; a: [K], 0 < a <= 1.

    The plane needs no multiplier of its own: min x^T C x + (a^T x - 1)^2 over x >= 0 has the solution in proportion to
    u.
    """
    C = add_diagonal(C, 4 * len(C) * EPS)  # rounding must leave a matrix that can be inverted
    x, rounds = _least_squares(C + a[:, None] * a, a)
    u = shared_by_twins(C, a, x / (a @ x))
    Cu = C @ u
    square = float(u @ Cu)
    y = Cu - square * a
    error = max(float(u @ abs(y)) / square, float(-y.min()) / square**0.5)
    return Shortest(u, square, error, rounds)


def hull_distance(C: Array) -> float:
    """The squared distance of the convex hull of the unit gradients from 0: whether they are Pareto-stationary."""
    return shortest(C, np.ones(len(C))).square


def _least_squares(H: Array, f: Array) -> tuple[Array, int]:
    """x >= 0 [K] of least x^T H x / 2 - f^T x, H positive definite; and the number of rounds."""
    K = len(f)
    inside = np.ones(K, dtype=bool)
    for rounds in range(1, _BLOCKS):  # all that is wrong changes sides at once: fast, but not sure to end
        x = np.zeros(K)
        where = inside.nonzero()[0]
        x[where] = np.linalg.solve(H[where[:, None], where] if len(where) < K else H, f[where])
        if rounds == 1 and x.min() > 0:
            return x, rounds
        terms = abs(H) @ abs(x) + f
        wrong = np.where(inside, x < 0, H @ x - f < -4 * K * EPS * terms)
        if not wrong.any():
            return x, rounds
        inside = inside ^ wrong
        if not inside.any():
            break
    x, inside = np.zeros(K), np.zeros(K, dtype=bool)
    for rounds in range(_BLOCKS, 3 * K + _BLOCKS):
        y = H @ x - f
        y[inside] = 0
        entering = int(y.argmin())
        if y[entering] >= -4 * K * EPS * (abs(H[entering]) @ x + f[entering]):
            return x, rounds
        inside[entering] = True
        while True:
            where = inside.nonzero()[0]
            trial = np.linalg.solve(H[where[:, None], where], f[where])
            if trial.min() > 0:
                x[where] = trial
                break
            # As far towards it as all stay positive; those that reach 0 first leave.
            old = x[where]
            steps = np.where(trial <= 0, old / np.maximum(old - trial, 1e-300), np.inf)
            x[where] = old + steps.min() * (trial - old)
            leaving = where[steps == steps.min()]
            x[leaving] = 0
            inside[leaving] = False
            if not inside.any():
                break
    return x, rounds


def shared_by_twins(C: Array, a: Array, q: Array) -> Array:
    """q with equal shares for equal tasks, whose shares the conditions leave open and rounding would decide."""
    same = (C > 1 - 1e-12) & (abs(a[:, None] - a) <= 1e-12 * a)
    first = same.argmax(1)  # rounding may make i like j and j like k, but i unlike k: groups keep the sums
    same = first[:, None] == first
    shared: Array = (same @ q) / same.sum(1)
    return shared

"""M w = w^(-1/alpha): the equation of FairGrad, and of Nash-MTL at alpha = 1.

Scaling. With p = 1/alpha, w = S v, S_i = M_ii^(-1/(1+p)), it becomes A v = r v^(-p) with A = S M S and r = diag A: a
task that conflicts with none has v = 1 whatever its scale, so nothing below depends on the scale of the losses.

Iteration. The equation is the optimality condition of a strictly convex problem, 1/2 v^T A v - sum r h(v) with
h' = v^(-p). It is solved for v and s = A v together, by Newton's method on the pair A v - s = 0 and
log s + p log v = log r: one K x K solve each time, (A + p diag(s / v)) dv = s (1 - log(s v^p / r)) - A v. A component
shrinks at most tenfold in one iteration (for v the factor grows with alpha, since v^(-1/alpha) is then flat), which
keeps v and s positive and is all the damping there is. At s = r v^(-p) this is the damped Newton step of the convex
problem; an s of its own keeps the number of iterations low where the solution lies many decades from the start.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cost_mtl.weighting._solvers.matrix import Array, add_diagonal
from cost_mtl.weighting._solvers.problem import CONVERGED, DETERMINED, NOT_CONVERGED, STATIONARY, Answer, Problem

__all__ = ["RIDGE", "TOLERANCE", "iteration_limit", "solve_fairness"]

TOLERANCE = 1e-6
"""Largest relative residual that counts as a solution. A solvable Gramian is usually solved to 1e-13."""

RIDGE = 1e-6
"""Where no solution exists, M + RIDGE * diag(M) takes the place of M, which bounds the weights (see FairGrad). 1e-6 is
above the noise of a Gramian that was summed in float32."""

_STATIONARY_NORM = 1e-10
"""Gradients count as stationary where a combination of the unit gradients, with coefficients of norm 1, has a squared
norm below this: float64 leaves the equation a relative residual of about 1e-16 over it, 1e-6 here."""

_ROUNDED = 1e-9
"""Times K: the part of the terms in a rate below which a rate is rounding. A residual of 1e-6 of it is 4 K eps."""

_UNSOLVED = 1e-2
_ACCURATE = 1e-12
_TINY = 1e-300
_SHRINK = 0.1


def iteration_limit(alpha: float) -> int:
    """Bound on the iterations. The most that thousands of random Gramians took, with norms spread over 1e12,
    near-opposite and duplicated tasks, K up to 100: 21 for 0.5 <= alpha <= 2, 32 for 5, 60 for 20."""
    return 24 + 12 * math.ceil(abs(math.log2(alpha)))


class _Iterate(NamedTuple):
    v: Array
    residual: float
    iterations: int


def _newton(A: Array, r: Array, p: float, iterations: int) -> _Iterate:
    """The iterate with the smallest residual max |A v - r v^-p| / (r v^-p), where the rounding of A v allows."""
    total = A.sum()
    start = (r.sum() / total) ** (1 / (1 + p)) if total > 0 else 1.0
    v = np.full(len(r), start)  # the best multiple of 1: w^T M w = sum w^(1-p)
    s = r * v**-p
    shrink_v = _SHRINK ** max(1.0, p**-0.5)
    sizes = _ROUNDED * len(r) * abs(A)
    best = _Iterate(v, math.inf, 0)
    for k in range(iterations + 1):
        Av, target = A @ v, r * v**-p
        gap = abs(Av - target)
        residual = float((gap / target).max())
        if residual > _ACCURATE:
            residual = float((gap / np.maximum(target, sizes @ v)).max())
        if residual < best.residual:  # False for NaN
            best = _Iterate(v, residual, k)
        if k == iterations or _finished(best, residual, k, v, Av, r):
            break
        error = np.log(s / target)
        try:
            dv = np.linalg.solve(add_diagonal(A, p * s / v), s * (1 - error) - Av) / v
        except np.linalg.LinAlgError:
            break
        v, s = v * np.maximum(1 + dv, shrink_v), s * np.maximum(1 - error - p * dv, _SHRINK)
    return best


def _finished(best: _Iterate, residual: float, k: int, v: Array, Av: Array, r: Array) -> bool:
    """Whether there is nothing more to win: solved, at the rounding floor of this Gramian, or without a solution."""
    if residual < _ACCURATE or math.isnan(residual):
        return True
    if best.residual < 1e-3:
        return best.iterations <= k - 3
    return bool(v @ Av < 0.01 * _STATIONARY_NORM * (r * v * v).sum())


class _Doubt(NamedTuple):
    """How far the noise of M may change the rates (A v)_i and the weights v_i, relative."""

    rates: float
    weights: float


def _doubt(A: Array, r: Array, p: float, v: Array, noise: float) -> _Doubt:
    root = np.sqrt(r)
    terms = noise * root * (root @ v)  # the largest change of A v
    rates = float((terms * v**p / r).max())
    if rates <= DETERMINED:
        return _Doubt(rates, rates)
    try:
        inverse = np.linalg.inv(add_diagonal(A, p * r * v ** (-p - 1)))
    except np.linalg.LinAlgError:
        return _Doubt(rates, math.inf)
    return _Doubt(rates, float((abs(inverse) @ terms / v).max()))


def solve_fairness(problem: Problem, alpha: float) -> Answer:
    """Weights w > 0 [K] with M w = w^(-1/alpha), for 0 < alpha < infinity.

    A task whose gradient is zero gets the mean weight of the others, which are solved as if it were absent. The
    residual is max_i |w_i^(1/alpha) (M w)_i - 1| over the tasks with a gradient; where (M w)_i is smaller than 1e-9 K
    of its terms, relative to that.

    Where a convex combination of the gradients vanishes, or nearly so, the equation has no finite solution, or none
    that the digits of M determine. The answer is then the solution for M + RIDGE diag(M), and the code says
    "stationary".
    """
    M, noise, p = problem.M, problem.noise, 1 / alpha
    diagonal = M.diagonal()
    S, r = diagonal ** (-1 / (1 + p)), diagonal ** ((p - 1) / (1 + p))
    A = S[:, None] * M * S

    v, residual, used = _newton(A, r, p, iteration_limit(alpha))
    doubt = _doubt(A, r, p, v, noise)
    stationary = residual <= _UNSOLVED and _vanishes(A, r, v, noise, doubt)
    if stationary or not residual <= _UNSOLVED:
        ridge = _newton(add_diagonal(A, max(RIDGE, 4 * len(M) * noise) * r), r, p, iteration_limit(alpha))
        stationary = stationary or _vanishes(A, r, ridge.v, 0.1 * RIDGE * DETERMINED, _Doubt(1.0, 1.0))
        v, used = ridge.v, used + ridge.iterations
        doubt = max(doubt, _doubt(A, r, p, v, noise))
        residual = float(abs((A @ v) / (r * v**-p) - 1).max())
    if stationary:
        code = STATIONARY
    else:
        code = CONVERGED if residual <= TOLERANCE and doubt.weights <= DETERMINED else NOT_CONVERGED
    return Answer(problem.filled(S * v), residual, used, code, doubt.rates)


def _vanishes(A: Array, r: Array, v: Array, noise: float, doubt: _Doubt) -> bool:
    """Whether the direction is no longer than rounding leaves a sum of these gradients."""
    u = np.sqrt(r) * v  # the coefficients of the unit gradients
    square = float(v @ (A @ v))
    if square <= max(_STATIONARY_NORM, 4 * len(v) * noise) * float(u @ u):
        return True
    return doubt.weights > DETERMINED and square <= len(v) * noise / DETERMINED * float(u.sum()) ** 2

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

from cost_mtl.weighting._arrays import Array, Arrays
from cost_mtl.weighting._problem import CONVERGED, NOT_CONVERGED, STATIONARY, Answer, Problem

__all__ = ["RIDGE", "TOLERANCE", "iteration_limit", "solve_fairness"]

TOLERANCE = 1e-6
"""Largest relative residual that counts as a solution. A solvable Gramian is usually solved to 1e-13."""

RIDGE = 1e-6
"""Where no solution exists, M + RIDGE * diag(M) takes the place of M: weights of at most RIDGE^(-1/(1+p)) times what
the task alone would get. 1e-6 is above the noise of a Gramian that was summed in float32."""

_STATIONARY_NORM = 1e-10
"""Gradients count as stationary where a combination of the unit gradients, with coefficients of norm 1, has a squared
norm below this: float64 leaves the equation a relative residual of about 1e-16 over it, 1e-6 here."""

_UNSOLVED = 1e-2
_ACCURATE = 1e-12
_TINY = 1e-300
_SHRINK = 0.1


def iteration_limit(alpha: float) -> int:
    """Bound on the iterations (on the device: their number). The most that thousands of random Gramians took, with
    norms spread over 1e12, near-opposite and duplicated tasks, K up to 100: 21 for 0.5 <= alpha <= 2, 32 for 5, 60 for
    20."""
    return 24 + 12 * math.ceil(abs(math.log2(alpha)))


class _Iterate(NamedTuple):
    v: Array
    residual: Array
    iterations: Array


def _newton(arrays: Arrays, A: Array, r: Array, p: float, iterations: int) -> _Iterate:
    """The iterate with the smallest residual max |A v / (r v^-p) - 1|."""
    pick = arrays.pick
    total = A.sum()
    start = pick(total > 0, (r.sum() / arrays.at_least(total, _TINY)) ** (1 / (1 + p)), arrays.scalar(1.0))
    v = r**0 * start  # the best multiple of 1: w^T M w = sum w^(1-p)
    s = r * v**-p
    shrink_v = _SHRINK ** max(1.0, p**-0.5)
    best = _Iterate(v, arrays.scalar(math.inf), arrays.scalar(0))
    for k in range(iterations + 1):
        Av, target = A @ v, r * v**-p
        residual = abs(Av / target - 1).max()
        better = residual < best.residual  # False for NaN
        best = _Iterate(
            pick(better, v, best.v),
            pick(better, residual, best.residual),
            pick(better, arrays.scalar(k), best.iterations),
        )
        if k == iterations or (arrays.on_host and _finished(best, residual, k, v, Av, r)):
            break
        error = arrays.log(s / target)
        dv = arrays.solver(arrays.add_diagonal(A, p * s / v))(s * (1 - error) - Av) / v
        v, s = v * arrays.at_least(1 + dv, shrink_v), s * arrays.at_least(1 - error - p * dv, _SHRINK)
    return best


def _finished(best: _Iterate, residual: float, k: int, v: Array, Av: Array, r: Array) -> bool:
    """Whether there is nothing more to win: solved, at the rounding floor of this Gramian, or without a solution."""
    if residual < _ACCURATE or math.isnan(residual):
        return True
    if best.residual < 1e-3:
        return bool(best.iterations <= k - 3)
    return bool(v @ Av < 0.01 * _STATIONARY_NORM * (r * v * v).sum())


def solve_fairness(problem: Problem, alpha: float) -> Answer:
    """Weights w > 0 [K] with M w = w^(-1/alpha), for 0 < alpha < infinity.

    A task whose gradient is zero gets the mean weight of the others, which are solved as if it were absent; all-zero M:
    ones. The residual is max_i |w_i^(1/alpha) (M w)_i - 1| over the tasks with a gradient.

    Where a convex combination of the gradients vanishes, or nearly so, the equation has no finite solution, or none
    that the digits of M determine. The answer is then the solution for M + RIDGE diag(M), and the code says
    "stationary".
    """
    arrays, M, noise = problem.arrays, problem.M, problem.noise
    p, K = 1 / alpha, len(M)
    diagonal = M.diagonal()
    present = diagonal > 0
    absent = arrays.where(present, 0.0, 1.0)
    safe = diagonal + absent
    S = safe ** (-1 / (1 + p)) - absent
    r = safe ** ((p - 1) / (1 + p))
    A = arrays.add_diagonal(S[:, None] * M * S, absent)

    exact = _newton(arrays, A, r, p, iteration_limit(alpha))
    # Squared norm of the combination of unit gradients with coefficients (D w) / ||D w||, D = diag(||g_i||).
    squared_norm = (exact.v @ (A @ exact.v)) / (r * exact.v**2).sum()
    stationary = (squared_norm <= max(_STATIONARY_NORM, 4 * K * noise)) | (exact.residual > _UNSOLVED)
    v, residual, used = exact
    if not arrays.stop(stationary == False):  # noqa: E712
        ridge = _newton(arrays, arrays.add_diagonal(A, max(RIDGE, 4 * K * noise) * r), r, p, iteration_limit(alpha))
        v = arrays.pick(stationary, ridge.v, v)
        residual = arrays.pick(stationary, abs((A @ v) / (r * v**-p) - 1).max(), residual)
        used = used + arrays.where(stationary, ridge.iterations, 0)
    converged = arrays.where(residual <= TOLERANCE, CONVERGED, NOT_CONVERGED)
    code = arrays.where(stationary, STATIONARY, converged)
    w = S * v
    if not arrays.stop(present.all()):
        w = problem.filled(w, present, 1.0)
    return Answer(w, residual, used, code)

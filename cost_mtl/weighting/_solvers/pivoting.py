"""The shortcut of the interior-point method: guess which q_i are positive, and correct the guess.

For a given set of positive q_i the conditions of _interior.py are linear equations and a quadratic one for mu. Where
the answer has a q_i < 0 or a y_i < 0, exactly these change sides (block principal pivoting; Portugal,
Judice & Vicente 1994, Math. Comp. 63). That takes two or three rounds as a rule, a third of the interior-point method's
time, but is not sure to end. If it does not, and where the cosines are so close to singular that q need not be unique,
there is no answer here.
"""

from __future__ import annotations

import numpy as np

from cost_mtl.weighting._solvers.ball import InteriorPoint, condition_error, step
from cost_mtl.weighting._solvers.matrix import Array, add_diagonal

__all__ = ["pivot"]

_ROUNDS = 12
_SMALLEST_EIGENVALUE = 1e-6
_ACCURATE = 1e-12


def _well_conditioned(C: Array) -> bool:
    try:
        np.linalg.cholesky(add_diagonal(C, -_SMALLEST_EIGENVALUE))
    except np.linalg.LinAlgError:
        return False
    return True


def pivot(C: Array, b: Array, a: Array, radius: float) -> InteriorPoint | None:
    """The solution, or None if pivoting does not find it. Arguments as for ``solve_ball``."""
    if not _well_conditioned(C):
        return None
    inside = np.ones(len(a), dtype=bool)
    for k in range(_ROUNDS):
        solved = np.zeros((len(a), 2))
        where = inside.nonzero()[0]
        solved[where] = np.linalg.solve(C[where[:, None], where], np.stack((a[where], b[where]), axis=1))
        u, h = solved[:, 0], solved[:, 1]
        mu = step(-h, np.zeros(len(a)), u, C, radius)
        q = mu * u - h
        y = C @ q + b - mu * a
        wrong = np.where(inside, q, y) < 0
        y[inside] = 0
        if not wrong.any():
            error = condition_error(C, b, a, q, y, mu, radius)
            return InteriorPoint(q, mu, error, k) if error < _ACCURATE else None
        inside = inside ^ wrong
        if not inside.any():
            return None
    return None

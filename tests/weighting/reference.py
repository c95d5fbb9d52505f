"""Slow twins of the solvers, by a general conic solver (Clarabel through cvxpy), straight from the papers' problems.

They exist to be compared with, not to train with: 5 ms and up a solve, and the accuracy that a conic solver has. They
need the extra "reference" (cvxpy).
"""

from __future__ import annotations

import warnings
from typing import Any

import cvxpy
import numpy as np
from numpy.typing import NDArray

__all__ = ["cagrad_reference", "equal_projections_reference", "fairness_reference", "min_norm_reference"]

_Matrix = NDArray[np.float64]


def _factor(M: _Matrix) -> _Matrix:
    """R [K, K] with R R^T = M, up to rounding."""
    values, vectors = np.linalg.eigh(M)
    return np.asarray(vectors * np.sqrt(np.clip(values, 0, None)))


def _run(problem: Any) -> None:
    with warnings.catch_warnings():
        # It is asked for more digits than it may have; how many it has is for the caller to find out.
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        problem.solve(
            solver=cvxpy.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13, tol_ktratio=1e-9, max_iter=200
        )
    if problem.status not in (cvxpy.OPTIMAL, cvxpy.OPTIMAL_INACCURATE):
        raise RuntimeError(f"the conic solver ended with status {problem.status!r}")


def _cosines(M: _Matrix) -> tuple[_Matrix, _Matrix, NDArray[np.bool_]]:
    """Cosines of the gradients that are not zero, their norms, and which they are."""
    present = M.diagonal() > 0
    norms = np.sqrt(M.diagonal()[present])
    return M[np.ix_(present, present)] / np.outer(norms, norms), norms, present


def fairness_reference(M: _Matrix, alpha: float) -> _Matrix:
    """w [K] with M w = w^(-1/alpha): min 1/2 ||G^T w||^2 - sum w^(1-p) / (1-p), p = 1/alpha (log at p = 1)."""
    p = 1 / alpha
    present = M.diagonal() > 0
    if not present.any():
        return np.ones(len(M))
    sub = M[np.ix_(present, present)]
    scale = sub.diagonal() ** (-1 / (1 + p))
    A = scale[:, None] * sub * scale
    r = A.diagonal()
    v = cvxpy.Variable(len(r))
    utility = cvxpy.log(v) if p == 1 else cvxpy.power(v, 1 - p) / (1 - p)
    _run(cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(_factor(A).T @ v) / 2 - r @ utility)))
    w = np.full(len(M), (scale * v.value).mean())
    w[present] = scale * v.value
    return w


def min_norm_reference(M: _Matrix) -> _Matrix:
    """lambda [K] on the simplex with the least ||G^T lambda||."""
    C, norms, present = _cosines(M)
    if not present.any():
        return np.full(len(M), 1 / len(M))
    a = norms.min() / norms
    x = cvxpy.Variable(len(norms), nonneg=True)
    _run(cvxpy.Problem(cvxpy.Minimize(cvxpy.norm(_factor(C).T @ x)), [a @ x == 1]))
    weights = np.zeros(len(M))
    weights[present] = np.clip(a * x.value, 0, None)
    return np.asarray(weights / weights.sum())


def cagrad_reference(M: _Matrix, c: float) -> _Matrix:
    """Weights [K] of K d, d the maximiser of min_i g_i^T d within ||d - g_0|| <= c ||g_0||, not rescaled."""
    weights = np.ones(len(M))
    C, norms, present = _cosines(M)
    total = np.sqrt(max(float(M.sum()), 0.0))  # K ||g_0||
    if not present.any() or total == 0 or c == 0:
        return weights
    R = _factor(C)
    a, b = norms.min() / norms, C @ norms / total
    x = cvxpy.Variable(len(norms), nonneg=True)
    _run(cvxpy.Problem(cvxpy.Minimize(b @ x + c * cvxpy.norm(R.T @ x)), [a @ x == 1]))
    q = np.clip(x.value, 0, None)
    weights[present] += total * c * q / np.linalg.norm(R.T @ q) / norms
    return weights


def equal_projections_reference(M: _Matrix) -> _Matrix:
    """w [K], |sum| 1 (of which a task without gradient has 1/K), with the same g_i^T d / ||g_i|| for all tasks, by a
    pseudo-inverse (no conic program)."""
    C, norms, present = _cosines(M)
    w = np.full(len(M), 1 / len(M))
    if present.any():
        solved = np.linalg.pinv(C, rcond=1e-9, hermitian=True).sum(1) / norms
        w[present] = solved / abs(solved.sum()) * len(norms) / len(M)
    return w

"""What is true of a case, from its gradients themselves: least squares by SciPy, sums in 80 bits."""

from functools import cached_property

import numpy as np
from scipy.optimize import nnls

LONG = np.longdouble


class Truth:
    """The gradients of the tasks that have one.

    Attributes:
        present: [K]; n of them.
        M, C: [n, n], Gramian and cosines in 80 bits; norms: [n].
    """

    def __init__(self, G):
        self.present = G.any(axis=1)
        self.K = len(G)
        self.G = G[self.present].astype(LONG)
        self.M = self.G @ self.G.T
        self.norms = np.sqrt(self.M.diagonal())
        self.unit = self.G / self.norms[:, None]
        self.C = self.unit @ self.unit.T
        # K x K numbers that stand for the unit gradients, so that least squares stays small.
        self.factor = np.linalg.qr(self.unit.T.astype(np.float64), mode="r")

    def shortest(self, a):
        """The least u^T C u over u >= 0, a^T u = 1."""
        a = np.asarray(a, dtype=np.float64)
        x = nnls(np.vstack((self.factor, a)), np.append(np.zeros(len(self.factor)), 1.0), maxiter=100 * len(a))[0]
        d = x.astype(LONG) @ self.unit
        return float(d @ d / (a @ x.astype(LONG)) ** 2)

    @cached_property
    def hull_distance(self):
        """Squared distance of the unit gradients' convex hull from 0."""
        return self.shortest(np.ones(len(self.norms)))

    def square_of(self, w):
        """||sum w_i g_i||^2 in 80 bits, and the same relative to (sum |w_i| ||g_i||)^2."""
        d = w.astype(LONG) @ self.G
        return float(d @ d), float(d @ d / (abs(w) @ self.norms) ** 2)


def fair_weights(M, alpha, start):
    """M w = w^(-1/alpha) in 80 bits by Newton's method from ``start``; None where that does not converge."""
    p = LONG(1) / LONG(alpha)
    w = start.astype(LONG)
    for _ in range(60):
        with np.errstate(all="ignore"):
            step = _solved(M + np.diag(p * w ** (-p - 1)), w**-p - M @ w) / w
        if not np.isfinite(step).all():
            return None
        w = w * np.maximum(1 + step, LONG(0.2))
        if abs(step).max() < 1e-12:
            return w
    return None


def _solved(A, b):
    """A x = b by Gaussian elimination with pivoting: LAPACK has no 80 bits."""
    A, b = A.copy(), b.copy()
    for i in range(len(A)):
        k = i + int(abs(A[i:, i]).argmax())
        A[[i, k]], b[[i, k]] = A[[k, i]], b[[k, i]]
        factor = A[i + 1 :, i] / A[i, i]
        A[i + 1 :] -= factor[:, None] * A[i]
        b[i + 1 :] -= factor * b[i]
    x = np.zeros_like(b)
    for i in range(len(A) - 1, -1, -1):
        x[i] = (b[i] - A[i, i + 1 :] @ x[i + 1 :]) / A[i, i]
    return x

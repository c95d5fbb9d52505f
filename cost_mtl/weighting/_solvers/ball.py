"""The conditions of CAGrad's convex program, for the two ways to solve it: see _interior.py."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cost_mtl.weighting._solvers.matrix import Array

__all__ = ["TINY", "InteriorPoint", "condition_error", "scaled", "step"]

TINY = 1e-300


class InteriorPoint(NamedTuple):
    """The best iterate: q [K], mu, its error (largest violation of a condition, relative to the terms in it) and the
    iterations done until then."""

    q: Array
    mu: float
    error: float
    iterations: int


def step(q: Array, g: Array, u: Array, C: Array, radius: float) -> float:
    """The step dmu with (q + dq)^T C (q + dq) = radius^2 along dq = g + u dmu."""
    z, Cu = q + g, C @ u
    square, half, rest = max(float(u @ Cu), TINY), float(z @ Cu), float(z @ (C @ z)) - radius**2
    return (-half + math.sqrt(max(half * half - square * rest, 0.0))) / square


def scaled(q: Array, C: Array, radius: float) -> Array:
    """q times what makes q^T C q = radius^2."""
    return np.asarray(q * (radius / max(float(q @ (C @ q)), TINY) ** 0.5))


def condition_error(C: Array, b: Array, a: Array, q: Array, y: Array, mu: float, radius: float) -> float:
    """Largest violation of y = C q + b - mu a, q^T y = 0 and q^T C q = radius^2, each relative to the terms in it."""
    Cq = C @ q
    size = float(q @ Cq)
    terms = size**0.5 + abs(b) + abs(mu) * a + 0.01 * (abs(C) @ q)
    infeasible = float((abs(Cq + b - mu * a - y) / terms).max())
    return max(float(q @ y) / size, infeasible, abs(size / radius**2 - 1))

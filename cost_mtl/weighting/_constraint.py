"""What the two small convex programs of _interior.py have in common with each other and what they differ in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cost_mtl.weighting._arrays import Array, Arrays

__all__ = ["ABSENT", "TINY", "Constraint", "InteriorPoint", "condition_error", "on_ball", "on_plane"]

TINY = 1e-300
ABSENT = 1e-30
"""a_i of a task without gradient: as if its gradient were 1e30 times the shortest, too long to be worst off."""


class InteriorPoint(NamedTuple):
    """The best iterate: q [K], mu [], its error [] (largest violation of a condition, relative to the terms in it) and
    the iterations done until then."""

    q: Array
    mu: Array
    error: Array
    iterations: Array


class Constraint(NamedTuple):
    """The third condition: how far q violates it, the step dmu that mends it along dq = g + u dmu, and q scaled to
    hold it."""

    error: Callable[[Array], Array]
    step: Callable[[Array, Array, Array], Array]
    scaled: Callable[[Array], Array]


def on_ball(arrays: Arrays, C: Array, radius: float) -> Constraint:
    """q^T C q = radius^2."""

    def step(q: Array, g: Array, u: Array) -> Array:
        z, Cu = q + g, C @ u
        square, half, rest = arrays.at_least(u @ Cu, TINY), z @ Cu, z @ (C @ z) - radius**2
        return (-half + arrays.at_least(half * half - square * rest, 0.0) ** 0.5) / square

    return Constraint(
        error=lambda q: abs(q @ (C @ q) / radius**2 - 1),
        step=step,
        scaled=lambda q: q * (radius / arrays.at_least(q @ (C @ q), TINY) ** 0.5),
    )


def on_plane(arrays: Arrays, a: Array) -> Constraint:
    """a^T q = 1."""
    return Constraint(
        error=lambda q: abs(a @ q - 1),
        step=lambda q, g, u: (1 - a @ (q + g)) / arrays.at_least(a @ u, TINY),
        scaled=lambda q: q / (a @ q),
    )


def condition_error(
    arrays: Arrays, C: Array, b: Array, a: Array, q: Array, y: Array, mu: Array, constraint: Constraint, floor: float
) -> Array:
    """Largest violation of y = C q + b - mu a, q^T y = 0 and the constraint, each relative to the terms in it."""
    Cq = C @ q
    size = q @ Cq
    terms = size**0.5 + abs(b) + abs(mu) * a + 0.01 * (abs(C) @ q)
    infeasible = (abs(Cq + b - mu * a - y) / terms).max()
    relative_gap = q @ y / arrays.at_least(size, floor)
    return arrays.at_least(arrays.at_least(relative_gap, infeasible), constraint.error(q))

"""What a teleport climbs, and which way is up: objectives with their gradient in the coordinates of a move.

===================  ===================================================  =============================  ============
name                 objective phi                                        its gradient                   judged by
===================  ===================================================  =============================  ============
``"conflict"``       sum_i p_i cos(g_i, g_0), p on the smallest cosines   finite differences             conflict
``"conflict-exact"`` the same                                             double backward                conflict
``"norm"``           sum_i R_i log ||g_i||                                finite differences             norm
``"norm-exact"``     the same                                             double backward                norm
``"sharpness"``      (1/K) sum_i R_i |L_i(. + eps_i) - L_i| / delta,      two gradients (Danskin)        norm
                     eps_i = delta g_i / ||g_i|| (COST, Eqn 8)
``"sphere"``         the same, eps_i the best of n random points on the   two gradients                  norm
                     sphere (COST, Eqns 6-7, as its official code does)
===================  ===================================================  =============================  ============

All of them reach the coordinates for real: the official code's copy-and-merge cuts that gradient off. ``p`` and the
balance weights R_i (Eqn 10) count as constants. "Judged by" is what the transaction checks of an accepted move.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from cost_mtl._validation import at_least, positive
from cost_mtl.gradients.gramian import gramian
from cost_mtl.gradients.reductions import norm
from cost_mtl.teleport.base import NoDoubleBackwardError, TeleportProblem
from cost_mtl.teleport.coordinates.base import Space
from cost_mtl.teleport.objectives import formulas as ob

Promise = Literal["conflict", "norm"]


@dataclass(frozen=True)
class Standpoint:
    """Where the model stands while an objective is asked for its slope.

    Attributes:
        problem, space: the landscape, and the coordinates of the move.
        batch: the batch that the objective is taken on.
        J: gradients [K, n] of the losses on it, in the coordinates.
        length: ||theta|| before the move.
        epsilon: displacement of finite differences relative to it.
    """

    problem: TeleportProblem
    space: Space
    batch: int
    J: Tensor
    length: float
    epsilon: float

    def task_gradients(self) -> tuple[Tensor, Tensor]:
        """G [K, m] and its Gramian M [K, K], float64."""
        G = self.space.task_gradients(self.batch)
        if G is self.problem.gradients:
            return G, self.problem.gramian
        return G, gramian(G, dtype=torch.float64)


@dataclass(frozen=True)
class Slope:
    """An objective where the model stands.

    Attributes:
        value: phi.
        gradient: d phi / d coordinates [n].
        wanted: rise of phi that is worth aiming for.
        notes: remarks for the report.
        rate: gain in the promise's measure (:func:`~cost_mtl.teleport.objectives.formulas.gain`) for a small rise of
            phi. Default 0: not known, nothing is predicted.
    """

    value: float
    gradient: Tensor
    wanted: float
    notes: tuple[str, ...] = ()
    rate: float = 0.0


@runtime_checkable
class Objective(Protocol):
    """Something to climb. ``loss_units``: phi scales with the losses (else it does not change when they are scaled)."""

    @property
    def promise(self) -> Promise: ...

    @property
    def loss_units(self) -> bool: ...

    def slope(self, at: Standpoint, /) -> Slope: ...


@dataclass(frozen=True)
class OfGradients:
    """An objective that is a function of the task gradients: the conflict or the norms.

    Args:
        promise: which.
        exact: gradient by double backward; where the model has none, by finite differences, with a note in the report.
    """

    promise: Promise
    exact: bool = False
    loss_units: bool = field(default=False, init=False)

    def slope(self, at: Standpoint, /) -> Slope:
        G, M = at.task_gradients()
        conflict = self.promise == "conflict"
        A = ob.conflict_coefficients(M) if conflict else ob.norm_coefficients(M)
        value = ob.conflict_value(M) if conflict else ob.norm_value(M)
        groups = ob.group_rows(A)
        notes: tuple[str, ...] = ()
        u = torch.zeros_like(at.J[0])
        if groups:
            a = torch.stack([row for row, _ in groups]).to(G.device, G.dtype) @ G
            tasks = [members for _, members in groups]
            if self.exact:
                try:
                    u = at.space.curvature(a, tasks, at.batch)
                except NoDoubleBackwardError as error:
                    notes = (f"finite differences instead of double backward: {error}",)
            if not self.exact or notes:
                u = finite_differences(at, a, tasks)
        return Slope(value, u, ob.wanted_gain(self.promise, M), notes, ob.gain_rate(self.promise, M))


def finite_differences(at: Standpoint, a: Tensor, tasks: list[list[int]]) -> Tensor:
    """sum_r d <a_r, g_r> / d coordinates [n] as [grad L_r(. + eps a_r / ||a_r||) - grad L_r(.)] ||a_r|| / eps:
    the Hessian-vector products that double backward would give, from one more pass each and without it."""
    u, epsilon = torch.zeros_like(at.J[0]), at.epsilon * at.length
    for row, members in zip(a, tasks, strict=True):
        length = float(norm(row, exact=True))
        if length > 0.0:
            (moved,) = at.space.gradients_at(row * (epsilon / length), at.batch, [members])
            u += (moved - at.J[members].sum(dim=0)) * (length / epsilon)
    return u


@dataclass(frozen=True)
class Sharpness:
    """L_g = (1/K) sum_i R_i |L_i(theta + eps_i) - L_i(theta)| / delta with eps_i = delta g_i / ||g_i||, the maximiser
    over the sphere to first order (COST, Eqn 8). About the R-weighted mean gradient norm, for small delta.

    Its gradient is taken with eps_i fixed, as the envelope theorem has it. K more evaluations with a gradient.

    Args:
        delta: radius of the sphere relative to ||theta||. Default 0.01: large enough for float32 losses.
    """

    delta: float = 0.01
    promise: Promise = field(default="norm", init=False)
    loss_units: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        positive("delta", self.delta)

    def slope(self, at: Standpoint, /) -> Slope:
        G, M = at.task_gradients()
        radius = self.delta * at.length
        lengths = M.diagonal().clamp_min(0).sqrt()
        here = at.space.losses_at(torch.zeros_like(G[0]), at.batch)
        chosen: list[tuple[Tensor, float, int]] = []
        for i, length in enumerate(lengths.tolist()):
            if length > 0.0:
                eps = G[i] * (radius / length)
                chosen.append((eps, float(at.space.losses_at(eps, at.batch)[i] - here[i]), i))
        return _sharpness_slope(at, ob.balance(M), chosen, radius)


@dataclass(frozen=True)
class Sphere:
    """L_g as in :class:`Sharpness`, with the maximum over n random eps on the sphere, common to the tasks, as in the
    official code (COST, Eqns 6-7). For fidelity: a random direction in m dimensions sees 1/sqrt(m) of a gradient. In
    the paper's penalty it was measured to do nothing; on the level set, which gives the step its length, it is
    accepted less often than :class:`Sharpness` (docs/teleport.md).

    Args:
        samples: n; default 5, the official code's.
        delta: radius, of each parameter tensor's part of eps. Default 1e-4, the official code's; below the resolution
            of bf16 parameters, for which it has to be larger.
    """

    samples: int = 5
    delta: float = 1e-4
    promise: Promise = field(default="norm", init=False)
    loss_units: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        positive("delta", self.delta)
        at_least("samples", self.samples, 1)

    def slope(self, at: Standpoint, /) -> Slope:
        G, M = at.task_gradients()
        points = [self.sample(at.problem, G[0]) for _ in range(self.samples)]
        here = at.space.losses_at(torch.zeros_like(G[0]), at.batch)
        changes = torch.stack([at.space.losses_at(eps, at.batch) - here for eps in points])  # [n, K]
        best = changes.abs().argmax(dim=0).tolist()
        chosen = [(points[r], float(changes[r, i]), i) for i, r in enumerate(best)]
        return _sharpness_slope(at, ob.balance(M), chosen, self.delta)

    def sample(self, problem: TeleportProblem, like: Tensor) -> Tensor:
        """One eps [m], from the problem's generator, of norm delta in each parameter tensor."""
        eps = torch.randn(len(like), generator=problem.generator).to(like)
        parts = eps.split([p.numel() for p in problem.params])
        return torch.cat([part * (self.delta / norm(part).to(part.dtype).clamp_min(1e-30)) for part in parts])


def _sharpness_slope(at: Standpoint, R: Tensor, chosen: list[tuple[Tensor, float, int]], delta: float) -> Slope:
    """Value and gradient of L_g for the chosen (eps_i, L_i(theta + eps_i) - L_i(theta), i)."""
    value, u = 0.0, torch.zeros_like(at.J[0])
    for eps, change, i in chosen:
        weight = float(R[i]) / len(R) / delta
        value += weight * abs(change)
        if change != 0.0:
            (moved,) = at.space.gradients_at(eps, at.batch, [[i]])
            u += (moved - at.J[i]) * (weight if change > 0 else -weight)
    return Slope(value, u, ob.AIM_NORM * value, rate=1 / value if value > 0 else 0.0)


NAMED: dict[str, Objective] = {
    "conflict": OfGradients("conflict"),
    "conflict-exact": OfGradients("conflict", exact=True),
    "norm": OfGradients("norm"),
    "norm-exact": OfGradients("norm", exact=True),
    "sharpness": Sharpness(),
    "sphere": Sphere(),
}
"""Objectives by name; ``"auto"`` is each solver's own choice."""


def named(objective: str | Objective) -> Objective:
    """The objective of that name, or the object itself.

    Raises:
        ValueError: no such objective.
    """
    if isinstance(objective, str) and objective in NAMED:
        return NAMED[objective]
    if isinstance(objective, str) or not isinstance(objective, Objective):
        names = ", ".join(map(repr, ("auto", *NAMED)))
        raise ValueError(f"objective: expected one of {names}, or an object with slope(standpoint), got {objective!r}")
    return objective

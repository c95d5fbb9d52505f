"""The paper's own teleport, for fidelity (COST, Eqns 5-11): loss invariance as a penalty, and what it climbs.

====================  ==================================================================  =========================
name                  objective phi                                                       its gradient
====================  ==================================================================  =========================
``"conflict-exact"``  ``"conflict"`` and ``"norm"`` (``cost_mtl.teleport.objectives``)    double backward
``"norm-exact"``
``"sharpness"``       (1/K) sum_i R_i |L_i(. + eps_i) - L_i| / delta,                     two gradients (Danskin)
                      eps_i = delta g_i / ||g_i|| (Eqn 8)
``"sphere"``          the same, eps_i the best of n random points on the sphere           two gradients
                      (Eqns 6-7, as the official code does)
====================  ==================================================================  =========================

The balance weights R_i (Eqn 10) count as constants. The last two are judged as the norm objective is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from cost_mtl._validation import at_least, non_negative, positive
from cost_mtl.gradients.reductions import norm
from cost_mtl.teleport.base import Acceptance, NoDoubleBackwardError, TeleportProblem
from cost_mtl.teleport.coordinates.base import Coordinates
from cost_mtl.teleport.invariance import kept_rows
from cost_mtl.teleport.objectives import PROMISES
from cost_mtl.teleport.objectives.base import (
    Objective,
    ObjectiveContext,
    Slope,
    Wording,
    in_loss_units,
    wording_of,
)
from cost_mtl.teleport.objectives.gradient_functions import (
    FunctionOfGradients,
    Tasks,
    finite_differences,
    slope_of,
)
from cost_mtl.teleport.objectives.norm import AIM, NormGain, balance
from cost_mtl.teleport.solvers.base import Result, theta_norm, used_batches

# ------------------------------------------------------------------------------------------------ objectives


@runtime_checkable
class GradientObjective(Objective, FunctionOfGradients, Protocol):
    """An objective that is a function of the task gradients."""


@dataclass(frozen=True)
class Exact:
    """A function of the task gradients, its slope by double backward; where the model has none, by finite differences,
    with a note in the report. Judged as the objective itself.

    Args:
        of: :class:`~cost_mtl.teleport.objectives.conflict.Conflict` or
            :class:`~cost_mtl.teleport.objectives.norm.Norm`, say.
    """

    of: GradientObjective

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def wording(self) -> Wording:
        return wording_of(self.of)

    def slope(self, context: ObjectiveContext, /) -> Slope:
        return slope_of(self.of, context, double_backward)

    def gain(self, before: Tensor, after: Tensor, /) -> float:
        return self.of.gain(before, after)

    def least(self, rule: Acceptance, /) -> float:
        return self.of.least(rule)


def double_backward(context: ObjectiveContext, a: Tensor, tasks: Tasks) -> tuple[Tensor, tuple[str, ...]]:
    """The Hessian-vector products of :func:`finite_differences`, exactly where that can be."""
    try:
        return context.coordinates.curvature(a, tasks, context.batch), ()
    except NoDoubleBackwardError as error:
        u, notes = finite_differences(context, a, tasks)
        return u, (*notes, f"finite differences instead of double backward: {error}")


@dataclass(frozen=True)
class Sharpness(NormGain):
    """L_g = (1/K) sum_i R_i |L_i(theta + eps_i) - L_i(theta)| / delta with eps_i = delta g_i / ||g_i||, the maximiser
    over the sphere to first order (COST, Eqn 8). About the R-weighted mean gradient norm, for small delta.

    Its gradient is taken with eps_i fixed, as the envelope theorem has it. K more evaluations with a gradient.

    Args:
        delta: radius of the sphere relative to ||theta||. Default 0.01: large enough for float32 losses.
    """

    delta: float = 0.01
    loss_units: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("delta", self.delta)

    def slope(self, context: ObjectiveContext, /) -> Slope:
        G, M = context.task_gradients()
        radius = self.delta * context.length
        lengths = M.diagonal().clamp_min(0).sqrt()
        here = context.coordinates.losses_at(torch.zeros_like(G[0]), context.batch)
        chosen: list[tuple[Tensor, float, int]] = []
        for i, length in enumerate(lengths.tolist()):
            if length > 0.0:
                eps = G[i] * (radius / length)
                chosen.append((eps, float(context.coordinates.losses_at(eps, context.batch)[i] - here[i]), i))
        return _sharpness_slope(context, balance(M), chosen, radius)


@dataclass(frozen=True)
class Sphere(NormGain):
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
    loss_units: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("delta", self.delta)
        at_least("samples", self.samples, 1)

    def slope(self, context: ObjectiveContext, /) -> Slope:
        G, M = context.task_gradients()
        points = [self.sample(context.problem, G[0]) for _ in range(self.samples)]
        here = context.coordinates.losses_at(torch.zeros_like(G[0]), context.batch)
        changes = torch.stack([context.coordinates.losses_at(eps, context.batch) - here for eps in points])  # [n, K]
        best = changes.abs().argmax(dim=0).tolist()
        chosen = [(points[r], float(changes[r, i]), i) for i, r in enumerate(best)]
        return _sharpness_slope(context, balance(M), chosen, self.delta)

    def sample(self, problem: TeleportProblem, like: Tensor) -> Tensor:
        """One eps [m], from the problem's generator, of norm delta in each parameter tensor."""
        eps = torch.randn(len(like), generator=problem.generator).to(like)
        parts = eps.split([p.numel() for p in problem.params])
        return torch.cat([part * (self.delta / norm(part).to(part.dtype).clamp_min(1e-30)) for part in parts])


def _sharpness_slope(
    context: ObjectiveContext, R: Tensor, chosen: list[tuple[Tensor, float, int]], delta: float
) -> Slope:
    """Value and gradient of L_g for the chosen (eps_i, L_i(theta + eps_i) - L_i(theta), i)."""
    value, u = 0.0, torch.zeros_like(context.J[0])
    for eps, change, i in chosen:
        weight = float(R[i]) / len(R) / delta
        value += weight * abs(change)
        if change != 0.0:
            (moved,) = context.coordinates.gradients_at(eps, context.batch, [[i]])
            u += (moved - context.J[i]) * (weight if change > 0 else -weight)
    return Slope(value, u, AIM * value, rate=1 / value if value > 0 else 0.0)


EXACT: dict[str, Objective] = {
    f"{promise.name}-exact": Exact(promise) for promise in PROMISES if isinstance(promise, GradientObjective)
}
PAPERS: dict[str, Objective] = EXACT | {"sharpness": Sharpness(), "sphere": Sphere()}
"""The objectives of this file by name."""

# ------------------------------------------------------------------------------------------------ the penalty


@dataclass(frozen=True)
class Penalty:
    """Adam steps on L_t - gamma L_g in the coordinates of the move.

    L_t = (1/K) sum_i |L_i - L_i*| with L_i* the loss before the teleport (each term relative to |L_i*| where the
    objective L_g has not the unit of a loss), L_g the objective; ``objective="auto"`` is the paper's, ``"sphere"``.
    Measured, it buys its gain with loss or does nothing (docs/teleport.md), so :class:`~cost_mtl.LevelSet` is the
    default. The transaction rejects what leaves the tolerance, as ever.

    Args:
        gamma: weight of L_g. Default 0.1, the paper's (the official code: 10 L_t - 0.5 L_g).
        lr: Adam's learning rate. Default 1e-3; the official code takes that of the training (1e-4 or 1e-3).
        steps: Adam steps. Default 10: the official code goes twice through the loader, which an optimizer has not at
            hand; here the batches in use take turns.
        constraints: earlier batches used beside the current one, where COST has them. Default 1.
        epsilon: finite-difference displacement relative to ||theta||, for the objectives that have one.
    """

    gamma: float = 0.1
    lr: float = 1e-3
    steps: int = 10
    constraints: int = 1
    epsilon: float = 0.01

    def __post_init__(self) -> None:
        for name in ("lr", "epsilon"):
            positive(name, getattr(self, name))
        non_negative("gamma", self.gamma)
        for name, least in (("steps", 1), ("constraints", 0)):
            at_least(name, getattr(self, name), least)

    def choices(self, M: Tensor) -> tuple[Objective, ...]:
        """``objective="auto"``: the paper's."""
        return (Sphere(),)

    def solve(
        self, problem: TeleportProblem, coordinates: Coordinates, objective: Objective, rule: Acceptance
    ) -> Result:
        """:func:`descend`."""
        return descend(problem, coordinates, objective, rule, self)


def descend(
    problem: TeleportProblem, coordinates: Coordinates, objective: Objective, rule: Acceptance, settings: Penalty
) -> Result:
    """``settings.steps`` Adam steps from phi = 0, the batches in turn. The model is left where they end."""
    used = used_batches(problem, settings.constraints)
    start = [problem.reference(batch) for batch in used]
    length = theta_norm(problem)
    phi: Tensor | None = None
    adam: torch.optim.Adam | None = None
    notes: dict[str, None] = {}
    for step in range(settings.steps):
        turn = step % len(used)
        losses, J = coordinates.gradients(used[turn])
        slope = objective.slope(ObjectiveContext(problem, coordinates, used[turn], J, length, settings.epsilon))
        notes |= dict.fromkeys(slope.notes)
        if phi is None or adam is None:
            phi = torch.zeros_like(slope.gradient)
            adam = torch.optim.Adam([phi], lr=settings.lr)
        pull = invariance_gradient(start[turn], losses, J, rule.invariance, relative=not in_loss_units(objective))
        phi.grad = pull - settings.gamma * slope.gradient
        adam.step()
        coordinates.place(phi)
    return Result(coordinates.delta(), used, settings.steps, tuple(notes))


def invariance_gradient(start: Tensor, losses: Tensor, J: Tensor, invariance: str, *, relative: bool) -> Tensor:
    """Gradient [n] of L_t, from losses [K] before and now and their gradients J [K, n]."""
    scale = kept_rows(start.abs(), invariance) if relative else torch.ones_like(kept_rows(start, invariance))
    signs = kept_rows(losses.to(start) - start, invariance).sign() / torch.where(scale > 0, scale, 1.0)
    return (signs.to(J) @ kept_rows(J, invariance)) / len(signs)

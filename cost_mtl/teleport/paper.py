"""The paper's own optimisation of a teleport, for fidelity: loss invariance as a penalty (COST, Eqns 5-11)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cost_mtl._validation import at_least, positive
from cost_mtl.teleport.base import Acceptance, TeleportProblem
from cost_mtl.teleport.coordinates.base import Space
from cost_mtl.teleport.objectives import formulas as ob
from cost_mtl.teleport.objectives.ascent import Objective, Standpoint, named
from cost_mtl.teleport.solvers.base import Result, theta_norm, used_batches


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
        if not self.gamma >= 0:
            raise ValueError(f"gamma: expected a number >= 0, got {self.gamma}")
        for name, least in (("steps", 1), ("constraints", 0)):
            at_least(name, getattr(self, name), least)

    def choices(self, M: Tensor) -> tuple[Objective, ...]:
        """``objective="auto"``: the paper's."""
        return (named("sphere"),)

    def solve(self, problem: TeleportProblem, space: Space, objective: Objective, rule: Acceptance) -> Result:
        """:func:`descend`."""
        return descend(problem, space, objective, rule, self)


def descend(
    problem: TeleportProblem, space: Space, objective: Objective, rule: Acceptance, settings: Penalty
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
        losses, J = space.gradients(used[turn])
        slope = objective.slope(Standpoint(problem, space, used[turn], J, length, settings.epsilon))
        notes |= dict.fromkeys(slope.notes)
        if phi is None or adam is None:
            phi = torch.zeros_like(slope.gradient)
            adam = torch.optim.Adam([phi], lr=settings.lr)
        pull = invariance_gradient(start[turn], losses, J, rule.invariance, relative=not objective.loss_units)
        phi.grad = pull - settings.gamma * slope.gradient
        adam.step()
        space.place(phi)
    return Result(space.delta(), used, settings.steps, tuple(notes))


def invariance_gradient(start: Tensor, losses: Tensor, J: Tensor, invariance: str, *, relative: bool) -> Tensor:
    """Gradient [n] of L_t, from losses [K] before and now and their gradients J [K, n]."""
    scale = ob.kept(start.abs(), invariance) if relative else torch.ones_like(ob.kept(start, invariance))
    signs = ob.kept(losses.to(start) - start, invariance).sign() / torch.where(scale > 0, scale, 1.0)
    return (signs.to(J) @ ob.kept(J, invariance)) / len(signs)

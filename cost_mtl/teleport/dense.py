"""Teleports without an adapter: every entry of the shared parameters moves."""

from __future__ import annotations

from dataclasses import dataclass

from cost_mtl.teleport.base import TeleportProblem
from cost_mtl.teleport.coordinates.dense import DenseCoordinates
from cost_mtl.teleport.move import Move
from cost_mtl.teleport.objectives.base import Objective
from cost_mtl.teleport.settings import MoveSettings
from cost_mtl.teleport.solvers.base import make_move


@dataclass(frozen=True)
class DenseTeleporter(MoveSettings):
    """Delta theta dense: for small models, raw parameters, and shared parts without a layer that PEFT can adapt.

    Args:
        objective: ``"auto"`` (default): the conflict objective, and if its move is rejected the norm objective; the
            other way round where a cosine has no gradient (opposite or equal directions). ``"conflict"``: the smallest
            cos(g_i, g_0); ``"norm"``: the balanced gradient norms. Also ``"conflict-exact"``, ``"norm-exact"``,
            ``"sharpness"``, ``"sphere"``, or an object: see ``cost_mtl.teleport.objectives.base``.
        solver: :class:`~cost_mtl.LevelSet` (default) or :class:`~cost_mtl.Penalty`, the paper's.
        acceptance: what the move has to keep and to gain.
        tolerance, invariance: shorthands for ``Acceptance(tolerance=..., invariance=...)``, refused beside an
            ``acceptance`` that says something else. With two losses
            and two parameters no direction keeps both: ``invariance="mean"`` keeps their mean.

    Memory: [K (1 + constraints), m] for the constraints, and as much again while projecting.
    """

    def propose(self, problem: TeleportProblem, /) -> Move:
        return self._move(self.objectives_in_turn(problem)[0], problem)

    def propose_for(self, objective: Objective, problem: TeleportProblem, rejected: Move, /) -> Move:
        return self._move(objective, problem)

    def _move(self, objective: Objective, problem: TeleportProblem) -> Move:
        return make_move(
            problem, DenseCoordinates(problem), objective, self.solver, self.acceptance, either=self.any_standard
        )

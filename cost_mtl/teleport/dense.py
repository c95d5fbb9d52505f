"""Teleports without an adapter: every entry of the shared parameters moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cost_mtl.teleport.base import Acceptance, Move, TeleportProblem
from cost_mtl.teleport.coordinates.dense import DenseSpace
from cost_mtl.teleport.objectives.ascent import Objective
from cost_mtl.teleport.settings import check_settings, objectives
from cost_mtl.teleport.solvers.base import Solver, propose
from cost_mtl.teleport.solvers.level_set import LevelSet


@dataclass(frozen=True)
class DenseTeleporter:
    """Delta theta dense: for small models, raw parameters, and shared parts without a layer that PEFT can adapt.

    Args:
        objective: ``"auto"`` (default): the conflict objective, and if its move is rejected the norm objective; the
            other way round where a cosine has no gradient (opposite or equal directions). ``"conflict"``: the smallest
            cos(g_i, g_0); ``"norm"``: the balanced gradient norms. Also ``"conflict-exact"``, ``"norm-exact"``,
            ``"sharpness"``, ``"sphere"``, or an object: see ``cost_mtl.teleport.objectives.ascent``.
        solver: :class:`~cost_mtl.LevelSet` (default) or :class:`~cost_mtl.Penalty`, the paper's.
        acceptance: what the move has to keep and to gain.
        tolerance, invariance: shorthands for ``acceptance.tolerance`` and ``acceptance.invariance``. With two losses
            and two parameters no direction keeps both: ``invariance="mean"`` keeps their mean.

    Memory: [K (1 + constraints), m] for the constraints, and as much again while projecting.
    """

    objective: str | Objective = "auto"
    solver: Solver = field(default_factory=LevelSet)
    acceptance: Acceptance = field(default_factory=Acceptance)
    tolerance: float | None = None
    invariance: Literal["each", "mean"] | None = None

    def __post_init__(self) -> None:
        check_settings(self)

    def propose(self, problem: TeleportProblem, /) -> Move:
        return self._move(objectives(self, problem.gramian), problem)

    def _move(self, choices: tuple[Objective, ...], problem: TeleportProblem) -> Move:
        auto = self.objective == "auto"
        return propose(problem, DenseSpace(problem), choices, self.solver, self.acceptance, auto, self._move)

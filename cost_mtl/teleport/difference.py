"""Teleports along differences of past iterates: few unknowns, no adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from cost_mtl._validation import at_least
from cost_mtl.teleport.base import Acceptance, Move, TeleportProblem
from cost_mtl.teleport.coordinates.difference import DifferenceSpace
from cost_mtl.teleport.objectives.ascent import Objective
from cost_mtl.teleport.settings import check_settings, objectives
from cost_mtl.teleport.solvers.base import Solver, propose
from cost_mtl.teleport.solvers.level_set import LevelSet


@dataclass(frozen=True)
class DifferenceTeleporter:
    """Moves along theta_t - theta_{t-k}, one coefficient per block and direction, with the objectives and constraints
    of the other teleporters. The training-time form of DV-BASI's difference vectors (arXiv 2511.17987), which are
    there used to go on after a merge.

    COST keeps the earlier iterates for it (and saves them in its checkpoints): ``directions`` copies of the shared
    parameters.

    Args:
        directions: earlier iterates to keep. Default 4: with B parameter tensors that makes 4 B unknowns.
        every: steps between two of them. Default 50.
        objective, solver, acceptance, tolerance, invariance: as for :class:`~cost_mtl.LoRATeleporter`.
    """

    directions: int = 4
    every: int = 50
    objective: str | Objective = "auto"
    solver: Solver = field(default_factory=LevelSet)
    acceptance: Acceptance = field(default_factory=Acceptance)
    tolerance: float | None = None
    invariance: Literal["each", "mean"] | None = None

    def __post_init__(self) -> None:
        for name in ("directions", "every"):
            at_least(name, getattr(self, name), 1)
        check_settings(self)

    def propose(self, problem: TeleportProblem, /) -> Move:
        return self._move(objectives(self, problem.gramian), problem)

    def _move(self, choices: tuple[Objective, ...], problem: TeleportProblem) -> Move:
        if not problem.iterates:
            nothing = torch.zeros(sum(p.numel() for p in problem.params))
            return Move(
                nothing, choices[0].promise, notes=(f"there is no earlier iterate yet (one every {self.every})",)
            )
        auto = self.objective == "auto"
        return propose(problem, DifferenceSpace(problem), choices, self.solver, self.acceptance, auto, self._move)

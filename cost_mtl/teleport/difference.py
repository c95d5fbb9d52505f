"""Teleports along differences of past iterates: few unknowns, no adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cost_mtl._validation import at_least
from cost_mtl.teleport.base import TeleportProblem
from cost_mtl.teleport.coordinates.difference import DifferenceCoordinates
from cost_mtl.teleport.move import Move
from cost_mtl.teleport.objectives.base import Objective
from cost_mtl.teleport.settings import MoveSettings
from cost_mtl.teleport.solvers.base import make_move


@dataclass(frozen=True)
class _Iterates:
    """The fields that come before those of :class:`MoveSettings`: dataclasses take the last base's first."""

    directions: int = 4
    every: int = 50


@dataclass(frozen=True)
class DifferenceTeleporter(MoveSettings, _Iterates):
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

    def __post_init__(self, tolerance: float | None, invariance: Literal["each", "mean"] | None) -> None:
        super().__post_init__(tolerance, invariance)
        for name in ("directions", "every"):
            at_least(name, getattr(self, name), 1)

    def propose(self, problem: TeleportProblem, /) -> Move:
        return self._move(self.objectives_in_turn(problem)[0], problem)

    def propose_for(self, objective: Objective, problem: TeleportProblem, rejected: Move, /) -> Move:
        return self._move(objective, problem)

    def objectives_in_turn(self, problem: TeleportProblem, /) -> tuple[Objective, ...]:
        objectives = super().objectives_in_turn(problem)
        return objectives if problem.iterates else objectives[:1]  # no other one would find a move either

    def _move(self, objective: Objective, problem: TeleportProblem) -> Move:
        if not problem.iterates:
            nothing = torch.zeros(sum(p.numel() for p in problem.params))
            return Move(nothing, objective, notes=(f"there is no earlier iterate yet (one every {self.every})",))
        return make_move(
            problem, DifferenceCoordinates(problem), objective, self.solver, self.acceptance, either=self.any_standard
        )

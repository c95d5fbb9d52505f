"""Teleports along differences of past iterates: few unknowns, no adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cost_mtl._validation import at_least
from cost_mtl.gradients.reductions import norm
from cost_mtl.teleport.ascent import Objective
from cost_mtl.teleport.base import Acceptance, Move, TeleportProblem
from cost_mtl.teleport.dense import DenseSpace
from cost_mtl.teleport.level_set import LevelSet
from cost_mtl.teleport.settings import check_settings, objectives
from cost_mtl.teleport.solver import Solver, propose


class DifferenceSpace(DenseSpace):
    """phi: one coefficient per earlier iterate and block (parameter tensor), n = H B. The direction of (h, b) is block
    b of theta - theta_h, scaled to unit length."""

    def __init__(self, problem: TeleportProblem) -> None:
        super().__init__(problem)
        rows = [self._unit_blocks(self.theta - earlier.to(self.theta)) for earlier in problem.iterates]
        self.directions = torch.stack(rows)  # [H, m]

    def _unit_blocks(self, difference: Tensor) -> Tensor:
        lengths = [norm(block).to(block.dtype) for block in self._blocks(difference)]
        units = zip(self._blocks(difference), lengths, strict=True)
        return torch.cat([block / torch.where(length > 0, length, 1.0) for block, length in units])

    def _blocks(self, flat: Tensor) -> list[Tensor]:
        sizes = [p.numel() for p in self.problem.params]
        return list(flat.split(sizes, dim=-1))

    def _pull_back(self, G: Tensor) -> Tensor:
        """[R, m] -> [R, n]: inner products with the directions, block by block."""
        pairs = zip(self._blocks(G), self._blocks(self.directions), strict=True)
        return torch.stack([g @ d.T for g, d in pairs], dim=-1).flatten(1)

    def gradients(self, batch: int) -> tuple[Tensor, Tensor]:
        losses, G = super().gradients(batch)
        return losses, self._pull_back(G)

    def gradients_at(self, delta: Tensor, batch: int, tasks: Sequence[Sequence[int]]) -> Tensor:
        return self._pull_back(super().gradients_at(delta, batch, tasks))

    def curvature(self, directions: Tensor, tasks: Sequence[Sequence[int]], batch: int) -> Tensor:
        return self._pull_back(super().curvature(directions, tasks, batch)[None])[0]

    def metric(self, J: Tensor) -> Tensor | None:
        return None

    def place(self, phi: Tensor) -> None:
        coefficients = phi.view(len(self.directions), -1)
        blocks = self._blocks(self.directions)
        super().place(torch.cat([coefficients[:, b] @ block for b, block in enumerate(blocks)]))


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

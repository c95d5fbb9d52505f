"""Teleports without an adapter: every entry of the shared parameters moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from cost_mtl.base import Acceptance, Move, TeleportProblem
from cost_mtl.gradients import Layout
from cost_mtl.teleport import objective as ob
from cost_mtl.teleport.level_set import LevelSet, propose


def preconditioner(scale: Tensor | None, ratio: float = 10.0) -> Tensor | None:
    """Diagonal metric P = 1 / scale, with the scale divided by its median and clamped to [1/ratio, ratio]."""
    if scale is None:
        return None
    positive = scale[scale > 0]
    if positive.numel() == 0:
        return None
    return 1 / (scale / positive.median()).clamp(1 / ratio, ratio)


class DenseSpace:
    """phi = Delta theta itself, with the base optimizer's own scale as the metric."""

    def __init__(self, problem: TeleportProblem) -> None:
        self.problem = problem
        self.layout = Layout(problem.params)
        self.theta = self.layout.flatten(list(problem.params))
        self.moved = False

    def gradients(self, batch: int) -> tuple[Tensor, Tensor]:
        if batch == 0 and not self.moved:
            return self.problem.losses, self.problem.gradients
        return self.problem.evaluate_gradients(batch)

    def gradients_at(self, delta: Tensor, batch: int, tasks: list[int]) -> Tensor:
        with self.problem.at(delta):
            _, rows = self.problem.evaluate_gradients(batch, tasks=[tasks])
        return rows[0]

    def metric(self, J: Tensor) -> Tensor | None:
        return preconditioner(self.problem.scale)

    def place(self, phi: Tensor) -> None:
        self.moved = True
        with torch.no_grad():
            for p, start, change in zip(
                self.problem.params, self.layout.views(self.theta), self.layout.views(phi), strict=True
            ):
                p.copy_(start + change)

    def length(self) -> float:
        return float(torch.linalg.vector_norm(self.delta(), dtype=torch.float64))

    def delta(self) -> Tensor:
        return self.layout.flatten(list(self.problem.params)) - self.theta


@dataclass(frozen=True)
class DenseTeleporter:
    """Delta theta dense: for small models, raw parameters, and shared parts without a layer that PEFT can adapt.

    Args:
        objective: ``"auto"`` (default): the conflict objective, and if its move is rejected the norm objective; the
            other way round where a cosine has no gradient (opposite or equal directions). ``"conflict"``: the smallest
            cos(g_i, g_0); ``"norm"``: the balanced gradient norms.
        solver: settings of the level-set solver.
        acceptance: what the move has to keep and to gain.

    Memory: [K (1 + constraints), m] for the constraints, and as much again while projecting.
    """

    objective: Literal["auto", "conflict", "norm"] = "auto"
    solver: LevelSet = field(default_factory=LevelSet)
    acceptance: Acceptance = field(default_factory=Acceptance)

    def propose(self, problem: TeleportProblem, /) -> Move:
        return self._move(ob.order(self.objective, problem.gramian), problem)

    def _move(self, objectives: tuple[str, ...], problem: TeleportProblem) -> Move:
        auto = self.objective == "auto"
        return propose(problem, DenseSpace(problem), objectives, self.solver, self.acceptance, auto, self._move)

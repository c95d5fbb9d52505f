"""Combinations of differences of earlier values of the parameters as the coordinates of a move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cost_mtl.gradients.reductions import norm
from cost_mtl.teleport.base import TeleportProblem
from cost_mtl.teleport.coordinates.dense import DenseCoordinates


class DifferenceCoordinates(DenseCoordinates):
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

"""The two-parameter toy of examples/toy_pareto.py as a problem of ``teleport.py``, where LS stalls in its valleys."""

from __future__ import annotations

from collections.abc import Iterator

import problems  # puts examples/ on the path
import torch
from torch import Tensor, nn
from toy_pareto import POINTS, losses


class Plane(nn.Module):
    """A point of the plane; ``trunk`` is what the tasks share, as in the networks."""

    def __init__(self, start: tuple[float, float]) -> None:
        super().__init__()
        self.trunk = nn.Module()
        self.trunk.theta = nn.Parameter(torch.tensor(start, dtype=torch.float64))


class Toy(problems.Problem):
    """Seed 0 starts from the first point where LS stalls, seed 1 from the second."""

    def model(self, seed: int) -> nn.Module:
        return Plane(POINTS[seed % 2])

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        first, second = losses(*model.trunk.theta)
        return {"1": first, "2": second}

    def batches(self, seed: int) -> Iterator[tuple[Tensor, ...]]:
        while True:
            yield ()


def toy() -> Toy:
    return Toy("toy", (), (), 1, 3e-3, warmup=2500)

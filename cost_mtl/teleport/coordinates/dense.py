"""Delta theta itself as the coordinates of a move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cost_mtl._torch.undo import undoing
from cost_mtl.gradients.layout import Layout
from cost_mtl.teleport.base import TeleportProblem


def preconditioner(scale: Tensor | None, ratio: float = 10.0) -> Tensor | None:
    """Diagonal metric P = 1 / scale, with the scale divided by its median and clamped to [1/ratio, ratio]."""
    if scale is None:
        return None
    positive = scale[scale > 0]
    if positive.numel() == 0:
        return None
    return 1 / (scale / positive.median()).clamp(1 / ratio, ratio)


class DenseCoordinates:
    """phi = Delta theta itself, with the base optimizer's own scale as the metric."""

    def __init__(self, problem: TeleportProblem) -> None:
        self.problem = problem
        self.layout = Layout(problem.params)
        self.theta = self.layout.flatten([p.detach() for p in problem.params])
        self.here: Tensor | None = None
        """Delta theta [m] of where the model stands; None: at theta."""

    def gradients(self, batch: int) -> tuple[Tensor, Tensor]:
        known = self.problem.known_gradients(batch)
        return known if known is not None and self.here is None else self.problem.evaluate_gradients(batch)

    def task_gradients(self, batch: int) -> Tensor:
        return DenseCoordinates.gradients(self, batch)[1]

    def gradients_at(self, delta: Tensor, batch: int, tasks: Sequence[Sequence[int]]) -> Tensor:
        with self._displaced(delta):
            _, rows = self.problem.evaluate_gradients(batch, tasks=tasks)
        return rows

    def losses_at(self, delta: Tensor, batch: int) -> Tensor:
        with self._displaced(delta):
            return self.problem.evaluate(batch)

    def curvature(self, directions: Tensor, tasks: Sequence[Sequence[int]], batch: int) -> Tensor:
        return self.problem.evaluate_curvature(directions, tasks, batch)

    @contextmanager
    def _displaced(self, delta: Tensor) -> Iterator[None]:
        here = self.here

        def back() -> None:
            if here is not None:
                self._put(here)

        with undoing(back), self.problem.at(delta if here is None else here + delta):
            yield

    def metric(self, J: Tensor) -> Tensor | None:
        return preconditioner(self.problem.scale)

    def place(self, phi: Tensor) -> None:
        self._put(phi)

    def _put(self, delta: Tensor) -> None:
        self.here = delta.clone() if bool((delta != 0).any()) else None
        with torch.no_grad():
            for p, start, change in zip(
                self.problem.params, self.layout.views(self.theta), self.layout.views(delta), strict=True
            ):
                p.copy_(start + change)

    def length(self) -> float:
        return float(torch.linalg.vector_norm(self.delta(), dtype=torch.float64))

    def delta(self) -> Tensor:
        return self.layout.flatten([p.detach() for p in self.problem.params]) - self.theta

"""Coordinates of a move: what objectives and solvers need to know of an adapter, or of the parameters themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Coordinates(Protocol):
    """Coordinates phi [n] of a move of the shared parameters; phi = 0 is theta itself."""

    def gradients(self, batch: int) -> tuple[Tensor, Tensor]:
        """Losses [K] and their gradients [K, n] in these coordinates, where the model stands."""
        ...

    def task_gradients(self, batch: int) -> Tensor:
        """G [K, m] with respect to the shared parameters, where the model stands."""
        ...

    def gradients_at(self, delta: Tensor, batch: int, tasks: Sequence[Sequence[int]]) -> Tensor:
        """[R, n]: gradients in these coordinates of the summed losses of some tasks each, with the shared parameters
        displaced by delta [m] from where the model stands."""
        ...

    def losses_at(self, delta: Tensor, batch: int) -> Tensor:
        """Losses [K], with the shared parameters displaced by delta [m] from where the model stands."""
        ...

    def curvature(self, directions: Tensor, tasks: Sequence[Sequence[int]], batch: int) -> Tensor:
        """Gradient [n] in these coordinates of sum_r <directions[r], gradient [m] of the summed losses of tasks[r]>, by
        double backward (see ``TeleportProblem.evaluate_curvature``, which raises where there is none)."""
        ...

    def metric(self, J: Tensor) -> Tensor | None:
        """Diagonal of P [n], or None for the identity."""
        ...

    def place(self, phi: Tensor) -> None:
        """Put the model at the coordinates phi."""
        ...

    def length(self) -> float:
        """||Delta theta|| of where the model stands."""
        ...

    def delta(self) -> Tensor:
        """Delta theta [m] of where the model stands."""
        ...

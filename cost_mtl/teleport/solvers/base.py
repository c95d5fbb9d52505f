"""From an objective to a move: what every solver shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from cost_mtl.gradients import reductions
from cost_mtl.teleport.base import Acceptance, TeleportProblem
from cost_mtl.teleport.coordinates.base import Coordinates
from cost_mtl.teleport.move import Move
from cost_mtl.teleport.objectives.base import Objective


@dataclass(frozen=True)
class Line:
    """How a move shrinks: see :class:`~cost_mtl.Move`."""

    first_order: Tensor
    predicted: float


@dataclass(frozen=True)
class Result:
    """Delta theta [m], the batches that it was fitted on, the steps it took, remarks, and how it shrinks (None: it is
    not known)."""

    delta: Tensor
    used: tuple[int, ...]
    inner_steps: int
    notes: tuple[str, ...]
    line: Line | None = None


@runtime_checkable
class Solver(Protocol):
    """Finds a move in given coordinates. The object holds settings only."""

    def choices(self, M: Tensor, /) -> tuple[Objective, ...]:
        """The objectives that ``objective="auto"`` tries in turn, from the Gramian M [K, K]."""
        ...

    def solve(
        self, problem: TeleportProblem, coordinates: Coordinates, objective: Objective, rule: Acceptance, /
    ) -> Result:
        """The move; the model may be left anywhere."""
        ...


def make_move(
    problem: TeleportProblem,
    coordinates: Coordinates,
    objective: Objective,
    solver: Solver,
    rule: Acceptance,
    *,
    either: bool,
    skipped_layers: Mapping[str, str] | None = None,
) -> Move:
    """The solver's move for an objective.

    Args:
        either: an improvement of another standard objective will do as well (``objective="auto"``).
    """
    result = solver.solve(problem, coordinates, objective, rule)
    return Move(
        result.delta,
        objective,
        either=either,
        used=result.used,
        inner_steps=result.inner_steps,
        skipped_layers=skipped_layers or {},
        notes=result.notes,
        acceptance=rule,
        first_order=None if result.line is None else result.line.first_order,
        predicted=None if result.line is None else result.line.predicted,
    )


def used_batches(problem: TeleportProblem, constraints: int) -> tuple[int, ...]:
    """The current batch and up to ``constraints`` earlier ones, leaving the last for the held-out check."""
    return tuple(range(max(1, min(1 + constraints, problem.batches - 1))))


def heldout_batch(problem: TeleportProblem, used: Sequence[int]) -> int | None:
    """The first batch that a move was not fitted on, if there is one."""
    first = max(used) + 1
    return first if first < problem.batches else None


def norm(x: Tensor) -> float:
    """Euclidean length, in float64."""
    return float(reductions.norm(x, exact=True))


def theta_norm(problem: TeleportProblem) -> float:
    """||theta|| of the shared parameters where the model stands."""
    return float(reductions.norm(list(problem.params), exact=True))

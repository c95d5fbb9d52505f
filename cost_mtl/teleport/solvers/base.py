"""From an objective to a move: what every solver shares, and the fallback from one objective to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor

from cost_mtl.gradients import reductions
from cost_mtl.teleport.base import Acceptance, Move, TeleportProblem
from cost_mtl.teleport.coordinates.base import Space
from cost_mtl.teleport.objectives.ascent import Objective


@dataclass(frozen=True)
class Line:
    """How a move shrinks: see :class:`~cost_mtl.base.Move`."""

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
    """Finds a move in the coordinates of a space. The object holds settings only."""

    def choices(self, M: Tensor, /) -> tuple[Objective, ...]:
        """The objectives that ``objective="auto"`` tries in turn, from the Gramian M [K, K]."""
        ...

    def solve(self, problem: TeleportProblem, space: Space, objective: Objective, rule: Acceptance, /) -> Result:
        """The move; the model may be left anywhere."""
        ...


def propose(
    problem: TeleportProblem,
    space: Space,
    objectives: Sequence[Objective],
    solver: Solver,
    rule: Acceptance,
    either: bool,
    again: Callable[[tuple[Objective, ...], TeleportProblem], Move],
    skipped_layers: Mapping[str, str] | None = None,
) -> Move:
    """The move for the first objective; ``again(the others, problem)`` is asked for one if it is rejected.

    Args:
        either: an improvement of another objective than the move's own will do (``objective="auto"``).
    """
    result = solver.solve(problem, space, objectives[0], rule)
    others = tuple(objectives[1:])
    return Move(
        result.delta,
        objectives[0].promise,
        either=either,
        used=result.used,
        inner_steps=result.inner_steps,
        skipped_layers=skipped_layers or {},
        notes=result.notes,
        otherwise=partial(again, others) if others else None,
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

"""Settings that the teleporters have in common."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal

from cost_mtl.teleport.base import Acceptance, TeleportProblem
from cost_mtl.teleport.objectives import NAMED
from cost_mtl.teleport.objectives.base import Objective, is_objective
from cost_mtl.teleport.paper import PAPERS
from cost_mtl.teleport.solvers.base import Solver
from cost_mtl.teleport.solvers.level_set import LevelSet

AUTO = "auto"
"""The name of each solver's own choice of objectives."""

OBJECTIVES: dict[str, Objective] = NAMED | PAPERS
"""All objectives by name."""


@dataclass(frozen=True)
class MoveSettings:
    """What to climb, how, and what has to hold at the end.

    Args:
        objective: ``"auto"`` (the solver's choice, in turn), the name of an objective, or an objective.
        solver: how the move is found.
        acceptance: what it has to keep and to gain.
        tolerance, invariance: shorthands for ``acceptance.tolerance`` and ``acceptance.invariance``. Read the values
            from ``acceptance``, the one place where they are kept.

    Raises:
        ValueError, TypeError: a setting is not as described, or a shorthand contradicts ``acceptance``.
    """

    objective: str | Objective = AUTO
    solver: Solver = field(default_factory=LevelSet)
    acceptance: Acceptance = field(default_factory=Acceptance)
    tolerance: InitVar[float | None] = None
    invariance: InitVar[Literal["each", "mean"] | None] = None

    def __post_init__(self, tolerance: float | None, invariance: Literal["each", "mean"] | None) -> None:
        if self.objective != AUTO:
            named(self.objective)
        if isinstance(self.solver, type) or not isinstance(self.solver, Solver):
            raise TypeError(f"solver: expected LevelSet(), Penalty() or another Solver, got {self.solver!r}")
        if not isinstance(self.acceptance, Acceptance):
            raise TypeError(f"acceptance: expected an Acceptance, got {type(self.acceptance).__name__}")
        acceptance = with_shorthands(self.acceptance, tolerance=tolerance, invariance=invariance)
        object.__setattr__(self, "acceptance", acceptance)

    def objectives_in_turn(self, problem: TeleportProblem, /) -> tuple[Objective, ...]:
        """The objectives to try in turn."""
        if isinstance(self.objective, str) and self.objective == AUTO:
            return tuple(self.solver.choices(problem.gramian))
        return (named(self.objective),)

    @property
    def any_standard(self) -> bool:
        """Whether an improvement of another standard objective than the move's own will do."""
        return isinstance(self.objective, str) and self.objective == AUTO


def with_shorthands(acceptance: Acceptance, **shorthands: Any) -> Acceptance:
    """The acceptance with each shorthand that is given (not None), where it leaves that at its default.

    Raises:
        ValueError: it says something else than the shorthand does.
    """
    given = {name: value for name, value in shorthands.items() if value is not None}
    for name, value in given.items():
        own, default = getattr(acceptance, name), getattr(Acceptance, name)
        if own not in (default, value):
            raise ValueError(
                f"{name}: expected it in one place, got {name}={value!r} beside acceptance=Acceptance({name}={own!r})"
            )
    return replace(acceptance, **given) if given else acceptance


def named(objective: str | Objective) -> Objective:
    """The objective of that name, or the object itself.

    Raises:
        ValueError, TypeError: no such objective.
    """
    if isinstance(objective, str):
        if objective in OBJECTIVES:
            return OBJECTIVES[objective]
    elif is_objective(objective):
        return objective
    names = ", ".join(map(repr, (AUTO, *OBJECTIVES)))
    raise ValueError(
        f"objective: expected one of {names}, or an object with name, slope, gain and least, got {objective!r}"
    )

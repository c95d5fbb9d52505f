"""Settings that the teleporters have in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from cost_mtl.teleport.base import Acceptance
from cost_mtl.teleport.objectives.ascent import Objective, named
from cost_mtl.teleport.solvers.base import Solver


def check_settings(teleporter: Any) -> None:
    """Check ``objective``, ``solver`` and ``acceptance`` of a (frozen) teleporter; its shorthands ``tolerance`` and
    ``invariance``, where given, go into ``acceptance``.

    Raises:
        ValueError, TypeError: a setting is not as described.
    """
    if teleporter.objective != "auto":
        named(teleporter.objective)
    if isinstance(teleporter.solver, type) or not isinstance(teleporter.solver, Solver):
        raise TypeError(f"solver: expected LevelSet(), Penalty() or another Solver, got {teleporter.solver!r}")
    if not isinstance(teleporter.acceptance, Acceptance):
        raise TypeError(f"acceptance: expected an Acceptance, got {type(teleporter.acceptance).__name__}")
    shorthands = {name: getattr(teleporter, name) for name in ("tolerance", "invariance")}
    given = {name: value for name, value in shorthands.items() if value is not None}
    if given:
        object.__setattr__(teleporter, "acceptance", replace(teleporter.acceptance, **given))


def objectives(teleporter: Any, M: Tensor) -> tuple[Objective, ...]:
    """The objectives to try in turn, from the Gramian M [K, K]."""
    if teleporter.objective == "auto":
        choices: tuple[Objective, ...] = teleporter.solver.choices(M)
        return choices
    return (named(teleporter.objective),)

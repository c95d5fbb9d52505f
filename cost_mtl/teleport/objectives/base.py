"""What an objective is: something to climb, and how a move is judged that was made for it.

An objective of your own is one class with ``name``, ``slope``, ``gain`` and ``least``. One that differs from a standard
objective in its slope alone takes the other three from :class:`~cost_mtl.teleport.objectives.conflict.ConflictGain` or
:class:`~cost_mtl.teleport.objectives.norm.NormGain`. Every objective must reach the coordinates for real: the official
code's copy-and-merge cuts that gradient off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from cost_mtl.gradients.gramian import gramian
from cost_mtl.teleport.base import Acceptance, TeleportProblem
from cost_mtl.teleport.coordinates.base import Coordinates

PLACEBO = "none"
"""The objective of a move that promises nothing."""


@dataclass(frozen=True)
class ObjectiveContext:
    """Where the model stands while an objective is asked for its slope.

    Attributes:
        problem, coordinates: the landscape, and the coordinates of the move.
        batch: the batch that the objective is taken on.
        J: gradients [K, n] of the losses on it, in the coordinates.
        length: ||theta|| before the move.
        epsilon: displacement of finite differences relative to it.
    """

    problem: TeleportProblem
    coordinates: Coordinates
    batch: int
    J: Tensor
    length: float
    epsilon: float

    def task_gradients(self) -> tuple[Tensor, Tensor]:
        """G [K, m] and its Gramian M [K, K], float64."""
        G = self.coordinates.task_gradients(self.batch)
        if G is self.problem.gradients:
            return G, self.problem.gramian
        return G, gramian(G, dtype=torch.float64)


@dataclass(frozen=True)
class Slope:
    """An objective where the model stands.

    Attributes:
        value: phi.
        gradient: d phi / d coordinates [n].
        wanted: rise of phi that is worth aiming for.
        notes: remarks for the report.
        rate: the objective's gain for a small rise of phi. Default 0: not known, nothing is predicted.
    """

    value: float
    gradient: Tensor
    wanted: float
    notes: tuple[str, ...] = ()
    rate: float = 0.0


@dataclass(frozen=True)
class Wording:
    """How a report puts a gain.

    Args:
        what: the quantity.
        change: format of a change of it.
        bound: format of the least change that was needed, or the most that was allowed.
        falls: the quantity falls where there is a gain.
    """

    what: str
    change: str = "{:+.4g}"
    bound: str = "{:.4g}"
    falls: bool = False

    def missed(self, gain: float, least: float) -> str:
        """Why a gain is too small."""
        return f"{self._changed(gain)}, and had to {self._verbs[0]} by {self.bound.format(least)}"

    def harmed(self, gain: float, most: float) -> str:
        """Why a loss (a gain below 0) is too large."""
        return f"{self._changed(gain)}, and must not {self._verbs[1]} by more than {self.bound.format(most)}"

    def _changed(self, gain: float) -> str:
        return f"{self.what} changed by {self.change.format(-gain if self.falls else gain)}"

    @property
    def _verbs(self) -> tuple[str, str]:
        return ("fall", "rise") if self.falls else ("rise", "fall")


@runtime_checkable
class Objective(Protocol):
    """Something to climb, and the gain that a move for it is judged by.

    Two optional attributes say more of it:

    ``loss_units``: True: phi scales with the losses. Default False: it does not change when they are scaled.

    ``wording``: a :class:`Wording` for the report. Default: its name.
    """

    @property
    def name(self) -> str:
        """Its name in reports. ``"none"`` is taken by placebos; two objectives with one name are judged alike."""
        ...

    def slope(self, context: ObjectiveContext, /) -> Slope:
        """phi and its gradient where the model stands."""
        ...

    def gain(self, before: Tensor, after: Tensor, /) -> float:
        """What a move has gained, from the Gramians [K, K], float64, of the task gradients before it and after it, on
        the current batch; below 0 where it has lost."""
        ...

    def least(self, rule: Acceptance, /) -> float:
        """The gain that a move must reach to be accepted: a number of the objective's own, or one of the rule's."""
        ...


@runtime_checkable
class Promise(Objective, Protocol):
    """A standard objective: what no accepted move may harm, whatever it was made for."""

    def tolerated(self, rule: Acceptance, /) -> float:
        """The largest loss of it (>= 0), in the unit of its gain, that a move for another objective may cause."""
        ...

    def has_slope(self, M: Tensor, /) -> bool:
        """Whether it can be climbed where the Gramian is M [K, K]."""
        ...


def is_objective(thing: object) -> TypeGuard[Objective]:
    """Whether this is an objective (and not its class).

    Raises:
        ValueError: it is one, but its name can't stand in a report.
    """
    if isinstance(thing, type) or not isinstance(thing, Objective):
        return False
    if not isinstance(thing.name, str) or thing.name in ("", PLACEBO):
        raise ValueError(f"objective.name: expected a word other than {PLACEBO!r}, got {thing.name!r}")
    return True


def in_loss_units(objective: Objective) -> bool:
    """Whether phi scales with the losses."""
    return bool(getattr(objective, "loss_units", False))


def wording_of(objective: Objective) -> Wording:
    """Its own, or its name."""
    wording = getattr(objective, "wording", None)
    return wording if isinstance(wording, Wording) else Wording(f"the {objective.name} objective")

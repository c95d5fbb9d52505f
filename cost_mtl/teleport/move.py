"""What a teleporter returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cost_mtl.teleport.base import Acceptance
from cost_mtl.teleport.objectives import PROMISES
from cost_mtl.teleport.objectives.base import PLACEBO, Objective, is_objective


@dataclass(frozen=True)
class Move:
    """A proposed change of the shared parameters, with its diagnostics.

    Attributes:
        delta: [m], in the order of ``problem.params``, added in each parameter's own dtype.
        objective: what it was meant to improve: an objective (see ``cost_mtl.teleport.objectives.base``), the name of
            a standard one, ``"conflict"`` (the smallest cosine with the mean gradient) or ``"norm"`` (the balanced
            gradient norms), or ``"none"`` (a placebo: accepted on drift alone).
        either: an improvement of another standard objective will do as well (the objective was chosen for where the
            model stands, not by the user).
        used: the batches that the move was fitted on; the transaction checks the drift on these and on one more.
        inner_steps: optimisation steps taken inside.
        skipped_layers: name -> why a layer of the shared part took no part.
        notes: anything else worth reporting (a fallback taken, say).
        acceptance: what the move has to keep and to gain.
        first_order: [m], the part of delta that is proportional to the length of the move, where the rest (corrections)
            goes with its square: t first_order + t^2 (delta - first_order) is the same move at t of its length. Where
            the losses are kept and the objective did not gain enough, one such is evaluated, if it may. None: none is.
        predicted: with ``first_order``, what the move gains to first order, in the unit of the objective's gain.

    Raises:
        ValueError, TypeError: a field is not as described.
    """

    delta: Tensor
    objective: Objective | str
    either: bool = False
    used: tuple[int, ...] = (0,)
    inner_steps: int = 1
    skipped_layers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    acceptance: Acceptance = field(default_factory=Acceptance)
    first_order: Tensor | None = None
    predicted: float | None = None

    def __post_init__(self) -> None:
        _judge(self.objective)
        if not isinstance(self.acceptance, Acceptance):
            raise TypeError(f"acceptance: expected an Acceptance, got {type(self.acceptance).__name__}")

    @property
    def judge(self) -> Objective | None:
        """The objective whose gain decides; None: a placebo."""
        return _judge(self.objective)


def _judge(objective: Any) -> Objective | None:
    if isinstance(objective, str):
        named: dict[str, Objective | None] = {p.name: p for p in PROMISES} | {PLACEBO: None}
        if objective in named:
            return named[objective]
    elif is_objective(objective):
        return objective
    names = f"{', '.join(repr(promise.name) for promise in PROMISES)} or {PLACEBO!r}"
    other = "" if isinstance(objective, str) else ", or an object with name, slope, gain and least"
    raise ValueError(f"objective: expected {names}{other}, got {objective!r}")

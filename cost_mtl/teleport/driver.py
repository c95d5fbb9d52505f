"""When and with what COST teleports: trigger, schedule and teleporter together, and the bookkeeping of attempts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cost_mtl.base import Trigger
from cost_mtl.distributed.failures import Fate
from cost_mtl.gradients.gramian import combine
from cost_mtl.gradients.layout import Layout
from cost_mtl.history import HTR, sigma_for
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.memory import LeftOut
from cost_mtl.step.state import Progress
from cost_mtl.teleport.attempt import Arrival, Outcome, attempt
from cost_mtl.teleport.base import RemembersIterates, Teleporter, TeleportReport
from cost_mtl.teleport.lora import LoRATeleporter, NoAdaptableLayerError
from cost_mtl.teleport.problem import Problem, UnrepeatableClosureError, UnusableBatchError
from cost_mtl.triggers import TeleportSchedule

REFUSALS = (NoAdaptableLayerError, UnrepeatableClosureError)
"""What makes a training step go on without the teleport, said once; ``COST.teleport`` raises it."""


UNCONFIRMED = "the conflict is not there on the batch before (TeleportSchedule(confirm=True))"


@dataclass(frozen=True)
class TeleportDriver:
    """The teleport settings of one COST."""

    trigger: Trigger | None
    schedule: TeleportSchedule
    teleporter: Teleporter | None
    seed: int
    on_teleport: Callable[[TeleportReport], None] | None
    said: set[str] = field(default_factory=set, repr=False)
    """Kinds of refusal, and of earlier batches left out, that the user has been told of."""

    def __post_init__(self) -> None:
        if self.trigger is not None and (isinstance(self.trigger, type) or not callable(self.trigger)):
            raise TypeError(f"trigger: expected a function of the Gramian or None, got {_kind(self.trigger)}")
        if not isinstance(self.schedule, TeleportSchedule):
            raise TypeError(f"schedule: expected a TeleportSchedule, got {_kind(self.schedule)}")
        if self.teleporter is not None and (
            isinstance(self.teleporter, type) or not isinstance(self.teleporter, Teleporter)
        ):
            raise TypeError(
                f"teleporter: expected an object with propose(problem) or None, got {_kind(self.teleporter)}"
            )
        if self.on_teleport is not None and not callable(self.on_teleport):
            raise TypeError(f"on_teleport: expected a function of a TeleportReport, got {_kind(self.on_teleport)}")
        if self.enabled and isinstance(self.teleporter, LoRATeleporter):
            self.teleporter.prepare()

    @property
    def enabled(self) -> bool:
        return self.trigger is not None and self.teleporter is not None

    def allowed(self, progress: Progress) -> bool:
        """Whether the coming step may teleport."""
        if not self.enabled:
            return False
        return self.schedule.allows(progress.step, progress.attempts, progress.last_attempt, progress.last_asked)

    def remember(self, progress: Progress, params: Layout) -> None:
        """Keep the current shared parameters where the teleporter works with earlier ones."""
        teleporter = self.teleporter
        if isinstance(teleporter, RemembersIterates) and progress.step % teleporter.every == 0:
            here = params.flatten(list(params.params))
            progress.iterates = [*progress.iterates, here][-teleporter.directions :]

    def conflict(self, M: Tensor) -> bool:
        """What the trigger says of a Gramian on the host."""
        if self.trigger is None:
            return False
        found = self.trigger(M)
        if isinstance(found, Tensor) and found.numel() != 1:
            raise TypeError(f"trigger: expected it to return a bool, got a tensor of shape {list(found.shape)}")
        return bool(found)

    def generator(self, step: int) -> torch.Generator:
        """Keyed on (seed, step): the same in a resumed run and on every process."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + step) % (1 << 63))

    def persists(self, problem: Problem, progress: Progress) -> bool:
        """Whether the conflict is there on an earlier batch, too (``schedule.confirm``)."""
        if not self.schedule.confirm or problem.batches < 2:
            return True
        progress.last_asked = progress.step
        with problem.fate.shared():
            return self.conflict(problem.gramian_at_theta(1).cpu())

    def run(
        self,
        problem: Problem,
        progress: Progress,
        htr: HTR,
        out: Tensor | None,
        onwards: Callable[[Evaluation], tuple[Evaluation, Tensor]],
        *,
        ask: bool,
    ) -> Outcome | str:
        """One attempt, without the earlier batches that turn out to be of no use. On success ``progress.sigma`` says
        what HTR has to do in the coming step.

        Args:
            onwards: from the evaluation at the new point, the one that training goes on with and its Gramian.
            ask: make none if the conflict is not there on the batch before, but return the reason.
        """
        if self.teleporter is None:
            raise RuntimeError("teleporter: there is none")
        counted = False
        while True:
            try:
                if ask and not self.persists(problem, progress):
                    return UNCONFIRMED
                if not counted:
                    counted = True
                    progress.attempts += 1
                    progress.last_attempt = progress.step
                return self._attempt(problem, self.teleporter, progress, htr, out, onwards)
            except UnusableBatchError as error:
                self.leave_out(LeftOut(error.kind, str(error)))
                problem = problem.without(error.batch, self.generator(progress.step))

    @staticmethod
    def _attempt(
        problem: Problem,
        teleporter: Teleporter,
        progress: Progress,
        htr: HTR,
        out: Tensor | None,
        onwards: Callable[[Evaluation], tuple[Evaluation, Tensor]],
    ) -> Outcome:
        def arrive(evaluation: Evaluation, delta: Tensor) -> Arrival:
            mean = problem.gradients.new_full((len(problem.losses),), 1 / len(problem.losses))
            sigma = sigma_for(
                htr,
                before=combine(problem.gradients, mean),
                after=combine(evaluation.gradients.matrix, mean),
                delta=delta,
                direction=_fitting(progress.direction, delta),
            )
            return Arrival(*onwards(evaluation), sigma)

        return attempt(problem, teleporter, out, arrive, progress)

    def leave_out(self, left_out: LeftOut) -> None:
        """Say that an earlier batch takes no part, once for each kind of reason."""
        self._say(
            f"earlier batch, {left_out.kind}",
            f"memory: a teleport is made without an earlier batch: {left_out.reason} (said once for each kind of "
            "reason; training goes on)",
        )

    def refuse(self, error: Exception) -> str:
        """Say why there is no teleport, once for each kind of reason."""
        self._say(type(error).__name__, f"no teleport where this is so (said once): {error}")
        return str(error)

    def _say(self, kind: str, message: str) -> None:
        if kind not in self.said:
            self.said.add(kind)
            warnings.warn(message, stacklevel=_outside())

    def announce(self, report: TeleportReport, fate: Fate) -> None:
        """Give a report to ``on_teleport``.

        Raises:
            Exception: the callback's own, in every process of the group.
        """
        with fate.shared():
            if self.on_teleport is not None:
                self.on_teleport(report)


def _outside() -> int:
    """``stacklevel`` of the first caller outside of this package and torch."""
    level, frame = 2, sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("cost_mtl", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _fitting(direction: Tensor | None, delta: Tensor) -> Tensor | None:
    return direction.to(delta.device) if direction is not None and direction.shape == delta.shape else None


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__

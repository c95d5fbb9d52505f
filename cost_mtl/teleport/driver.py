"""When and with what COST teleports: trigger, schedule and teleporter together, and the bookkeeping of attempts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cost_mtl.agreement import lacks_memory
from cost_mtl.base import RemembersIterates, Teleporter, TeleportReport, Trigger
from cost_mtl.checkpoint import Progress
from cost_mtl.gradients import Layout, combine, gramian
from cost_mtl.teleport.lora import LoRATeleporter, NoAdaptableLayerError
from cost_mtl.teleport.problem import Problem, UnrepeatableClosureError
from cost_mtl.teleport.transaction import Outcome, attempt, rejected
from cost_mtl.trajectory import HTR, sigma_for
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
    """Kinds of refusal that the user has been told of."""

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
        return self.conflict(gramian(problem.look_at(1), dtype=torch.float64).cpu())

    def run(self, problem: Problem, progress: Progress, htr: HTR, out: Tensor | None) -> Outcome:
        """One attempt. On success ``progress.sigma`` says what HTR has to do in the coming step."""
        if self.teleporter is None:
            raise RuntimeError("teleporter: there is none")
        progress.attempts += 1
        progress.last_attempt = progress.step
        outcome = attempt(problem, self.teleporter, out)
        if outcome.evaluation is not None and outcome.delta is not None:
            mean = problem.gradients.new_full((len(problem.losses),), 1 / len(problem.losses))
            sigma = sigma_for(
                htr,
                before=combine(problem.gradients, mean),
                after=combine(outcome.evaluation.gradients.matrix, mean),
                delta=outcome.delta,
                direction=_fitting(progress.direction, outcome.delta),
            )
            progress.sigma = sigma
            outcome = replace(outcome, report=replace(outcome.report, sigma=sigma))
        if self.on_teleport is not None:
            self.on_teleport(outcome.report)
        return outcome

    def run_in_step(self, problem: Problem, progress: Progress, htr: HTR, out: Tensor | None) -> Outcome | str:
        """:meth:`run` if the conflict persists, where a refusal or a lack of memory must not end the training. The
        reason if it does not, or was refused."""
        try:
            if not self.persists(problem, progress):
                return UNCONFIRMED
            return self.run(problem, progress, htr, out)
        except REFUSALS as error:
            if type(error).__name__ not in self.said:
                self.said.add(type(error).__name__)
                warnings.warn(f"no teleport where this is so (said once): {error}", stacklevel=8)
            return str(error)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            return Outcome(rejected(problem, f"out of memory: {error}"))


def _fitting(direction: Tensor | None, delta: Tensor) -> Tensor | None:
    return direction.to(delta.device) if direction is not None and direction.shape == delta.shape else None


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__

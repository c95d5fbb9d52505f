"""The place where an optimizer stands when it teleports, and what it finds there afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl import history as trajectory
from cost_mtl._torch.autocast import no_autocast
from cost_mtl._torch.dtensor import NO_TELEPORTS
from cost_mtl._torch.param_groups import all_trainable, at_rest
from cost_mtl._torch.rng import Moment
from cost_mtl._torch.undo import undoing
from cost_mtl.distributed.collectives import union
from cost_mtl.distributed.failures import Fate, lacks_memory
from cost_mtl.gradients.gramian import gramian
from cost_mtl.gradients.layout import Layout
from cost_mtl.history import HTR
from cost_mtl.step.closure import Thunk
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.memory import LeftOut, Remembered
from cost_mtl.step.sharing import promote
from cost_mtl.step.state import Progress, beside
from cost_mtl.teleport.attempt import Arrival, Outcome, broken_off
from cost_mtl.teleport.base import TeleportReport
from cost_mtl.teleport.driver import REFUSALS, TeleportDriver
from cost_mtl.teleport.problem import Problem, Tally


def moment_of(base: Optimizer, model: nn.Module) -> Moment:
    """Random streams and buffers as they are now."""
    return Moment.capture(model.modules(), {p.device for p in all_trainable(base, model)})


@dataclass(frozen=True)
class Site:
    """One batch at one point of the training.

    Attributes:
        thunks, batch: the closures of the current micro-batches, and what they were called with.
        before: random streams and buffers from before they were evaluated.
        out: buffer for the gradients at the new point, or None.
        fate: what happens in one process of the group happens in all.
    """

    base: Optimizer
    model: nn.Module
    driver: TeleportDriver
    progress: Progress
    htr: HTR
    fate: Fate
    thunks: Sequence[Thunk]
    batch: tuple[Any, ...]
    before: Moment
    out: Tensor | None

    def teleport(self, now: Evaluation, M: Tensor) -> TeleportReport:
        """Teleport whatever trigger and schedule say. The caller restores the moment, and announces the report."""
        if not self._moving(now):
            raise ValueError("teleport: every shared parameter is in a param group with learning rate 0")
        outcome = self._attempt(now, M, Tally(), ask=False)
        if isinstance(outcome, str):
            raise RuntimeError(f"an attempt that nobody was asked about was refused: {outcome}")
        return outcome.report

    def teleport_in_step(self, now: Evaluation, M: Tensor) -> tuple[Arrival | None, TeleportReport | str]:
        """Teleport if the conflict persists: the new point, or None if nothing moved, and the report of the attempt, or
        why there was none. Random streams and buffers are as they were. A refusal, or a lack of memory, is no error
        here: the step goes on without a teleport."""
        if not self._moving(now):
            return None, "every shared parameter is in a param group with learning rate 0"
        report: TeleportReport | None = None
        tally = Tally()
        try:
            with undoing(moment_of(self.base, self.model).restore):
                report = broken_off(now.losses, M)
                outcome = self._attempt(now, M, tally, ask=True)
        except REFUSALS as error:
            return None, self.driver.refuse(error)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            reason = f"out of memory: {error}"
            return None, reason if report is None else replace(report, reason=reason, closure_calls=tally.calls)
        return (None, outcome) if isinstance(outcome, str) else (outcome.arrival, outcome.report)

    def announce(self, report: TeleportReport) -> None:
        """Hand a report to the user's callback, whose use of random numbers does not count.

        Raises:
            Exception: the callback's own.
        """
        with undoing(moment_of(self.base, self.model).streams.restore):
            self.driver.announce(report, self.fate)

    def _attempt(self, now: Evaluation, M: Tensor, tally: Tally, *, ask: bool) -> Outcome | str:
        """Everything that may fail, and can be undone."""
        with self.fate.shared():
            remembered = [m.thunks(self.thunks, now.names) for m in self._memory()]
        earlier = self._agree(remembered)
        with no_autocast():
            with self.fate.shared():
                here, M_here = self._movable(now, M)
                problem = self._problem(here, M_here, earlier, tally)

            def onwards(evaluation: Evaluation) -> tuple[Evaluation, Tensor]:
                there = evaluation if here is now else promote(evaluation, now.layout)
                return there, gramian(there.gradients.matrix, dtype=M.dtype)

            return self.driver.run(problem, self.progress, self.htr, self.out, onwards, ask=ask)

    def _memory(self) -> list[Remembered]:
        """The earlier batches, latest first, on the devices that the current one is on."""
        if not self.batch:
            return []
        return [replace(m, batch=beside(m.batch, self.batch)) for m in reversed(self.progress.memory)]

    def _agree(self, earlier: Sequence[list[Thunk] | LeftOut]) -> list[list[Thunk]]:
        """The earlier batches that every process of the group can use."""
        for m in earlier:
            if isinstance(m, LeftOut):
                self.driver.leave_out(m)
        device, group = self.fate.device, self.fate.group
        common = -int(union(torch.tensor([-len(earlier)], device=device), group))
        flags = torch.tensor([isinstance(m, LeftOut) for m in earlier[:common]], dtype=torch.uint8, device=device)
        bad = union(flags, group).tolist()
        return [m for m, left_out in zip(earlier, bad, strict=False) if not left_out and not isinstance(m, LeftOut)]

    def _moving(self, now: Evaluation) -> list[Tensor]:
        """The shared parameters whose learning rate is not 0: the others are to stay where they are."""
        resting = at_rest(self.base)
        return [p for p in now.layout.params if id(p) not in resting]

    def _movable(self, now: Evaluation, M: Tensor) -> tuple[Evaluation, Tensor]:
        """The evaluation without the shared parameters that are to stay."""
        moving = self._moving(now)
        if len(moving) == len(now.layout.params):
            return now, M
        part = promote(now, Layout(moving))
        return part, gramian(part.gradients.matrix, dtype=M.dtype)

    def _problem(self, now: Evaluation, M: Tensor, earlier: Sequence[Sequence[Thunk]], tally: Tally) -> Problem:
        layout = now.layout
        if layout.pieces_group is not None:
            raise RuntimeError(NO_TELEPORTS)
        roots = trajectory.second_moment_root(self.base, layout.params)
        return Problem(
            model=self.model,
            layout=layout,
            own=[p for p in all_trainable(self.base, self.model) if id(p) not in layout.index],
            closures=[self.thunks, *earlier],
            moment=self.before,
            names=now.names,
            losses=now.losses.double(),
            gradients=now.gradients.matrix,
            gramian=M.double(),
            scale=None if roots is None else layout.flatten(roots),
            generator=self.driver.generator(self.progress.step),
            iterates=[t for t in self.progress.iterates if len(t) == layout.numel],
            fate=self.fate,
            tally=tally,
        )

"""The place where an optimizer stands when it teleports, and what it finds there afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl import trajectory
from cost_mtl.base import TeleportReport
from cost_mtl.checkpoint import Progress, beside
from cost_mtl.evaluation import Evaluation, Thunk, promote
from cost_mtl.gradients import Layout, gramian
from cost_mtl.parameters import all_trainable, at_rest
from cost_mtl.precision import no_autocast
from cost_mtl.sharding import NO_TELEPORTS
from cost_mtl.teleport.driver import TeleportDriver
from cost_mtl.teleport.problem import Problem
from cost_mtl.teleport.replay import Moment
from cost_mtl.trajectory import HTR
from cost_mtl.undo import undoing


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
    """

    base: Optimizer
    model: nn.Module
    driver: TeleportDriver
    progress: Progress
    htr: HTR
    group: Any
    thunks: Sequence[Thunk]
    batch: tuple[Any, ...]
    before: Moment
    out: Tensor | None

    def teleport(self, now: Evaluation, M: Tensor) -> TeleportReport:
        """Teleport whatever trigger and schedule say. The caller restores the moment."""
        here, M = self._movable(now, M)
        if not here.layout.params:
            raise ValueError("teleport: every shared parameter is in a param group with learning rate 0")
        problem = self._problem(here, M)
        with no_autocast():
            return self.driver.run(problem, self.progress, self.htr, self.out).report

    def teleport_in_step(self, now: Evaluation, M: Tensor) -> tuple[Evaluation, Tensor, TeleportReport | str]:
        """Teleport if the conflict persists: evaluation and Gramian at the new point (or the old ones, if nothing
        moved), and the report of the attempt, or why there was none. Random streams and buffers are as they were."""
        here, M_here = self._movable(now, M)
        if not here.layout.params:
            return now, M, "every shared parameter is in a param group with learning rate 0"
        after = moment_of(self.base, self.model)
        problem = self._problem(here, M_here)
        with undoing(after.restore), no_autocast():
            outcome = self.driver.run_in_step(problem, self.progress, self.htr, self.out)
        if isinstance(outcome, str):
            return now, M, outcome
        if outcome.evaluation is None or outcome.gramian is None:
            return now, M, outcome.report
        if here is now:
            return outcome.evaluation, outcome.gramian, outcome.report
        there = promote(outcome.evaluation, now.layout)
        return there, gramian(there.gradients.matrix, dtype=M.dtype), outcome.report

    def _movable(self, now: Evaluation, M: Tensor) -> tuple[Evaluation, Tensor]:
        """The evaluation without the shared parameters whose learning rate is 0: they are to stay where they are."""
        resting = at_rest(self.base)
        moving = [p for p in now.layout.params if id(p) not in resting]
        if len(moving) == len(now.layout.params):
            return now, M
        part = promote(now, Layout(moving))
        return part, gramian(part.gradients.matrix, dtype=M.dtype)

    def _problem(self, now: Evaluation, M: Tensor) -> Problem:
        layout = now.layout
        if layout.pieces_group is not None:
            raise RuntimeError(NO_TELEPORTS)
        memory = [beside(old, self.batch) for old in reversed(self.progress.memory)] if self.batch else []
        earlier = [[replace(t, batch=old) for t in self.thunks] for old in memory]
        roots = trajectory.second_moment_root(self.base, layout.params)
        return Problem(
            model=self.model,
            layout=layout,
            own=[p for p in all_trainable(self.base, self.model) if id(p) not in layout.index],
            closures=[self.thunks, *earlier],
            moment=self.before,
            losses=now.losses.double(),
            gradients=now.gradients.matrix,
            gramian=M.double(),
            scale=None if roots is None else layout.flatten(roots),
            generator=self.driver.generator(self.progress.step),
            iterates=[t for t in self.progress.iterates if len(t) == layout.numel],
            group=self.group,
        )

"""The parts of one step of COST that change its state, in the order in which :meth:`cost_mtl.COST.step` takes them, and
what is saved of that state. What only computes is in ``cost_mtl.step``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl import history
from cost_mtl._torch import grad_scaler
from cost_mtl._torch.dtensor import local, reshard
from cost_mtl._torch.param_groups import held_by
from cost_mtl._torch.rng import ForwardState, forward_state
from cost_mtl._torch.undo import roll_back, undo_on_failure, undoing
from cost_mtl._wrapper import OptimizerWrapper
from cost_mtl.base import ObservingWeighting, StatefulWeighting, StepReport
from cost_mtl.distributed.consistency import synchronize_
from cost_mtl.distributed.group import group_for
from cost_mtl.history import HTR
from cost_mtl.step.closure import Thunk, bind, run
from cost_mtl.step.combined import Reused
from cost_mtl.step.evaluate import Evaluation, mean_losses, measure
from cost_mtl.step.host_read import HostRead
from cost_mtl.step.identity import identity
from cost_mtl.step.nonfinite import bad_tasks, complaint
from cost_mtl.step.overflow import complaint_of_overflow, overflowing
from cost_mtl.step.parameters import Parameters
from cost_mtl.step.report import skipped_report
from cost_mtl.step.sharing import promote, reached_by_several
from cost_mtl.step.state import Progress, name_of
from cost_mtl.step.state_checks import Frame
from cost_mtl.step.tasks import register_tasks
from cost_mtl.step.warnings import (
    warn_about_left_out,
    warn_about_length,
    warn_about_nothing_to_weigh,
    warn_about_weighting,
)
from cost_mtl.step.weigh import Weights, is_weighed, reusable, unusual_length, unweighed, weigh
from cost_mtl.step.write_grads import new_grads
from cost_mtl.teleport.controller import TeleportController


class StepParts(OptimizerWrapper):
    """The state of COST, and what reads and writes it in a step.

    Attributes:
        progress: all that is remembered from step to step, and saved.
        last_step: report of the last step, or None before the first.
    """

    model: nn.Module
    weighting: StatefulWeighting
    htr: HTR
    heads: Literal["own", "weighted"]
    max_norm: float | None
    every: int
    on_nonfinite: Literal["raise", "skip"]
    process_group: Any
    scaler: Any
    _controller: TeleportController

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        self.last_step: StepReport | None = None
        self.progress = Progress()
        self._first_step = True
        """No step has ended since this object was made or copied: processes are synchronized, graphs looked at."""
        self._shared: list[Tensor] | None = None
        self._group: Any = None
        self._buffer: Tensor | None = None
        self._spare: Tensor | None = None
        self._weighting_checked = self._length_checked = False

    def _parameters(self) -> Parameters:
        return Parameters(self.model, self.base, self._shared, self.progress.shared)

    def _undo_on_failure(self, parameters: Parameters, *, with_grads: bool) -> None:
        """COST's own state and ``requires_grad`` as they are now; ``.grad`` too, or None for all."""
        params, state = parameters.restoring(with_grads=with_grads), self.progress.restoring()
        for restore in (partial(setattr, self, "progress", self.progress), state, params):
            undo_on_failure(restore)

    def _bind(self, closure: Any, batch: tuple[Any, ...]) -> list[Thunk]:
        if "found_inf" in vars(self) or "grad_scale" in vars(self):
            grad_scaler.refuse_outside(self)
        scale = None if self.scaler is None else grad_scaler.scale_of(self.scaler, self.base)
        thunks = bind(closure, batch, scale)
        if self.process_group not in (None, False) or (dist.is_available() and dist.is_initialized()):
            self._group = synchronize_(self.base, self.model, self.process_group, first=self._first_step)
        else:
            self._group = None
        return thunks

    def _reuses_weights(self) -> bool:
        return self.progress.weights is not None and self.progress.step % self.every != 0

    def _evaluate(self, thunks: Sequence[Thunk], parameters: Parameters, *, in_step: bool = True) -> Evaluation:
        """Losses and gradients. Shared parameters and tasks that are new go into ``progress``."""
        weights, reused = self.progress.weights, None
        if weights is not None and in_step and self._reuses_weights():
            reused = Reused(weights, weights if self.heads == "weighted" else dict.fromkeys(weights, 1.0))
        now = measure(thunks, self.model, parameters.layout, parameters.own, self._group, parameters=parameters,
                      out=self._buffer, single=in_step, reused=reused, known=self.progress.names,
                      first_step=self._first_step)  # fmt: skip
        if now.weights is not None:
            return now
        if self._shared is None and len(now.names) > 1:
            several = reached_by_several(now, list(self.model.parameters()))
            if several:
                self.progress.shared = sorted({*self.progress.shared, *several})
                now = promote(now.gathered(), parameters.share(self.progress.shared))
        elif self._first_step and self._shared is not None and len(now.names) > 1:
            left_out = [p for p in self.model.parameters() if id(p) not in now.layout.index]
            warn_about_left_out(self.model, [left_out[k] for k in reached_by_several(now, left_out)])
        self._buffer = now.gradients.matrix
        register_tasks(self.progress, self.weighting, now.names, named=now.named)
        if self._first_step and in_step:
            warn_about_nothing_to_weigh(len(now.names), now.layout.params)
        return now

    def _leave_out_nonfinite(
        self, now: Evaluation, host: HostRead, parameters: Parameters, before: ForwardState | None
    ) -> bool:
        """Whether the step is left out since a task is not finite; a Gramian may overflow where no task has."""
        bad = bad_tasks(now, host, self._group)
        if bad:
            scaled = grad_scaler.is_on(self.scaler) and bool(torch.isfinite(host.losses).all())
            self._leave_out(now, complaint(now, bad, self.progress.step), parameters, before, scaled=scaled)
        return bool(bad)

    def _leave_out(
        self, now: Evaluation, why: str, parameters: Parameters, before: ForwardState | None, *, scaled: bool
    ) -> None:
        """Nothing moves in this step: raise, or count it.

        Args:
            scaled: it may be the loss scale that is to blame.
        """
        parameters.clear_grads()
        if scaled:
            grad_scaler.skip(self.scaler, self.base)
        elif self.on_nonfinite == "raise":
            raise FloatingPointError(why)
        roll_back()  # a teleport, the weighting's new state
        if before is not None and self.on_nonfinite == "skip":
            before.buffers.restore()  # running statistics would keep a NaN for good
        self.progress.step += 1
        self.progress.skipped += 1
        self.last_step, self._first_step = skipped_report(now, self.progress.skipped), False

    def _weigh(self, now: Evaluation, M: Tensor, host: HostRead) -> Weights:
        """The weights. The weighting's new state, and weights to be reused, go into ``progress``."""
        p = self.progress
        if not is_weighed(now):
            return unweighed(now, M, host, p.weighting)
        weights = weigh(self.weighting, now, M, host, p, self._group)
        p.weighting = weights.weighed.state
        if self.every > 1:
            p.weights = reusable(weights, now.names, p.weights)
        learned = weights.weighed.parameter_grads
        if learned and not self._weighting_checked:
            self._weighting_checked = True
            warn_about_weighting([parameter for parameter, _ in learned], self.base)
        lengths = None if self._length_checked else unusual_length(weights, self.max_norm)
        if lengths is not None:
            self._length_checked = True
            warn_about_length(*lengths)
        return weights

    def _write_grads(
        self, now: Evaluation, host: HostRead, weights: Weights, parameters: Parameters, before: ForwardState | None
    ) -> bool:
        """``.grad`` of every parameter. False where it does not fit, so that the step is left out."""
        parameters.clear_grads()
        own = parameters.outside(now.layout)
        new = new_grads(now, host, weights, own, heads=self.heads, max_norm=self.max_norm)
        if new.direction is not None and self.htr in history.NEED_DIRECTION and self._controller.enabled:
            self.progress.direction = new.direction.clone()
        bad = [] if new.fits else overflowing(new.grads, host.scale, now, self._group)
        if bad:
            params = [new.grads[k][0] for k in bad]
            why = complaint_of_overflow(now, new.reach, params, weights.values, self.model, self.progress.step)
            self._leave_out(now, why, parameters, before, scaled=grad_scaler.is_on(self.scaler))
            return False
        for p, grad in new.grads:
            p.grad = grad
        return True

    def _reuse_history(self, now: Evaluation) -> None:
        """HTR after a teleport, with its sigma, which is used up."""
        sigma, self.progress.sigma = self.progress.sigma, None
        if sigma is not None:
            if sigma < 1.0:
                undo_on_failure(history.history_of(self.base, now.layout.params))
            history.apply_htr_(self.base, now.layout.params, self.htr, sigma)

    def _observe(self, weighting: ObservingWeighting, thunks: Sequence[Thunk], rows: Sequence[int]) -> None:
        """Tell the weighting the losses after the update, of the tasks that it was told of. The evaluation does not
        count in running statistics, and does not shift the random streams."""
        with undoing(forward_state(self.base, self.model).restore):
            values = [tasks.values for tasks in run(thunks, self.model)]
        reshard(self.model)
        losses = mean_losses(values, self._group)[list(rows)]
        self.progress.weighting = weighting.observe(losses, self.progress.weighting)

    # ------------------------------------------------------------------------------------------ housekeeping

    def _extra_state(self) -> dict[str, Any]:
        return self.progress.pack(name_of(self.weighting), identity(self.weighting))

    def _read_extra(self, extra: Any) -> Progress:
        if extra is None:
            return Progress()
        sizes = [local(p).numel() for p in self.model.parameters()]
        given = None if self._shared is None else [local(p).numel() for p in self._shared]
        progress = Progress.unpack(extra, name_of(self.weighting), Frame(sizes, given, self.weighting),
                                   weights_of=identity(self.weighting))  # fmt: skip
        device = held_by(self.base)[0].device
        progress.weighting = {k: v.to(device) if isinstance(v, Tensor) and v.is_floating_point() else v
                              for k, v in progress.weighting.items()}  # fmt: skip
        return progress

    def _adopt_extra(self, extra: Progress) -> None:
        self.progress = extra

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffer = self._spare = None
        self.last_step, self._first_step = None, True
        self._group = group_for(self.model, self.process_group)

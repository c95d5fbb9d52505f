"""COST: a multi-task optimizer around any ``torch.optim`` optimizer. Read :meth:`COST.step`: it lists what happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl import history
from cost_mtl._step_parts import StepParts
from cost_mtl._torch import grad_scaler
from cost_mtl._torch.compile import keep_saved_tensors, run_untraced
from cost_mtl._torch.dtensor import NO_TELEPORTS, is_sharded
from cost_mtl._torch.malloc import keep_freed_memory
from cost_mtl._torch.param_groups import all_trainable, held_by
from cost_mtl._torch.rng import ForwardState, forward_state
from cost_mtl._torch.undo import all_or_nothing, commit, undoing, uninterrupted
from cost_mtl._torch.warn import warn
from cost_mtl._validation import at_least, one_of, positive
from cost_mtl.base import Closure, ObservingWeighting, Trigger
from cost_mtl.distributed.failures import FailTogether
from cost_mtl.distributed.group import group_for
from cost_mtl.history import HTR
from cost_mtl.step.closure import Thunk
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.host_read import host_read
from cost_mtl.step.nonfinite import bad_tasks, complaint
from cost_mtl.step.parameters import Shared, grads_aside, resolve_shared
from cost_mtl.step.report import settings_that_differ, step_report
from cost_mtl.step.update import update
from cost_mtl.step.warnings import (
    warn_about_rest,
    warn_about_shared,
)
from cost_mtl.step.weigh import Weights, is_weighed
from cost_mtl.teleport.base import Teleporter, TeleportReport
from cost_mtl.teleport.controller import Attempt, TeleportController, TeleportRequest
from cost_mtl.teleport.lora import LoRATeleporter
from cost_mtl.triggers import DominatedConflict, TeleportSchedule
from cost_mtl.weighting import FairGrad, resolve


class COST(StepParts):
    """Multi-task training with symmetry teleportation (Zhou et al., COST, NeurIPS 2025) around a base optimizer.

    ``step(closure, *batch)`` does, in this order:

    1. losses = closure(*batch)                       the one call of an ordinary step
    2. G [K, m], own gradients                        one backward pass per task
    3. M = G G^T [K, K], read by the host with the losses, once
    4. trigger(M), only where the schedule allows a teleport
    5. if so, the teleporter's move, verified, or every bit as before; then losses, G, M at the new point
    6. w = weighting(M), on the host; M is computed again in float64 where the weights depend on digits it does not have
    7. ``.grad`` = G^T w for the shared parameters, their own tasks' gradients for the others
    8. after a teleport: HTR edits the base optimizer's history of the shared parameters
    9. base.step()

    Around them: what is not finite, or does not fit, leaves the step out before anything moves; the loss scale goes on
    before 2 and off with it; a weighting that asks for the losses after the update (FAMO) gets them after 9.

    Differences from the paper and its code: a teleport is accepted only if every loss stayed where it was and what it
    was made for improved; HTR's default compares gradients and spares the second moment (``cost_mtl.history``);
    the teleporter moves along the level set of all losses instead of trading them against sharpness.

    It is a ``torch.optim.Optimizer``: schedulers, hooks, ``param_groups``, ``add_param_group``, checkpoints, pickling
    and deepcopy work as on the base, which is never replaced.

    Args:
        base: any ``torch.optim`` optimizer (LBFGS excepted) over the parameters to train.
        model: the module, which may be wrapped in DistributedDataParallel.
        shared: shared module(s) or parameters; None: the parameters of ``model`` that two or more losses reach, found
            from the graph (the set may grow in later batches). Parameters outside of it that several tasks reach get
            the plain sum of their gradients.
        weighting: how task gradients are combined; see ``cost_mtl.weighting``. Default
            ``FairGrad(alpha=2.0, scale="project")``: the official scripts' alpha, and a length of d with which the
            learning rate of the plain sum keeps working under SGD and Adam (docs/default_scale.md).
            ``FairGrad.official()`` is the scripts' recipe, ``FairGrad()`` the raw solution, whose length has nothing to
            do with the sum's.
        trigger: when to teleport; None: never.
        schedule: when teleports are allowed.
        teleporter: what a teleport does; None: never.
        htr: what the base optimizer keeps of its history after a teleport: ``"gradient"`` (default), ``"keep"``,
            ``"rollback"``, ``"paper"``, ``"reset"``, ``"momentum"``; see ``cost_mtl.history``. The last three were
            measured to ruin runs with Adam (docs/ablation.md).
        heads: ``"own"`` (default): parameters of one task get their own loss's gradient; ``"weighted"``: times the
            task's weight, as in the official Nash-MTL.
        max_norm: clip the combined shared gradient to this Euclidean norm. None: no clipping. The official recipes of
            Nash-MTL and FairGrad clip at 1.
        memory: earlier batches kept (by reference) from ``step(closure, *batch)`` for the teleport to verify itself
            on; with none the current batch alone has to do. Each is kept with its closure, and so is what that has
            caught. One that can't be evaluated, or has other tasks than the current one, is left out with a warning.
        gradients: ``"full"``, the only kind there is: gradients of the shared parameters themselves.
        every: solve for the weights in every n-th step only; the steps between take one backward pass for all tasks
            together, and no teleport.
        on_nonfinite: ``"raise"`` (default): FloatingPointError that names the task, before parameters or optimizer
            state change (running statistics have seen the batch); ``"skip"``: leave the step out, buffers put back,
            and count it in the report.
        process_group: None: the group of a DDP-wrapped model, else the default group where torch.distributed is
            initialised; False: this process alone.
        scaler: a ``torch.amp.GradScaler``; scaling, unscaling, skipping and updating happen inside ``step``.
        seed: of the teleports' randomness, which is keyed on (seed, step). Global random streams are left alone.
        on_teleport: called with the :class:`~cost_mtl.base.TeleportReport` of every attempt (after an accepted one
            parameters have moved: averages of them may have to start again). If it raises, the teleport is taken back,
            the step is not made, and the exception comes out.

    Attributes:
        last_step: report of the last step, or None before the first.

    Raises:
        TypeError, ValueError: an argument is not what is listed here.
    """

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        *,
        shared: Shared | None = None,
        weighting: Any = FairGrad(alpha=2.0, scale="project"),  # noqa: B008  (frozen settings)
        trigger: Trigger | None = DominatedConflict(),  # noqa: B008
        schedule: TeleportSchedule = TeleportSchedule(),  # noqa: B008
        teleporter: Teleporter | None = LoRATeleporter(),  # noqa: B008
        htr: HTR = "gradient",
        heads: Literal["own", "weighted"] = "own",
        max_norm: float | None = None,
        memory: int = 4,
        gradients: Literal["full"] = "full",
        every: int = 1,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        process_group: Any = None,
        scaler: Any = None,
        seed: int = 0,
        on_teleport: Callable[[TeleportReport], None] | None = None,
    ) -> None:
        super().__init__(base)
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        one_of("htr", htr, history.POLICIES)
        one_of("heads", heads, ("own", "weighted"))
        one_of("gradients", gradients, ("full",))
        one_of("on_nonfinite", on_nonfinite, ("raise", "skip"))
        at_least("memory", memory, 0)
        at_least("every", every, 1)
        positive("max_norm", max_norm, or_none=True)
        self.model = model
        self.weighting = resolve(weighting)
        self.htr, self.heads, self.max_norm = htr, heads, max_norm
        self.memory, self.every, self.on_nonfinite = memory, every, on_nonfinite
        self.process_group, self.scaler = process_group, scaler
        grad_scaler.check(scaler, base)
        keep_saved_tensors()
        if any(p.device.type == "cpu" for p in held_by(base)):
            keep_freed_memory()
        self._controller = TeleportController(trigger, schedule, teleporter, seed, on_teleport)
        self._shared = resolve_shared(shared)
        self._group = group_for(model, process_group)
        if self._shared is not None:
            warn_about_shared(self._shared, base, model)
        warn_about_rest(self._shared or (), base, model)
        if self._controller.enabled and any(map(is_sharded, all_trainable(base, model))):
            warn(NO_TELEPORTS)
            self._controller = replace(self._controller, trigger=None)

    # ------------------------------------------------------------------------------------------ one step

    @all_or_nothing
    @torch.no_grad()
    def step(self, closure: Closure | Sequence[Closure] | None = None, *batch: Any) -> Tensor:  # type: ignore[override]
        """One training step: the nine numbers are those of the class's docstring.

        Args:
            closure: ``closure(*batch)`` returns K losses with their graph (:data:`cost_mtl.base.Losses`); it need not
                call backward or zero_grad, and is called several times in a step that teleports. A sequence of
                closures: micro-batches, one update from their mean, each evaluated and freed in turn.
            batch: handed to the closure, and remembered for teleports.

        Returns:
            Detached losses [K], in task order, before the update.

        Raises:
            TypeError, ValueError: the closure, or what it returned, is not as described.
            FloatingPointError: a task's loss or gradient is not finite and ``on_nonfinite="raise"``.
            Exception: whatever else is raised, from the closure, a weighting, a signal handler (Ctrl-C). Before
                ``base.step()`` has begun, parameters, the base's and COST's state, ``requires_grad``, grad mode and
                hooks are then as they were, and ``.grad`` is None; a teleport is taken back. Running statistics and
                random streams are as the closure's call left them. Signals that come during ``base.step()`` wait for
                its end.
        """
        if torch.compiler.is_compiling():
            return run_untraced(COST.step, self, closure, *batch)
        parameters = self._parameters()
        self._undo_on_failure(parameters, with_grads=False)
        thunks = self._bind(closure, batch)
        may_teleport = self._controller.allowed(self.progress) and not self._reuses_weights()
        before = forward_state(self.base, self.model) if may_teleport or self.on_nonfinite == "skip" else None
        parameters.clear_grads()  # they are views of G: a closure that calls backward would add to it

        # 1, 2: losses [K] and task gradients G [K, m]
        now = self._evaluate(thunks, parameters)
        losses = now.losses
        # 3: M = G G^T, and the host's copy of it
        M, host = host_read(now, self._group, thunks[0].scale)
        if not host.finite and self._leave_out_nonfinite(now, host, parameters, before):
            return losses
        # 4: is there a conflict?
        conflict: bool | None = None
        attempt = Attempt()
        if may_teleport and before is not None and len(now.names) > 1 and now.layout.params:
            conflict = self._controller.conflict(host.gramian)
        # 5: the teleport; then losses, G, M at the new point
        if conflict and before is not None:
            attempt = self._controller.teleport_in_step(self._request(thunks, batch, before, now, M))
            if attempt.arrival is not None:
                there, M = attempt.arrival.evaluation, attempt.arrival.gramian
                # The gradients at the new point replace those at the old; the buffers change roles.
                self._buffer, self._spare = there.gradients.matrix, now.gradients.matrix
                now = there
                M, host = host_read(now, self._group, thunks[0].scale)
        # 6: weights [K]
        weights = self._weigh(now, M, host)
        # 7: .grad
        if not self._write_grads(now, host, weights, parameters, before):
            return losses
        with uninterrupted():
            # 8: HTR
            self._reuse_history(now)
            # 9: the update
            update(self.base, self.scaler, weights.weighed.at_rest)
            self._finish(thunks, now, weights, losses, conflict, attempt)
        if isinstance(self.weighting, ObservingWeighting) and is_weighed(now):
            self._observe(self.weighting, thunks, weights.rows)
        return losses

    @all_or_nothing
    def teleport(self, closure: Closure | Sequence[Closure], *batch: Any) -> TeleportReport:
        """Teleport now, whatever trigger and schedule say. Parameters move if it is accepted; nothing else changes
        (``.grad``, buffers, random streams, the base optimizer's state, which HTR edits in the coming step). It counts
        as an attempt in the schedule's ``cooldown`` and ``limit``. ``last_step`` stays that of the last step. What ends
        with an exception leaves everything as it was.

        Raises:
            RuntimeError: no teleporter; or the closure can't be teleported on (its losses change when it is called
                again at the same parameters).
            ValueError: no shared layer can carry an adapter, or no parameter is shared.
        """
        if torch.compiler.is_compiling():
            return run_untraced(COST.teleport, self, closure, *batch)
        thunks = self._bind(closure, batch)
        if self._controller.teleporter is None:
            raise RuntimeError("teleport: this COST has teleporter=None")
        parameters = self._parameters()
        self._undo_on_failure(parameters, with_grads=True)
        before = forward_state(self.base, self.model)
        with torch.no_grad(), grads_aside(all_trainable(self.base, self.model)), undoing(before.restore):
            self._buffer = None  # the last step's .grad are views of it, and another optimizer may yet use them
            now = self._evaluate(thunks, parameters, in_step=False)
            M, host = host_read(now, self._group)
            if not host.finite and (bad := bad_tasks(now, host, self._group)):
                raise FloatingPointError(complaint(now, bad, self.progress.step))
            if not now.layout.params:
                raise ValueError("teleport: no shared parameter that is trainable and reached by two losses")
            request = self._request(thunks, batch, before, now, M)
            report = self._controller.teleport(request)
        self._controller.announce(request, report)
        commit()
        return report

    # ------------------------------------------------------------------------------------------ its parts

    def _request(
        self, thunks: Sequence[Thunk], batch: tuple[Any, ...], before: ForwardState, now: Evaluation, M: Tensor
    ) -> TeleportRequest:
        together = FailTogether(held_by(self.base)[0].device, self._group)
        return TeleportRequest(
            self.base,
            self.model,
            self.progress,
            thunks,
            batch,
            before,
            now.gathered(),
            M,
            self.htr,
            together,
            self._spare,
        )

    def _finish(
        self,
        thunks: Sequence[Thunk],
        now: Evaluation,
        weights: Weights,
        losses: Tensor,
        conflict: bool | None,
        attempt: Attempt,
    ) -> None:
        """Count the step, remember its batch, report it."""
        self.progress.step += 1
        self._controller.remember(self.progress, thunks, now, self.memory)
        self.last_step, self._first_step = step_report(
            losses, now, weights, conflict=conflict, teleport=attempt.report, no_teleport=attempt.refusal,
            skipped_total=self.progress.skipped,
        ), False  # fmt: skip

    # ------------------------------------------------------------------------------------------ housekeeping

    def __repr__(self) -> str:
        given = {"weighting": self.weighting, "trigger": self._controller.trigger,
                 "teleporter": self._controller.teleporter}  # fmt: skip
        return ", ".join((super().__repr__()[:-1], *settings_that_differ(given, COST.__init__))) + ")"

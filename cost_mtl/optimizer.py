"""COST: a multi-task optimizer around any ``torch.optim`` optimizer. Read :meth:`COST.step`: it lists what happens."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl import agreement, scaling, trajectory
from cost_mtl.absent import keeping_entries, present_rows, weigh_present
from cost_mtl.allocator import keep_freed_memory
from cost_mtl.arguments import at_least, one_of, positive
from cost_mtl.base import (
    Closure,
    ObservingWeighting,
    StepReport,
    Teleporter,
    TeleportReport,
    Trigger,
    Weighed,
    WeightingInputs,
)
from cost_mtl.checkpoint import Progress, detached, name_of
from cost_mtl.compiled import as_it_is, keep_saved_tensors
from cost_mtl.evaluation import (
    Evaluation,
    Reused,
    Thunk,
    bind,
    mean_losses,
    measure,
    promote,
    reached_by_several,
    run,
)
from cost_mtl.gradients import Layout, cosines, norms
from cost_mtl.parallel import group_for
from cost_mtl.parameters import (
    Shared,
    Trainable,
    all_trainable,
    few,
    grads_aside,
    held_by,
    resolve_shared,
    warn_about_left_out,
    warn_about_length,
    warn_about_nothing_to_weigh,
    warn_about_rest,
    warn_about_shared,
    warn_about_weighting,
)
from cost_mtl.reach import Reach, complaint_of_overflow, fit_one_pass, overflowing
from cost_mtl.reductions import LEAST, MOST
from cost_mtl.remembered import remember
from cost_mtl.sharding import NO_TELEPORTS, is_sharded, local, reshard
from cost_mtl.state_checks import Frame
from cost_mtl.teleport.driver import TeleportDriver
from cost_mtl.teleport.lora import LoRATeleporter
from cost_mtl.teleport.replay import Moment
from cost_mtl.teleport.site import Site, moment_of
from cost_mtl.trajectory import HTR
from cost_mtl.triggers import DominatedConflict, TeleportSchedule
from cost_mtl.undo import all_or_nothing, go_back, keep, undo_on_failure, undoing, uninterrupted
from cost_mtl.update import (
    HostRead,
    bad_tasks,
    clip_,
    complaint,
    direction,
    host_read,
    needs_more_digits,
    own_grads,
    read_exactly,
    refuse_weights,
    shared_grads,
)
from cost_mtl.weighting import FairGrad, resolve
from cost_mtl.weighting.resolve import goes_by_name, needs_gramian_only
from cost_mtl.wrapper import OptimizerWrapper


class COST(OptimizerWrapper):
    """Multi-task training with symmetry teleportation (Zhou et al., COST, NeurIPS 2025) around a base optimizer.

    ``step(closure, *batch)`` does, in this order:

    1. losses = closure(*batch)                       the one call of an ordinary step
    2. G [K, m], own gradients                        one backward pass per task
    3. M = G G^T [K, K]; is all of it finite?
    4. trigger(M), only where the schedule allows a teleport
    5. if so, the teleporter's move, verified, or every bit as before; then losses, G, M at the new point
    6. w = weighting(M), on the host; M is computed again in float64 where the weights depend on digits it does not have
    7. ``.grad`` = G^T w for the shared parameters, their own tasks' gradients for the others
    8. after a teleport: HTR edits the base optimizer's history of the shared parameters
    9. base.step()

    Differences from the paper and its code: a teleport is accepted only if every loss stayed where it was and what it
    was made for improved; HTR's default compares gradients and spares the second moment (``cost_mtl.trajectory``);
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
            ``"rollback"``, ``"paper"``, ``"reset"``, ``"momentum"``; see ``cost_mtl.trajectory``. The last three were
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
        one_of("htr", htr, trajectory.POLICIES)
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
        scaling.check(scaler, base)
        keep_saved_tensors()
        if any(p.device.type == "cpu" for p in held_by(base)):
            keep_freed_memory()
        self.last_step: StepReport | None = None
        self.progress = Progress()
        self._driver = TeleportDriver(trigger, schedule, teleporter, seed, on_teleport)
        self._shared = resolve_shared(shared)
        self._buffer: Tensor | None = None
        self._spare: Tensor | None = None
        self._weighting_checked = self._length_checked = False
        self._group = group_for(model, process_group)
        if self._shared is not None:
            warn_about_shared(self._shared, base, model)
        warn_about_rest(self._shared or (), base, model)
        if self._driver.enabled and any(map(is_sharded, all_trainable(base, model))):
            warnings.warn(NO_TELEPORTS, stacklevel=2)
            self._driver = replace(self._driver, trigger=None)

    # ------------------------------------------------------------------------------------------ one step

    @all_or_nothing
    @torch.no_grad()
    def step(self, closure: Closure | Sequence[Closure] | None = None, *batch: Any) -> Tensor:  # type: ignore[override]
        """One training step.

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
            return as_it_is(COST.step, self, closure, *batch)
        undo_on_failure(self._as_it_was(with_grads=False))
        thunks = self._thunks(closure, batch)
        may_teleport = self._driver.allowed(self.progress) and not self._reuses_weights()
        before = moment_of(self.base, self.model) if may_teleport or self.on_nonfinite == "skip" else None
        self._clear_grads()  # they are views of G: a closure that calls backward would add to it
        now = self._evaluate(thunks)
        M, host = host_read(now, self._group, thunks[0].scale)
        losses = now.losses
        if self._refuse(now, host, before):
            return losses
        conflict: bool | None = None
        teleport: TeleportReport | str = ""
        if may_teleport and before is not None and len(now.names) > 1 and now.layout.params:
            conflict = self._driver.conflict(host.gramian)
            if conflict:
                there, M, teleport = self._teleport_in_step(self._site(thunks, batch, before), now.whole(), M)
                if there.gradients is not now.gradients:
                    M, host = host_read(there, self._group, thunks[0].scale)
                now = there
        weighed, weights, M = self._weigh(now, M, host)
        if not self._write(now, host, weighed, weights, before):
            return losses
        with uninterrupted():
            self._reuse_history(now.layout)
            with keeping_entries(self.base, weighed.at_rest):
                self._step_base()
            self._finish(now, weighed, M, losses, conflict, teleport, thunks)
        self._observe(thunks, now, host)
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
            return as_it_is(COST.teleport, self, closure, *batch)
        thunks = self._thunks(closure, batch)
        if self._driver.teleporter is None:
            raise RuntimeError("teleport: this COST has teleporter=None")
        undo_on_failure(self._as_it_was(with_grads=True))
        before = moment_of(self.base, self.model)
        with torch.no_grad(), grads_aside(all_trainable(self.base, self.model)), undoing(before.restore):
            self._buffer = None  # the last step's .grad are views of it, and another optimizer may yet use them
            now = self._evaluate(thunks, single=False)
            M, host = host_read(now, self._group)
            bad = bad_tasks(now, host, self._group)
            if bad:
                raise FloatingPointError(complaint(now, bad, self.progress.step))
            if not now.layout.params:
                raise ValueError("teleport: no shared parameter that is trainable and reached by two losses")
            site = self._site(thunks, batch, before)
            report = site.teleport(now.whole(), M)
        site.announce(report)
        keep()
        return report

    # ------------------------------------------------------------------------------------------ its parts

    def _as_it_was(self, *, with_grads: bool) -> Callable[[], None]:
        """What puts COST's own state and ``requires_grad`` back as they are now; ``.grad`` too, or None for all."""
        progress, fields = self.progress, dict(vars(self.progress))
        params = {id(p): p for p in (*self.model.parameters(), *held_by(self.base))}.values()
        flags = [(p, p.requires_grad, p.grad if with_grads else None) for p in params]

        def back() -> None:
            vars(progress).update(fields)
            self.progress = progress
            for p, flag, grad in flags:
                if p.requires_grad != flag:
                    p.requires_grad_(flag)
                p.grad = grad

        return back

    def _step_base(self) -> None:
        """``base.step()``: what fails after a parameter has moved can't be taken back."""
        held = held_by(self.base)
        versions = [p._version for p in held]
        try:
            scaling.step(self.scaler, self.base)
        except BaseException:
            if versions != [p._version for p in held]:
                keep()
            raise
        keep()

    def _thunks(self, closure: Any, batch: tuple[Any, ...]) -> list[Thunk]:
        scaling.refuse_outside(self)
        thunks = bind(closure, batch, scaling.scale_of(self.scaler, self.base))
        self._group = agreement.meet_(self.base, self.model, self.process_group, first=self.last_step is None)
        return thunks

    def _site(self, thunks: Sequence[Thunk], batch: tuple[Any, ...], before: Moment) -> Site:
        fate = agreement.Fate(held_by(self.base)[0].device, self._group)
        return Site(self.base, self.model, self._driver, self.progress, self.htr, fate,
                    thunks, batch, before, self._spare)  # fmt: skip

    def _teleport_in_step(
        self, site: Site, now: Evaluation, M: Tensor
    ) -> tuple[Evaluation, Tensor, TeleportReport | str]:
        arrival, report = site.teleport_in_step(now, M)
        there = now
        if arrival is not None:
            there, M = arrival.evaluation, arrival.gramian
            # The gradients at the new point replace those at the old; the buffers change roles.
            self._buffer, self._spare = there.gradients.matrix, now.gradients.matrix
        if not isinstance(report, str):
            site.announce(report)
        return there, M, report

    def _layout(self) -> tuple[Layout, list[Tensor]]:
        """The trainable shared parameters and all other trainable ones."""
        every = all_trainable(self.base, self.model)
        if self._shared is None:
            mine: list[Tensor] = list(self.model.parameters())
            shared = [mine[k] for k in self.progress.shared]
        else:
            shared = self._shared
        layout = Layout([p for p in shared if p.requires_grad])
        return layout, [p for p in every if id(p) not in layout.index]

    def _reuses_weights(self) -> bool:
        return self.progress.weights is not None and self.progress.step % self.every != 0

    def _evaluate(self, thunks: Sequence[Thunk], *, single: bool = True) -> Evaluation:
        trainable = Trainable(self.model, self.base, self._layout)
        layout, own = self._layout()
        weights = self.progress.weights
        reused = None
        if weights is not None and single and self._reuses_weights():
            reused = Reused(weights, weights if self.heads == "weighted" else dict.fromkeys(weights, 1.0))
        now = measure(thunks, self.model, layout, own, self._group, trainable=trainable, out=self._buffer,
                      single=single, reused=reused, known=self.progress.names,
                      look_closely=self.last_step is None)  # fmt: skip
        if now.weights is not None:
            return now
        if self._shared is None and len(now.names) > 1:
            mine = list(self.model.parameters())
            several = reached_by_several(now, mine)
            if several:
                now = now.whole()
                self.progress.shared = sorted({*self.progress.shared, *several})
                now = promote(now, self._layout()[0])
        elif self.last_step is None and self._shared is not None and len(now.names) > 1:
            left_out = [p for p in self.model.parameters() if id(p) not in now.layout.index]
            warn_about_left_out(self.model, [left_out[k] for k in reached_by_several(now, left_out)])
        self._buffer = now.gradients.matrix
        self._meet_tasks(now.names, now.named)
        if self.last_step is None and single:
            warn_about_nothing_to_weigh(len(now.names), now.layout.params)
        return now

    def _meet_tasks(self, names: tuple[str, ...], named: bool) -> None:
        """Keep the tasks in mind. A weighting that goes by name is told who is there; the memory of any other is of
        tasks by their places, so with other tasks, or another order, it is void."""
        p, K = self.progress, len(names)
        if p.num_tasks == K and not p.names:  # from a checkpoint of before they were kept
            p.names = p.present = list(names)
        if named and goes_by_name(self.weighting):
            if p.num_tasks is None:
                p.weighting = self.weighting.initial_state(K)
            p.names = [*p.names, *(name for name in names if name not in p.names)]
        elif p.num_tasks is None or p.present != list(names):
            if p.num_tasks is not None and p.weighting:
                what = f"{K} losses instead of {len(p.present)}" if len(p.present) != K else (
                    f"the tasks {few(names)} instead of {few(p.present)}, in this order"
                )  # fmt: skip
                warnings.warn(f"closure: {what}; the weighting starts again", stacklevel=7)
            p.weights, p.weighting = None, self.weighting.initial_state(K)
            p.names = [*p.names, *(name for name in names if name not in p.names)] if named else list(names)
        p.num_tasks, p.present = len(p.names), list(names)

    def _refuse(self, now: Evaluation, host: HostRead, before: Moment | None) -> bool:
        """Whether the step has to be left out because something is not finite."""
        bad = bad_tasks(now, host, self._group)
        if not bad:
            return False
        scaled = scaling.is_on(self.scaler) and bool(torch.isfinite(host.losses).all())
        self._leave_out(now, complaint(now, bad, self.progress.step), before, scaled=scaled)
        return True

    def _leave_out(self, now: Evaluation, why: str, before: Moment | None, *, scaled: bool) -> None:
        """Nothing moves in this step: raise, or count it.

        Args:
            scaled: it may be the loss scale that is to blame.
        """
        self._clear_grads()
        if scaled:
            scaling.skip(self.scaler, self.base)
        elif self.on_nonfinite == "raise":
            raise FloatingPointError(why)
        go_back()  # a teleport, the weighting's new state
        if before is not None and self.on_nonfinite == "skip":
            before.buffers.restore()  # running statistics would keep a NaN for good
        self.progress.step += 1
        self.progress.skipped += 1
        nothing = now.gradients.matrix.new_full((len(now.names),), float("nan"))
        self.last_step = StepReport(
            now.losses, now.names, weights=nothing, skipped=True, skipped_total=self.progress.skipped
        )

    def _weigh(self, now: Evaluation, M: Tensor, host: HostRead) -> tuple[Weighed, Tensor, Tensor]:
        """What the weighting says; its weights [K] on the host, in float64; the Gramian that they were made from."""
        K = len(now.names)
        if now.weights is not None:  # checked when they were solved for
            return Weighed(now.weights, self.progress.weighting), torch.ones(K, dtype=torch.float64), M
        if not _is_weighed(now):
            ones = torch.ones(K, dtype=M.dtype, device=M.device)
            return Weighed(ones, self.progress.weighting), torch.ones(K, dtype=torch.float64), M
        rows, state = self._rows(now, host), detached(self.progress.weighting)
        # A copy: what a step that is left out changed in place would stay.
        weighed = weigh_present(self.weighting, self._inputs(now, host, rows), state, rows, K)
        if needs_more_digits(weighed.solver, now, host):
            M, host = read_exactly(now, host, self._group)
            weighed = weigh_present(self.weighting, self._inputs(now, host, rows), state, rows, K)
        weights = weighed.weights.detach().cpu().double()
        refuse_weights(weights, self.weighting)
        self.progress.weighting = weighed.state
        if weighed.parameter_grads and not self._weighting_checked:
            self._weighting_checked = True
            warn_about_weighting([p for p, _ in weighed.parameter_grads], self.base)
        if not self._length_checked and weighed.direction is None:
            self._length_checked = warn_about_length(weights, host.gramian, host.noise, self.max_norm)
        weighed = replace(weighed, weights=weighed.weights.to(M.device, M.dtype, non_blocking=True))
        if self.every > 1:
            fresh = {now.names[i]: w for i, w in enumerate(weights.tolist()) if i in rows}
            # Weights beyond the range of one backward pass: the coming step solves.
            self.progress.weights = (self.progress.weights or {}) | fresh if fit_one_pass(weights) else None
        return weighed, weights, M

    def _rows(self, now: Evaluation, host: HostRead) -> list[int]:
        """The tasks that the weighting is told of."""
        return present_rows(now, host) if goes_by_name(self.weighting) else list(range(len(now.names)))

    def _inputs(self, now: Evaluation, host: HostRead, rows: Sequence[int]) -> WeightingInputs:
        """What the weighting may look at, of the given tasks."""
        whole = now if needs_gramian_only(self.weighting) else now.whole()
        M, losses, G, names = host.gramian, host.losses, whole.gradients.matrix, now.names
        if len(rows) < len(names):
            at = torch.tensor(rows, device="cpu")
            M, losses, names = M[at][:, at], losses[at], tuple(names[i] for i in rows)
            G = G if needs_gramian_only(self.weighting) else G[at.to(G.device)]
        step, known = self.progress.step, tuple(self.progress.names)
        return WeightingInputs(M, losses, G, step, host.noise, names, known, now.named)

    def _write(self, now: Evaluation, host: HostRead, weighed: Weighed, weights: Tensor, before: Moment | None) -> bool:
        """``.grad`` of every parameter; G's first row becomes the combined direction. False where it does not fit, so
        that the step is left out."""
        self._clear_grads()
        heads = self.heads == "weighted" and _is_weighed(now)
        own = [p for p in all_trainable(self.base, self.model) if id(p) not in now.layout.index]
        reach = Reach.of(now, host, weights, [*now.layout.params, *own], heads=heads)
        found = own_grads(own, now.gradients, weighed.weights if heads else None,
                          wide=reach.wide or reach.own > reach.limit)  # fmt: skip
        if now.layout.params:
            d = self._direction(now, weighed, weights, reach)
            found += shared_grads(now.layout, d, now.gradients.reached)
            if trajectory.needs_direction(self.htr) and self._driver.enabled:
                self.progress.direction = d.clone()
        extra = [(p, grad.detach().to(p.device, p.dtype)) for p, grad in weighed.parameter_grads]
        if extra or weighed.direction is not None or not reach.fits(self.max_norm):
            bad = overflowing([*found, *extra], host.scale, now, self._group)
            if bad:
                params = [[*found, *extra][k][0] for k in bad]
                why = complaint_of_overflow(now, reach, params, weights, self.model, self.progress.step)
                self._leave_out(now, why, before, scaled=scaling.is_on(self.scaler))
                return False
        for p, grad in [*found, *extra]:
            p.grad = grad
        return True

    def _direction(self, now: Evaluation, weighed: Weighed, weights: Tensor, reach: Reach) -> Tensor:
        """d [m], clipped."""
        G = now.gradients.matrix
        shrunk = 1.0
        if now.weights is not None:
            d = G[0]
        elif weighed.direction is not None:
            if weighed.direction.shape != G[0].shape:
                raise ValueError(f"weighting: expected a direction of shape {list(G[0].shape)}, got "
                                 f"{list(weighed.direction.shape)}")  # fmt: skip
            d = weighed.direction.to(G.dtype)
        else:
            if reach.wide and self.max_norm is not None and self.max_norm < reach.shared < math.inf:
                shrunk = self.max_norm / reach.shared  # what is clipped need not fit before
            d = direction(now, weights * shrunk if reach.wide else weighed.weights, wide=reach.wide)
        exact = not LEAST < reach.shared < MOST or (self.max_norm is not None and not LEAST < self.max_norm < MOST)
        return clip_(d, self.max_norm, now.pieces, scale=shrunk, exact=exact)

    def _reuse_history(self, layout: Layout) -> None:
        sigma, self.progress.sigma = self.progress.sigma, None
        if sigma is None:
            return
        if sigma < 1.0:
            undo_on_failure(trajectory.history_of(self.base, layout.params))
        if self.htr == "rollback":
            trajectory.rollback_(self.base, layout.params, sigma)
        else:
            moments: Literal["first", "both"] = "both" if self.htr in ("paper", "reset") else "first"
            trajectory.reuse_trajectory_(self.base, layout.params, sigma, moments=moments)

    def _observe(self, thunks: Sequence[Thunk], now: Evaluation, host: HostRead) -> None:
        if not isinstance(self.weighting, ObservingWeighting) or not _is_weighed(now):
            return
        # The losses after the update must not count in running statistics or shift the random streams.
        with undoing(moment_of(self.base, self.model).restore):
            values = [tasks.values for tasks in run(thunks, self.model)]
        reshard(self.model)
        losses = mean_losses(values, self._group)[self._rows(now, host)]
        self.progress.weighting = self.weighting.observe(losses, self.progress.weighting)

    def _finish(
        self,
        now: Evaluation,
        weighed: Weighed,
        M: Tensor,
        losses: Tensor,
        conflict: bool | None,
        teleport: TeleportReport | str,
        thunks: Sequence[Thunk],
    ) -> None:
        p = self.progress
        p.step += 1
        if thunks[0].batch and self._driver.enabled:
            p.memory = remember(p.memory, thunks, now.names, self.memory)
        self._driver.remember(p, now.layout)
        attempt, refusal = (None, teleport) if isinstance(teleport, str) else (teleport, "")
        report = StepReport(losses, now.names, weights=weighed.weights, conflict=conflict, teleport=attempt,
                            no_teleport=refusal, solver=weighed.solver, skipped_total=p.skipped)  # fmt: skip
        if now.weights is None and (len(now.names) > 1 or now.layout.params):
            report = replace(report, gramian=M, cosines=cosines(M), norms=norms(M))
        self.last_step = report

    # ------------------------------------------------------------------------------------------ housekeeping

    def _clear_grads(self) -> None:
        for p in (*self.model.parameters(), *held_by(self.base)):
            p.grad = None

    def _extra_state(self) -> dict[str, Any]:
        return self.progress.pack(name_of(self.weighting))

    def _read_extra(self, extra: Any) -> Progress:
        if extra is None:
            return Progress()
        sizes = [local(p).numel() for p in self.model.parameters()]
        given = None if self._shared is None else [local(p).numel() for p in self._shared]
        progress = Progress.unpack(extra, name_of(self.weighting), Frame(sizes, given, self.weighting))
        device = held_by(self.base)[0].device
        progress.weighting = {k: v.to(device) if isinstance(v, Tensor) and v.is_floating_point() else v
                              for k, v in progress.weighting.items()}  # fmt: skip
        return progress

    def _adopt_extra(self, extra: Progress) -> None:
        self.progress = extra

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffer = self._spare = None
        self.last_step = None
        self._group = group_for(self.model, self.process_group)


def _is_weighed(now: Evaluation) -> bool:
    """Whether the weighting is asked: tasks that share something (one alone does not), and no weights of an earlier
    step."""
    return now.weights is None and bool(now.layout.params)

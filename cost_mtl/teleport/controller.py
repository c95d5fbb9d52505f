"""When and with what COST teleports, and the one way from a batch to an attempt and its report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl import history
from cost_mtl._torch.autocast import no_autocast
from cost_mtl._torch.dtensor import NO_TELEPORTS
from cost_mtl._torch.param_groups import all_trainable, at_rest
from cost_mtl._torch.rng import ForwardState, forward_state
from cost_mtl._torch.undo import undoing
from cost_mtl._torch.warn import warn
from cost_mtl._validation import integer, type_name
from cost_mtl.base import Trigger
from cost_mtl.distributed.collectives import union
from cost_mtl.distributed.failures import FailTogether, lacks_memory
from cost_mtl.gradients.gramian import combine, gramian
from cost_mtl.gradients.layout import Layout
from cost_mtl.history import HTR, sigma_for
from cost_mtl.step.closure import Thunk
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.memory import LeftOut, Remembered, remember
from cost_mtl.step.sharing import promote
from cost_mtl.step.state import Progress, beside
from cost_mtl.teleport.attempt import Arrival, Outcome, attempt, broken_off
from cost_mtl.teleport.base import RemembersIterates, Teleporter, TeleportReport
from cost_mtl.teleport.lora import LoRATeleporter, NoAdaptableLayerError
from cost_mtl.teleport.problem import Problem, Tally, UnrepeatableClosureError, UnusableBatchError
from cost_mtl.triggers import TeleportSchedule

REFUSALS = (NoAdaptableLayerError, UnrepeatableClosureError)
"""What makes a training step go on without the teleport, with one warning; ``COST.teleport`` raises it."""

UNCONFIRMED = "the conflict is not there on the batch before (TeleportSchedule(confirm=True))"
RESTING = "every shared parameter is in a param group with learning rate 0"


@dataclass(frozen=True)
class Attempt:
    """What came of a teleport that the trigger, or the user, asked for.

    Attributes:
        report: of the attempt; None where none was made.
        arrival: the new point if it was accepted, else None.
        refusal: why no attempt was made; "" where one was.
    """

    report: TeleportReport | None = None
    arrival: Arrival | None = None
    refusal: str = ""


@dataclass(frozen=True)
class TeleportRequest:
    """One batch at one point of the training, of which a teleport is asked.

    Attributes:
        base, model, progress: COST's.
        thunks, batch: the closures of the current micro-batches, and what they were called with.
        before: random streams and buffers from before they were evaluated.
        now: what they gave; M: the Gramian [K, K] of it, on the device.
        htr: what is done with the base optimizer's history after it.
        together: what fails in one process of the group fails in all.
        out: buffer [K, m] for the gradients at the new point, or None.
    """

    base: Optimizer
    model: nn.Module
    progress: Progress
    thunks: Sequence[Thunk]
    batch: tuple[Any, ...]
    before: ForwardState
    now: Evaluation
    M: Tensor
    htr: HTR
    together: FailTogether
    out: Tensor | None


@dataclass(frozen=True)
class TeleportController:
    """The teleport settings of one COST, and what is done with them. ``progress`` is COST's state; see
    :class:`cost_mtl.step.state.Progress` for its fields, of which ``attempts``, ``last_attempt``, ``last_asked``,
    ``sigma``, ``memory`` and ``iterates`` are written request."""

    trigger: Trigger | None
    schedule: TeleportSchedule
    teleporter: Teleporter | None
    seed: int
    on_teleport: Callable[[TeleportReport], None] | None = None
    warned: set[str] = field(default_factory=set, repr=False)
    """Kinds of refusal, and of earlier batches left out, that the user has been warned of."""

    def __post_init__(self) -> None:
        if self.trigger is not None and (isinstance(self.trigger, type) or not callable(self.trigger)):
            raise TypeError(f"trigger: expected a function of the Gramian or None, got {type_name(self.trigger)}")
        if not isinstance(self.schedule, TeleportSchedule):
            raise TypeError(f"schedule: expected a TeleportSchedule, got {type_name(self.schedule)}")
        if self.teleporter is not None and (
            isinstance(self.teleporter, type) or not isinstance(self.teleporter, Teleporter)
        ):
            raise TypeError(
                f"teleporter: expected an object with propose(problem) or None, got {type_name(self.teleporter)}"
            )
        integer("seed", self.seed)
        if self.on_teleport is not None and not callable(self.on_teleport):
            raise TypeError(f"on_teleport: expected a function of a TeleportReport, got {type_name(self.on_teleport)}")
        if self.enabled and isinstance(self.teleporter, LoRATeleporter):
            self.teleporter.prepare()

    @property
    def enabled(self) -> bool:
        return self.trigger is not None and self.teleporter is not None

    # ------------------------------------------------------------------------------------- what a step asks

    def allowed(self, progress: Progress) -> bool:
        """Whether the coming step may teleport."""
        if not self.enabled:
            return False
        return self.schedule.allows(progress.step, progress.attempts, progress.last_attempt, progress.last_asked)

    def conflict(self, M: Tensor) -> bool:
        """What the trigger says of a Gramian on the host."""
        if self.trigger is None:
            return False
        found = self.trigger(M)
        if isinstance(found, Tensor) and found.numel() != 1:
            raise TypeError(f"trigger: expected it to return a bool, got a tensor of shape {list(found.shape)}")
        return bool(found)

    def remember(self, progress: Progress, thunks: Sequence[Thunk], now: Evaluation, most: int) -> None:
        """Keep the batch, the last ``most`` of them, and the shared parameters where the teleporter works with earlier
        ones."""
        if self.enabled and thunks[0].batch:
            progress.memory = remember(progress.memory, thunks, now.names, most)
        teleporter = self.teleporter
        if isinstance(teleporter, RemembersIterates) and progress.step % teleporter.every == 0:
            here = now.layout.flatten(list(now.layout.params))
            progress.iterates = [*progress.iterates, here][-teleporter.directions :]

    def teleport_in_step(self, request: TeleportRequest) -> Attempt:
        """Teleport if the conflict persists. Random streams and buffers are as they were.

        A refusal, or a lack of memory, is no error here: the step goes on without a teleport.
        """
        if not _moving(request.base, request.now):
            return Attempt(refusal=RESTING)
        report: TeleportReport | None = None
        tally = Tally()
        try:
            with undoing(forward_state(request.base, request.model).restore):
                report = broken_off(request.now.losses, request.M)
                made = self._attempt(request, tally, ask=True)
        except REFUSALS as error:
            self._warn_once(type(error).__name__, f"no teleport where this is so (warns once): {error}")
            return Attempt(refusal=str(error))
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            reason = f"out of memory: {error}"
            if report is None:
                return Attempt(refusal=reason)
            made = Attempt(replace(report, reason=reason, closure_calls=tally.calls, **_whose(request)))
        if made.report is not None:
            self.announce(request, made.report)
        return made

    def teleport(self, request: TeleportRequest) -> TeleportReport:
        """Teleport whatever trigger and schedule say. The caller restores random streams and buffers, and announces the
        report."""
        if not _moving(request.base, request.now):
            raise ValueError(f"teleport: {RESTING}")
        made = self._attempt(request, Tally(), ask=False)
        if made.report is None:
            raise RuntimeError(f"an attempt that nobody was asked about was refused: {made.refusal}")
        return made.report

    def announce(self, request: TeleportRequest, report: TeleportReport) -> None:
        """Hand a report to ``on_teleport``, whose use of random numbers does not count.

        Raises:
            Exception: the callback's own, in every process of the group.
        """
        with undoing(forward_state(request.base, request.model).streams.restore), request.together.shared():
            if self.on_teleport is not None:
                self.on_teleport(report)

    # ---------------------------------------------------------------------------------------- one attempt

    def _attempt(self, request: TeleportRequest, tally: Tally, *, ask: bool) -> Attempt:
        """Everything that may fail, and can be undone. On success ``progress.sigma`` says what HTR has to do in the
        coming step.

        Args:
            ask: make none if the conflict is not there on the batch before, but return the reason.
        """
        with request.together.shared():
            remembered = [
                m.thunks(request.thunks, request.now.names) for m in _on_devices(request.progress.memory, request.batch)
            ]
        earlier = self._agree(remembered, request.together)
        with no_autocast():
            with request.together.shared():
                evaluation, M = _movable(request.base, request.now, request.M)
                problem = self._problem(request, evaluation, M, earlier, tally)

            def onwards(found: Evaluation) -> tuple[Evaluation, Tensor]:
                """From the evaluation at the new point, the one that training goes on with and its Gramian."""
                there = found if evaluation is request.now else promote(found, request.now.layout)
                return there, gramian(there.gradients.matrix, dtype=request.M.dtype)

            return self._without_unusable_batches(problem, request, onwards, ask=ask)

    def _without_unusable_batches(
        self,
        problem: Problem,
        request: TeleportRequest,
        onwards: Callable[[Evaluation], tuple[Evaluation, Tensor]],
        *,
        ask: bool,
    ) -> Attempt:
        """One attempt, begun again without each earlier batch that turns out to be of no use."""
        if self.teleporter is None:
            raise RuntimeError("teleporter: there is none")
        progress = request.progress
        counted = False
        while True:
            try:
                if ask and not self._persists(problem, progress):
                    return Attempt(refusal=UNCONFIRMED)
                if not counted:
                    counted = True
                    progress.attempts += 1
                    progress.last_attempt = progress.step
                outcome = self._run(problem, self.teleporter, request, onwards)
                return Attempt(replace(outcome.report, **_whose(request)), outcome.arrival)
            except UnusableBatchError as error:
                self._leave_out(LeftOut(error.kind, str(error)))
                problem = problem.without(error.batch, self._generator(progress.step))

    @staticmethod
    def _run(
        problem: Problem,
        teleporter: Teleporter,
        request: TeleportRequest,
        onwards: Callable[[Evaluation], tuple[Evaluation, Tensor]],
    ) -> Outcome:
        def arrive(evaluation: Evaluation, delta: Tensor) -> Arrival:
            mean = problem.gradients.new_full((len(problem.losses),), 1 / len(problem.losses))
            sigma = sigma_for(
                request.htr,
                before=combine(problem.gradients, mean),
                after=combine(evaluation.gradients.matrix, mean),
                delta=delta,
                direction=_fitting(request.progress.direction, delta),
            )
            return Arrival(*onwards(evaluation), sigma)

        return attempt(problem, teleporter, request.out, arrive, request.progress)

    def _persists(self, problem: Problem, progress: Progress) -> bool:
        """Whether the conflict is there on an earlier batch, too (``schedule.confirm``)."""
        if not self.schedule.confirm or problem.batches < 2:
            return True
        progress.last_asked = progress.step
        with problem.fate.shared():
            return self.conflict(problem.gramian_at_theta(1).cpu())

    def _generator(self, step: int) -> torch.Generator:
        """Keyed on (seed, step): the same in a resumed run and on every process."""
        return torch.Generator().manual_seed((self.seed * 1_000_003 + step) % (1 << 63))

    def _agree(self, earlier: Sequence[list[Thunk] | LeftOut], together: FailTogether) -> list[list[Thunk]]:
        """The earlier batches that every process of the group can use."""
        for m in earlier:
            if isinstance(m, LeftOut):
                self._leave_out(m)
        device, group = together.device, together.group
        common = -int(union(torch.tensor([-len(earlier)], device=device), group))
        flags = torch.tensor([isinstance(m, LeftOut) for m in earlier[:common]], dtype=torch.uint8, device=device)
        bad = union(flags, group).tolist()
        return [m for m, left_out in zip(earlier, bad, strict=False) if not left_out and not isinstance(m, LeftOut)]

    def _problem(
        self,
        request: TeleportRequest,
        evaluation: Evaluation,
        M: Tensor,
        earlier: Sequence[Sequence[Thunk]],
        tally: Tally,
    ) -> Problem:
        layout = evaluation.layout
        if layout.pieces_group is not None:
            raise RuntimeError(NO_TELEPORTS)
        roots = history.second_moment_root(request.base, layout.params)
        return Problem(
            model=request.model,
            layout=layout,
            own=[p for p in all_trainable(request.base, request.model) if id(p) not in layout.index],
            closures=[request.thunks, *earlier],
            state=request.before,
            names=evaluation.names,
            losses=evaluation.losses.double(),
            gradients=evaluation.gradients.matrix,
            gramian=M.double(),
            scale=None if roots is None else layout.flatten(roots),
            generator=self._generator(request.progress.step),
            iterates=[t for t in request.progress.iterates if len(t) == layout.numel],
            fate=request.together,
            tally=tally,
        )

    def _leave_out(self, left_out: LeftOut) -> None:
        """Say that an earlier batch takes no part, once for each kind of reason."""
        self._warn_once(
            f"earlier batch, {left_out.kind}",
            f"memory: a teleport is made without an earlier batch: {left_out.reason} (warns once for each kind of "
            "reason; training goes on)",
        )

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            warn(message)


def _on_devices(memory: Sequence[Remembered], batch: tuple[Any, ...]) -> list[Remembered]:
    """The earlier batches, latest first, on the devices that the current one is on."""
    return [replace(m, batch=beside(m.batch, batch)) for m in reversed(memory)] if batch else []


def _moving(base: Optimizer, now: Evaluation) -> list[Tensor]:
    """The shared parameters whose learning rate is not 0: the others are to stay where they are."""
    resting = at_rest(base)
    return [p for p in now.layout.params if id(p) not in resting]


def _movable(base: Optimizer, now: Evaluation, M: Tensor) -> tuple[Evaluation, Tensor]:
    """The evaluation without the shared parameters that are to stay."""
    moving = _moving(base, now)
    if len(moving) == len(now.layout.params):
        return now, M
    part = promote(now, Layout(moving))
    return part, gramian(part.gradients.matrix, dtype=M.dtype)


def _whose(request: TeleportRequest) -> dict[str, Any]:
    """What a report says of its step: number and names of the tasks."""
    return {"step": request.progress.step, "names": tuple(request.now.names)}


def _fitting(direction: Tensor | None, delta: Tensor) -> Tensor | None:
    return direction.to(delta.device) if direction is not None and direction.shape == delta.shape else None

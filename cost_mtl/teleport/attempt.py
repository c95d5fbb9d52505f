"""The teleport as a transaction: propose, verify, accept, or put every bit back.

One for all teleporters, so that none of them can be less careful than another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cost_mtl._torch.undo import undo_on_failure, undoing
from cost_mtl.distributed.collectives import broadcast_
from cost_mtl.gradients.gramian import cosines, gramian, norms
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.state import Progress
from cost_mtl.teleport.acceptance import better_length, judged
from cost_mtl.teleport.base import ProposesInTurn, Teleporter, TeleportProblem, TeleportReport
from cost_mtl.teleport.invariance import relative_change
from cost_mtl.teleport.move import Move
from cost_mtl.teleport.objectives.base import PLACEBO, Objective
from cost_mtl.teleport.problem import Problem, UnrepeatableClosureError
from cost_mtl.teleport.snapshot import Structure
from cost_mtl.teleport.solvers.base import heldout_batch

REPEATABLE = 1e-3
"""Largest relative difference of a loss between two evaluations at one theta under the same random streams."""


SAME_BATCH = (
    "an earlier batch gave exactly the current losses: it is the same, or the closure does not use the batch that it "
    "is handed; nothing was checked on data that the move was not fitted on"
)


@dataclass(frozen=True)
class Outcome:
    """What came of an attempt.

    Attributes:
        report: of the attempt.
        arrival: what training goes on from if it was accepted, else None.
    """

    report: TeleportReport
    arrival: Arrival | None = None


@dataclass(frozen=True)
class Arrival:
    """The new point.

    Attributes:
        evaluation: losses and gradients there.
        gramian: M [K, K] there.
        sigma: HTR's blend factor for the coming step.
    """

    evaluation: Evaluation
    gramian: Tensor
    sigma: float


@dataclass
class _Candidate:
    """What was found at the last point that was evaluated."""

    losses: Tensor | None = None
    evaluation: Evaluation | None = None
    M: Tensor | None = None
    drift: float | None = None
    heldout: float | None = None
    gained: Objective | None = None
    """The objective that gained enough; None if none did."""
    notes: tuple[str, ...] = ()


def attempt(
    problem: Problem,
    teleporter: Teleporter,
    out: Tensor | None,
    arrive: Callable[[Evaluation, Tensor], Arrival],
    progress: Progress,
) -> Outcome:
    """Try one teleport. If it is accepted the parameters stand at the new point, else every bit is what it was.

    All that can fail happens while it can still be undone, in every process of the group: what is raised here was
    raised at theta. The caller puts random streams and buffers back.

    Args:
        out: buffer [K, m] for the task gradients at the new point; not the one that ``problem.gradients`` is in.
        arrive: called with the evaluation at the new point and the move [m], for what the step needs from there on.
        progress: its ``sigma`` is set for the coming step if the move is accepted.

    Raises:
        UnrepeatableClosureError, UnusableBatchError: see there.
        Exception: whatever the closure or the teleporter raises, after everything was put back.
    """
    began = time.perf_counter()
    structure = Structure.capture([problem.model], [*problem.params, *problem.own])
    accepted, sigma = False, progress.sigma

    def undo() -> None:
        structure.restore()
        if not accepted:
            problem.reset()
            progress.sigma = sigma

    undo_on_failure(partial(_put_back, problem, structure))  # also of what comes after it in the step
    with undoing(undo):
        with problem.fate.shared():
            tried = _search(problem, teleporter, structure, out)
            there = tried.candidate.evaluation
            found = None if tried.reason or there is None else arrive(there, tried.delta)
            report = _report(problem, tried, found, time.perf_counter() - began)
            outcome = Outcome(report, found)
        if found is not None:
            progress.sigma = found.sigma
            accepted = True
    return outcome


def _put_back(problem: Problem, structure: Structure) -> None:
    structure.restore()
    problem.reset()


@dataclass(frozen=True)
class _Tried:
    """A move that was verified.

    Attributes:
        move: as proposed.
        delta: [m], the change of the parameters that was evaluated last.
        candidate: what was found there.
        reason: why it is rejected; "" if it is not.
    """

    move: Move
    delta: Tensor
    candidate: _Candidate
    reason: str


def _search(problem: Problem, teleporter: Teleporter, structure: Structure, out: Tensor | None) -> _Tried:
    """The first move that holds, or the last one that did not. An accepted move's parameters are in place."""
    _require_repeatable(problem)
    tried = _try(problem, partial(teleporter.propose, problem), structure, out)
    if not isinstance(teleporter, ProposesInTurn):
        return tried
    with problem.fate.shared():
        others = fallback_objectives(teleporter, problem, tried.move)
    for objective in others:
        if not tried.reason:
            break
        ask = partial(teleporter.propose_for, objective, problem, tried.move)
        tried = _try(problem, ask, structure, out)
    return tried


def fallback_objectives(teleporter: ProposesInTurn, problem: TeleportProblem, first: Move) -> Sequence[Objective]:
    """The objectives that are left where the first move is rejected: none where that was for another one than the
    teleporter's first (a subclass may have overridden ``propose`` alone)."""
    objectives = teleporter.objectives_in_turn(problem)
    return objectives[1:] if objectives and objectives[0] == first.objective else ()


def _try(problem: Problem, ask: Callable[[], Move], structure: Structure, out: Tensor | None) -> _Tried:
    """Ask for a move at theta and verify it, and another length of it where that may do."""
    problem.reset()
    with problem.fate.shared():
        try:
            move = _checked(ask(), problem)
        finally:
            structure.restore()
            problem.reset()
        delta = move.delta.to(problem.layout.device, problem.layout.dtype)
    delta = broadcast_(delta, problem.group)
    candidate, reason = _verify(problem, move, delta, out)
    second = _along(problem, move, delta, candidate) if reason else None
    if second is not None:
        t, delta = second
        candidate, reason = _verify(problem, move, delta, out)
        candidate.notes = (*candidate.notes, f"at {t:.2f} of its length, for its objective")
    return _Tried(move, delta, candidate, reason)


def _along(problem: Problem, move: Move, delta: Tensor, candidate: _Candidate) -> tuple[float, Tensor] | None:
    """Another length, and the move of that length, where the losses were kept at delta [m] and the promise was not, if
    it may be kept there."""
    if move.first_order is None or candidate.M is None or not bool(torch.isfinite(candidate.M).all()):
        return None
    with problem.fate.shared():
        t = better_length(move, problem.gramian, candidate.M)
    if t is None:
        return None
    with problem.fate.shared():
        straight = move.first_order.to(delta.device, delta.dtype)
        there = t * straight + t * t * (delta - straight)
    return t, broadcast_(there, problem.group)


def _require_repeatable(problem: Problem) -> None:
    again = problem.evaluate(0)
    change = relative_change(problem.losses, again)
    if not change <= REPEATABLE:
        raise UnrepeatableClosureError(
            "closure: expected the same losses when it is called again at the same parameters under the same random "
            f"streams, got a relative change of {change:.1e}. Does it draw a batch of its own, or use a generator of "
            "its own? Hand the batch to step(closure, *batch) instead."
        )


def _checked(move: Any, problem: Problem) -> Move:
    if not isinstance(move, Move):
        raise TypeError(f"teleporter: expected propose() to return a cost_mtl.Move, got {type(move).__name__}")
    for name, vector in (("delta", move.delta), ("first_order", move.first_order)):
        if vector is not None and vector.shape != (problem.layout.numel,):
            raise ValueError(f"{name}: expected shape [{problem.layout.numel}], got {list(vector.shape)}")
    if not move.used or not set(move.used) <= set(range(problem.batches)):
        raise ValueError(f"used: expected batches from 0 to {problem.batches - 1}, got {move.used}")
    return move


def _verify(problem: Problem, move: Move, delta: Tensor, out: Tensor | None) -> tuple[_Candidate, str]:
    """Evaluate theta + delta; what was found there, and why it is rejected ("" if it is not)."""
    candidate = _Candidate()
    if not bool(torch.isfinite(delta).all()):
        return candidate, "the proposed move is not finite"
    if not bool((delta != 0).any()):
        return candidate, "; ".join(("the teleporter found no move", *move.notes))
    problem.place(delta)
    reason = _losses_kept(problem, move, candidate, heldout_batch(problem, move.used))
    return candidate, reason or _objective_gained(problem, move, candidate, out)


def _losses_kept(problem: Problem, move: Move, candidate: _Candidate, heldout: int | None) -> str:
    rule, drifts = move.acceptance, []
    what = "a loss" if rule.invariance == "each" else "the mean loss"
    references = {b: problem.reference(b) for b in (*move.used, *(() if heldout is None else (heldout,)))}
    for batch in move.used:
        losses = problem.evaluate(batch)
        if batch == 0:
            candidate.losses = losses
        drifts.append(relative_change(references[batch], losses, rule.invariance))
    candidate.drift = max(drifts)
    if not candidate.drift <= rule.tolerance:
        return f"{what} drifted by {candidate.drift:.2%}, more than the tolerance of {rule.tolerance:.2%}"
    if heldout is not None:
        if torch.equal(references[heldout], problem.losses):
            candidate.notes = (SAME_BATCH,)
        candidate.heldout = relative_change(references[heldout], problem.evaluate(heldout), rule.invariance)
        if not candidate.heldout <= rule.tolerance_heldout:
            return (f"{what} drifted by {candidate.heldout:.2%} on a batch the move was not fitted on, more than the "
                    f"tolerance of {rule.tolerance_heldout:.2%}")  # fmt: skip
    return ""


def _objective_gained(problem: Problem, move: Move, candidate: _Candidate, out: Tensor | None) -> str:
    candidate.evaluation = problem.measure(out)
    candidate.M = gramian(candidate.evaluation.gradients.matrix, dtype=torch.float64)
    if not bool(torch.isfinite(candidate.M).all()):
        return "the gradients at the new point are not finite"
    with problem.fate.shared():
        candidate.gained, reason = judged(move, problem.gramian, candidate.M)
    return reason


def _report(problem: Problem, tried: _Tried, arrival: Arrival | None, seconds: float) -> TeleportReport:
    move, candidate, reason = tried.move, tried.candidate, tried.reason
    before, after = problem.gramian, candidate.M
    kept = "every loss" if move.acceptance.invariance == "each" else "the mean loss"
    judge = candidate.gained or move.judge
    objective = PLACEBO if judge is None else judge.name
    theta = sum(float(t.double().square().sum()) for t in problem.theta) ** 0.5
    return TeleportReport(
        accepted=not reason,
        reason=reason or f"{kept} kept, {objective} objective improved",
        losses_before=problem.losses,
        losses_after=candidate.losses,
        norms_before=norms(before),
        norms_after=None if after is None else norms(after),
        cosines_before=cosines(before),
        cosines_after=None if after is None else cosines(after),
        drift=candidate.drift,
        drift_heldout=candidate.heldout,
        sigma=None if arrival is None else arrival.sigma,
        inner_steps=move.inner_steps,
        closure_calls=problem.calls,
        seconds=seconds,
        skipped_layers=dict(move.skipped_layers),
        objective=objective,
        length=float(tried.delta.double().norm()) / theta if theta else 0.0,
        notes=(*move.notes, *candidate.notes),
    )


def broken_off(losses: Tensor, M: Tensor) -> TeleportReport:
    """The report of an attempt that ended before there was a move, from losses [K] and the Gramian [K, K] at theta;
    its reason is left to be filled in."""
    return TeleportReport(
        accepted=False, reason="", losses_before=losses.double(), losses_after=None, norms_before=norms(M),
        norms_after=None, cosines_before=cosines(M), cosines_after=None, drift=None, drift_heldout=None, sigma=None,
        inner_steps=0, closure_calls=0, seconds=0.0, skipped_layers={}, objective=PLACEBO, length=0.0,
    )  # fmt: skip

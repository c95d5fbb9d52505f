"""The teleport as a transaction: propose, verify, accept, or put every bit back.

One for all teleporters, so that none of them can be less careful than another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
from cost_mtl.teleport.base import Acceptance, Move, Teleporter, TeleportProblem, TeleportReport
from cost_mtl.teleport.objectives import formulas as ob
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
    """The last point looked at."""

    losses: Tensor | None = None
    evaluation: Evaluation | None = None
    M: Tensor | None = None
    drift: float | None = None
    heldout: float | None = None
    gained: str | None = None
    """The objective that improved enough; None if none did."""
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

    undo_on_failure(partial(_as_it_was, problem, structure))  # also of what comes after it in the step
    with undoing(undo):
        with problem.fate.shared():
            move, candidate, reason, delta = _search(problem, teleporter, structure, out)
            found = None if reason or candidate.evaluation is None else arrive(candidate.evaluation, delta)
            report = _report(problem, move, candidate, reason, delta, found, time.perf_counter() - began)
            outcome = Outcome(report, found)
        if found is not None:
            progress.sigma = found.sigma
            accepted = True
    return outcome


def _as_it_was(problem: Problem, structure: Structure) -> None:
    structure.restore()
    problem.reset()


def _search(
    problem: Problem, teleporter: Teleporter, structure: Structure, out: Tensor | None
) -> tuple[Move, _Candidate, str, Tensor]:
    """The first move that holds, or the last one that did not: the move, what was seen there, why it is rejected
    ("" if it is not), and Delta theta [m]. An accepted move's parameters are in place."""
    _require_repeatable(problem)
    ask: Callable[[TeleportProblem], Move] = teleporter.propose
    while True:
        problem.reset()
        with problem.fate.shared():
            try:
                move = _checked(ask(problem), problem)
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
        if not reason or move.otherwise is None:
            return move, candidate, reason, delta
        ask = move.otherwise


def _along(problem: Problem, move: Move, delta: Tensor, candidate: _Candidate) -> tuple[float, Tensor] | None:
    """Another length, and the move of that length, where the losses were kept at delta [m] and the promise was not, if
    it may be kept there."""
    if move.first_order is None or move.predicted is None or candidate.M is None or move.objective == "none":
        return None
    if not bool(torch.isfinite(candidate.M).all()):
        return None
    other = _other(move.objective)
    gains = {objective: ob.gain(objective, problem.gramian, candidate.M) for objective in (move.objective, other)}
    rule = move.acceptance
    t = ob.along(
        move.predicted, gains[move.objective], _least(move.objective, rule), -gains[other], abs(_least(other, rule))
    )
    if t is None:
        return None
    with problem.fate.shared():
        straight = move.first_order.to(delta.device, delta.dtype)
        there = t * straight + t * t * (delta - straight)
    return t, broadcast_(there, problem.group)


def _other(objective: str) -> str:
    return "norm" if objective == "conflict" else "conflict"


def _least(objective: str, rule: Acceptance) -> float:
    return rule.min_angle if objective == "conflict" else rule.min_norm


def _require_repeatable(problem: Problem) -> None:
    again = problem.evaluate(0)
    change = ob.relative_change(problem.losses, again)
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
    return move


def _verify(problem: Problem, move: Move, delta: Tensor, out: Tensor | None) -> tuple[_Candidate, str]:
    """Look at theta + delta; what was seen there, and why it is rejected ("" if it is not)."""
    candidate = _Candidate()
    if not bool(torch.isfinite(delta).all()):
        return candidate, "the proposed move is not finite"
    if not bool((delta != 0).any()):
        return candidate, "; ".join(("the teleporter found no move", *move.notes))
    problem.place(delta)
    reason = _losses_kept(problem, move, candidate, heldout_batch(problem, move.used))
    return candidate, reason or _promise_kept(problem, move, candidate, move.acceptance, out)


def _losses_kept(problem: Problem, move: Move, candidate: _Candidate, heldout: int | None) -> str:
    rule, drifts = move.acceptance, []
    what = "a loss" if rule.invariance == "each" else "the mean loss"
    references = {b: problem.reference(b) for b in (*move.used, *(() if heldout is None else (heldout,)))}
    for batch in move.used:
        losses = problem.evaluate(batch)
        if batch == 0:
            candidate.losses = losses
        drifts.append(ob.relative_change(references[batch], losses, rule.invariance))
    candidate.drift = max(drifts)
    if not candidate.drift <= rule.tolerance:
        return f"{what} drifted by {candidate.drift:.2%}, more than the tolerance of {rule.tolerance:.2%}"
    if heldout is not None:
        if torch.equal(references[heldout], problem.losses):
            candidate.notes = (SAME_BATCH,)
        candidate.heldout = ob.relative_change(references[heldout], problem.evaluate(heldout), rule.invariance)
        if not candidate.heldout <= rule.tolerance_heldout:
            return (f"{what} drifted by {candidate.heldout:.2%} on a batch the move was not fitted on, more than the "
                    f"tolerance of {rule.tolerance_heldout:.2%}")  # fmt: skip
    return ""


def _promise_kept(problem: Problem, move: Move, candidate: _Candidate, rule: Acceptance, out: Tensor | None) -> str:
    candidate.evaluation = problem.measure(out)
    candidate.M = gramian(candidate.evaluation.gradients.matrix, dtype=torch.float64)
    if not bool(torch.isfinite(candidate.M).all()):
        return "the gradients at the new point are not finite"
    if move.objective == "none":
        return ""
    reasons = []
    for objective in (move.objective, *(o for o in ("conflict", "norm") if move.either and o != move.objective)):
        reason = _gained(objective, problem.gramian, candidate.M, rule)
        reason = reason or _harmed(_other(objective), problem.gramian, candidate.M, rule)
        if not reason:
            candidate.gained = objective
            return ""
        reasons.append(reason)
    return "; ".join(reasons)


def _gained(objective: str, before: Tensor, after: Tensor, rule: Acceptance) -> str:
    """Why the objective has not improved enough, or ""."""
    gain, least = ob.gain(objective, before, after), _least(objective, rule)
    if gain >= least:
        return ""
    if objective == "conflict":
        return f"{_change(objective, gain)}, and had to fall by {least:.3f}"
    return f"{_change(objective, gain)}, and had to rise by {least:.1%}"


def _harmed(objective: str, before: Tensor, after: Tensor, rule: Acceptance) -> str:
    """Why the objective that the move was not made for has become too much worse, or ""."""
    gain, most = ob.gain(objective, before, after), abs(_least(objective, rule))
    if gain >= -most:
        return ""
    if objective == "conflict":
        return f"{_change(objective, gain)}, and must not rise by more than {most:.3f}"
    return f"{_change(objective, gain)}, and must not fall by more than {most:.1%}"


def _change(objective: str, gain: float) -> str:
    if objective == "conflict":
        return f"the largest angle to the mean gradient changed by {-gain:+.4f} rad"
    return f"the balanced gradient norms changed by {gain:+.2%}"


def _report(
    problem: Problem,
    move: Move,
    candidate: _Candidate,
    reason: str,
    delta: Tensor,
    arrival: Arrival | None,
    seconds: float,
) -> TeleportReport:
    before, after = problem.gramian, candidate.M
    kept = "every loss" if move.acceptance.invariance == "each" else "the mean loss"
    objective = candidate.gained or move.objective
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
        length=float(delta.double().norm()) / theta if theta else 0.0,
        notes=(*move.notes, *candidate.notes),
    )


def broken_off(losses: Tensor, M: Tensor) -> TeleportReport:
    """The report of an attempt that ended before there was a move, from losses [K] and the Gramian [K, K] at theta;
    its reason is left to be filled in."""
    return TeleportReport(
        accepted=False, reason="", losses_before=losses.double(), losses_after=None, norms_before=norms(M),
        norms_after=None, cosines_before=cosines(M), cosines_after=None, drift=None, drift_heldout=None, sigma=None,
        inner_steps=0, closure_calls=0, seconds=0.0, skipped_layers={}, objective="none", length=0.0,
    )  # fmt: skip

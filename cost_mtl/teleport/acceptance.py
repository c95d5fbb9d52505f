"""Whether a move has gained what it was made for, without harm to the other promises; and the length that may do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from cost_mtl.teleport.base import Acceptance
from cost_mtl.teleport.move import Move
from cost_mtl.teleport.objectives import PROMISES
from cost_mtl.teleport.objectives.base import Objective, Promise, wording_of

LITTLE_MORE, LITTLE_LESS = 1.08, 0.9
"""Gain that a second length along a move aims for, in least gains, and harm to another promise, in tolerated ones."""

SHORTEST, LONGEST = 0.05, 1.5
"""Bounds of such a length, in lengths of the move: what one end says of the gain is too little for more."""


def others(objective: Objective) -> list[Promise]:
    """The promises that a move for the objective must not harm."""
    return [promise for promise in PROMISES if promise.name != objective.name]


def judged(move: Move, before: Tensor, after: Tensor) -> tuple[Objective | None, str]:
    """The objective that gained enough, from the Gramians [K, K] before and after, and why none did ("" if one did, or
    none had to)."""
    if move.judge is None:
        return None, ""
    reasons = []
    for objective in (move.judge, *(others(move.judge) if move.either else ())):
        reason = why_not(objective, before, after, move.acceptance)
        if not reason:
            return objective, ""
        reasons.append(reason)
    return None, "; ".join(reasons)


def why_not(objective: Objective, before: Tensor, after: Tensor, rule: Acceptance) -> str:
    """Why the objective has not gained enough, or another promise was harmed, or ""."""
    gain, least = float(objective.gain(before, after)), float(objective.least(rule))
    if not gain >= least:
        return wording_of(objective).missed(gain, least)
    for promise in others(objective):
        change, most = promise.gain(before, after), promise.tolerated(rule)
        if not change >= -most:
            return wording_of(promise).harmed(change, most)
    return ""


def better_length(move: Move, before: Tensor, after: Tensor) -> float | None:
    """Another length, relative to the move's, at which it may be accepted where it was not; None if there is none."""
    if move.judge is None or move.predicted is None:
        return None
    rule = move.acceptance
    harms = [(-promise.gain(before, after), promise.tolerated(rule)) for promise in others(move.judge)]
    return along(move.predicted, move.judge.gain(before, after), move.judge.least(rule), harms)


def along(predicted: float, found: float, least: float, harms: Sequence[tuple[float, float]]) -> float | None:
    """The length t, relative to a move that did not keep its promise, at which it may be kept; None if there is none.

    Along the move the gain is taken as ``predicted`` t - (``predicted`` - ``found``) t^2, or, where that is nowhere
    enough, as ``found`` t (the predicted slope may be too steep); each harm to another promise as its own times t.
    Wanted is the shortest length with a little more than the least gain.

    Args:
        predicted: gain to first order.
        found: gain at t = 1.
        least: gain that is needed.
        harms: of each other promise, its loss at t = 1 and the loss that is tolerated.
    """
    if not (predicted > 0 and least > 0):
        return None
    aim = LITTLE_MORE * least
    for slope in (predicted, found):
        bend = slope - found
        square = slope * slope - 4 * bend * aim
        if not (slope > 0 and square >= 0):
            continue
        t = 2 * aim / (slope + math.sqrt(square))
        for harm, tolerated in harms:
            if t * harm > tolerated:
                t = LITTLE_LESS * tolerated / harm
        if slope * t - bend * t * t >= least and SHORTEST <= t <= LONGEST:
            return t
    return None

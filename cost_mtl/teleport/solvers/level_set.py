"""One step along the level set of all task losses, in any coordinates.

By default all of it is first order (no double backward), so fused attention and RNNs are fine:

1. J: gradients of every task's loss on each constraint batch, in the coordinates phi of the move (of the mean loss
   alone under ``invariance="mean"``).
2. Ascent direction u of the objective (``cost_mtl.teleport.objectives``).
3. s = P u made orthogonal to J (J s = 0), P a diagonal metric: no loss changes to first order.
4. A step as long as u . s predicts that the objective needs (a resolved conflict, a clearly larger norm), at most
   length * ||theta||, then Gauss-Newton corrections that bring every loss back to where it was to second order. If a
   loss stays outside the tolerance there, or outside the wider one on a held-out batch, the step is shortened and
   done again (shortening a corrected move would not do: its corrections are of second order). Where the losses are far
   off before any correction, their curvature along s, which that evaluation has measured, says how much shorter.
5. If the held-out losses rose in the mean, the losses on the used batches are lowered for it, within the tolerance.

The move says which part of it is of first order in its length, so that the transaction can try another length
where the losses are kept and the objective gained too little.
"""

from __future__ import annotations

import warnings
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from cost_mtl._validation import at_least, positive
from cost_mtl.teleport.base import Acceptance, TeleportProblem
from cost_mtl.teleport.coordinates.base import Coordinates
from cost_mtl.teleport.invariance import kept_rows, mean_rise, relative_change
from cost_mtl.teleport.objectives import standard_objectives
from cost_mtl.teleport.objectives.base import Objective, ObjectiveContext
from cost_mtl.teleport.solvers.base import Line, Result, heldout_batch, norm, theta_norm, used_batches
from cost_mtl.teleport.solvers.projection import project_out, restore_step

LEAST_CUT, LARGEST_CUT = 0.5, 0.85
"""Bounds of the factor by which a step that left the tolerance is shortened. A long step's drift grows faster than its
length: cutting it by more than half would leave a part of what is allowed unused (measured)."""

FAR, NEAR, LEAST_JUMP = 10.0, 4.0, 0.001
"""Where a loss has changed by more than FAR tolerances before any correction, corrections do not bring it back, and on
stiff problems make it worse (measured). That change is quadratic in the length, J s being 0: one evaluation tells where
it is NEAR tolerances, and the step is cut to there at once, by LEAST_JUMP at most."""

FALL = 0.9
"""Share of the used batches' tolerance that may be spent on lowering their losses."""


@dataclass(frozen=True)
class LevelSet:
    """Settings of the level-set solver.

    Args:
        length: largest ||Delta theta|| / ||theta|| before corrections. Default 1: losses and held-out losses limit the
            step far earlier (to 0.3 to 3 % in the networks measured), except in toys.
        shortest: smallest one that is tried first. Default 0.0001: on stiff problems (a physics-informed network)
            0.0001 to 0.001 is what the losses allow. Never below half the resolution of the parameters' dtype.
        corrections: most Gauss-Newton corrections after the step.
        halvings: how often a step that leaves the tolerance is shortened, to a half at most each time and to just below
            what is allowed where that is nearer, before the move is given up.
        epsilon: finite-difference displacement relative to ||theta||. Default 0.01: small enough for the curvature,
            large enough for float32 and bf16 gradients.
        constraints: earlier batches whose losses are kept as well, beside the current one, where COST has them.
            Default 1: each costs about an ordinary step or two, and lets the held-out tolerance be met by longer moves
            (docs/teleport.md has the curve).
        heldout_corrections: most further corrections that bring the mean of the held-out losses back where it rose, by
            lowering those on the used batches within their tolerance. Default 2: the second follows the first one's
            secant.
        settling: the old name of ``heldout_corrections``; deprecated.
    """

    length: float = 1.0
    shortest: float = 0.0001
    corrections: int = 2
    halvings: int = 6
    epsilon: float = 0.01
    constraints: int = 1
    heldout_corrections: int = 2
    settling: InitVar[int | None] = None

    def __post_init__(self, settling: int | None) -> None:
        if settling is not None:
            warnings.warn("settling: deprecated, use heldout_corrections", DeprecationWarning, stacklevel=3)
            at_least("settling", settling, 0)
            object.__setattr__(self, "heldout_corrections", settling)
        for name in ("length", "shortest", "epsilon"):
            positive(name, getattr(self, name))
        for name in ("corrections", "halvings", "constraints", "heldout_corrections"):
            at_least(name, getattr(self, name), 0)

    def choices(self, M: Tensor) -> tuple[Objective, ...]:
        """``objective="auto"``: the conflict first where it has a usable gradient, else the norm first."""
        return standard_objectives(M)

    def solve(
        self, problem: TeleportProblem, coordinates: Coordinates, objective: Objective, rule: Acceptance
    ) -> Result:
        """:func:`climb`."""
        return climb(problem, coordinates, objective, rule, self)


@dataclass(frozen=True)
class _Constraints:
    """The losses to keep: start[b] [K] on batch used[b], and the gradients J [R, n] of what is kept, at phi = 0
    (R = K len(used), or len(used) where it is the mean alone). ``heldout`` is a batch that is only evaluated: it limits
    the length of the step, not its direction."""

    used: tuple[int, ...]
    start: tuple[Tensor, ...]
    heldout: int | None
    J: Tensor
    metric: Tensor | None
    rule: Acceptance
    theta_norm: float


def climb(
    problem: TeleportProblem, coordinates: Coordinates, objective: Objective, rule: Acceptance, settings: LevelSet
) -> Result:
    """Move along the level set towards a better objective; see the top of the file. The model is left there."""
    used = used_batches(problem, settings.constraints)
    heldout = heldout_batch(problem, used)
    # Asked for while the model stands at theta, and then remembered.
    start = tuple(problem.reference(batch) for batch in (*used, *([] if heldout is None else [heldout])))[: len(used)]
    rows = [coordinates.gradients(batch)[1] for batch in used]
    J = torch.cat([kept_rows(row, rule.invariance) for row in rows])
    length = theta_norm(problem)
    kept = _Constraints(used, start, heldout, J, coordinates.metric(torch.cat(rows)), rule, length)
    slope = objective.slope(ObjectiveContext(problem, coordinates, 0, rows[0], length, settings.epsilon))
    u = slope.gradient
    s = project_out(J, u, kept.metric)
    rise = float(u @ s)
    found = _step(problem, coordinates, s, slope.wanted / rise, kept, settings) if norm(s) > 1e-6 * norm(u) else None
    if found is None:
        notes = (*slope.notes, "no step improves the objective and keeps every loss inside the tolerance")
        coordinates.place(torch.zeros_like(u))
        return Result(coordinates.delta(), used, 1, notes)
    phi, scale = found
    coordinates.place(scale * s)
    line = Line(coordinates.delta(), scale * rise * slope.rate)
    coordinates.place(phi)
    return Result(coordinates.delta(), used, 1, slope.notes, line)


PROBE = 0.005
"""Length of the step, relative to ||theta||, that tells how long a step in theta one in the coordinates is: long enough
for the parameters' own resolution."""


def _step(
    problem: TeleportProblem, coordinates: Coordinates, s: Tensor, wanted: float, kept: _Constraints, settings: LevelSet
) -> tuple[Tensor, float] | None:
    """The corrected step s * factor, factor <= wanted, of the largest length that keeps the losses, and its factor;
    None if there is none."""
    probe = PROBE * kept.theta_norm / norm(s)
    coordinates.place(probe * s)
    # Length in theta per unit of s, for coordinates of any meaning: measured once, taken as linear.
    per_unit = coordinates.length() / probe
    if not per_unit > 0:
        return None
    least = max(settings.shortest, *(torch.finfo(p.dtype).eps / 2 for p in problem.params))
    shortest, longest = (x * kept.theta_norm / per_unit for x in (least, settings.length))
    scale = min(max(wanted, shortest), longest)
    for _ in range(settings.halvings + 1):
        phi, drift, first = _corrected(problem, coordinates, s * scale, kept, settings.corrections)
        if first > FAR * kept.rule.tolerance:
            scale *= max(LEAST_JUMP, (NEAR * kept.rule.tolerance / first) ** 0.5)
            continue
        excess = drift / kept.rule.tolerance
        if excess <= 1:
            drift_heldout, rise = _heldout_change(problem, kept)
            excess = drift_heldout / kept.rule.tolerance_heldout
            if excess <= 1:
                return _with_lower_losses(problem, coordinates, phi, rise, kept, settings.heldout_corrections), scale
        # The drift of a short step is about proportional to its length: aim a little below what is allowed.
        scale *= max(LEAST_CUT, LARGEST_CUT / excess)
    return None


def _heldout_change(problem: TeleportProblem, kept: _Constraints) -> tuple[float, float]:
    """Largest relative change of a loss on the held-out batch, and their mean rise; 0 where there is none."""
    if kept.heldout is None:
        return 0.0, 0.0
    before, after = problem.reference(kept.heldout), problem.evaluate(kept.heldout)
    return relative_change(before, after, kept.rule.invariance), mean_rise(before, after, kept.rule.invariance)


def _with_lower_losses(
    problem: TeleportProblem, coordinates: Coordinates, phi: Tensor, rise: float, kept: _Constraints, corrections: int
) -> Tensor:
    """phi, or where the held-out losses rose, a point at which those on the used batches fell for it.

    All losses of the used batches are lowered by the same relative amount: by the rise first, then by what the secant
    rule asks for to make the rise vanish, as far as their tolerance goes. A point outside a tolerance is dropped.
    """
    most = FALL * kept.rule.tolerance
    found, left, fall = phi, rise, min(rise, most)
    for _ in range(corrections):
        if not left > 0:
            break
        residual = torch.cat([kept_rows(fall * losses.abs(), kept.rule.invariance) for losses in kept.start])
        lower = phi + restore_step(kept.J, residual, None, kept.metric)
        _, drift, _ = _corrected(problem, coordinates, lower, kept, 0)
        drift_heldout, left = _heldout_change(problem, kept)
        if drift > kept.rule.tolerance or drift_heldout > kept.rule.tolerance_heldout or not left < rise:
            break
        found = lower
        if fall == most:
            break
        fall = min(fall * rise / (rise - left), most)
    return found


def _corrected(
    problem: TeleportProblem, coordinates: Coordinates, phi: Tensor, kept: _Constraints, corrections: int
) -> tuple[Tensor, float, float]:
    """phi after Gauss-Newton corrections of the losses, and the largest relative change of a loss that is left, and
    that was there before them. None are made where it is too large for them, and no more where one raised it."""
    first = drift = float("inf")
    for attempt in range(corrections + 1):
        coordinates.place(phi)
        losses = [problem.evaluate(batch) for batch in kept.used]
        pairs = list(zip(kept.start, losses, strict=True))
        before, drift = drift, max(relative_change(a, b, kept.rule.invariance) for a, b in pairs)
        first = drift if attempt == 0 else first
        if drift <= kept.rule.tolerance / 2 or drift >= before or attempt == corrections:
            break
        if first > FAR * kept.rule.tolerance:
            break
        residual = torch.cat([kept_rows(b - a, kept.rule.invariance) for a, b in pairs])
        phi = phi + restore_step(kept.J, residual, None, kept.metric)
    return phi, drift, first

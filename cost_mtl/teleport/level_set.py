"""One step along the level set of all task losses, in any coordinates.

All of it is first order (no double backward), so fused attention and RNNs are fine:

1. J: gradients of every task's loss on each constraint batch, in the coordinates phi of the move.
2. Ascent direction u of the objective by finite differences of gradients: with a_j = d objective / d g_j,
   u = sum_j [grad_phi L_j(theta + eps a_j/||a_j||) - grad_phi L_j(theta)] ||a_j|| / eps, the Hessian-vector product
   that double backward would give, from one more pass per distinct a_j.
3. s = P u made orthogonal to J (J s = 0), P a diagonal metric: no loss changes to first order.
4. A step as long as u . s predicts that the objective needs (a resolved conflict, a clearly larger norm), at most
   length * ||theta||, then Gauss-Newton corrections that bring every loss back to where it was to second order. If a
   loss stays outside the tolerance there, or outside the wider one on a held-out batch, the step is halved and done
   again (halving a corrected move would not do: its corrections are of second order).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cost_mtl.base import Acceptance, Move, TeleportProblem
from cost_mtl.teleport import objective as ob


class Space(Protocol):
    """Coordinates phi [n] of a move of the shared parameters; phi = 0 is theta itself."""

    def gradients(self, batch: int) -> tuple[Tensor, Tensor]:
        """Losses [K] and their gradients [K, n] in these coordinates, where the model stands."""
        ...

    def gradients_at(self, delta: Tensor, batch: int, tasks: list[int]) -> Tensor:
        """Gradient [n] of the summed losses of some tasks with the shared parameters displaced by delta [m]."""
        ...

    def metric(self, J: Tensor) -> Tensor | None:
        """Diagonal of P [n], or None for the identity."""
        ...

    def place(self, phi: Tensor) -> None:
        """Put the model at the coordinates phi."""
        ...

    def length(self) -> float:
        """||Delta theta|| of where the model stands."""
        ...

    def delta(self) -> Tensor:
        """Delta theta [m] of where the model stands."""
        ...


@dataclass(frozen=True)
class LevelSet:
    """Settings of the level-set solver.

    Args:
        length: largest ||Delta theta|| / ||theta|| before corrections. Default 1: losses and held-out losses limit the
            step far earlier (to 0.3 to 3 % in the networks measured), except in toys.
        shortest: smallest one that is tried first. Default 0.005.
        corrections: most Gauss-Newton corrections after the step.
        halvings: how often a step that leaves the tolerance is halved before the move is given up.
        epsilon: finite-difference displacement relative to ||theta||. Default 0.01: small enough for the curvature,
            large enough for float32 and bf16 gradients.
        constraints: earlier batches whose losses are kept as well, beside the current one, where COST has them.
            Default 1: each costs about an ordinary step; a second one gained nothing measurable.
    """

    length: float = 1.0
    shortest: float = 0.005
    corrections: int = 2
    halvings: int = 6
    epsilon: float = 0.01
    constraints: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "shortest", "epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number > 0, got {getattr(self, name)}")
        for name, least in (("corrections", 0), ("halvings", 0), ("constraints", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class LevelSetResult:
    """Delta theta [m], the batches that it was fitted on, and remarks."""

    delta: Tensor
    used: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Constraints:
    """The losses to keep: start[b] [K] on batch used[b], and their gradients J [R, n], R = K len(used), at phi = 0.
    ``heldout`` is a batch that is only looked at: it limits the length of the step, not its direction."""

    used: tuple[int, ...]
    start: tuple[Tensor, ...]
    heldout: int | None
    J: Tensor
    metric: Tensor | None
    rule: Acceptance
    theta_norm: float


def used_batches(problem: TeleportProblem, constraints: int) -> tuple[int, ...]:
    """The current batch and up to ``constraints`` earlier ones, leaving the last for the held-out check."""
    return tuple(range(max(1, min(1 + constraints, problem.batches - 1))))


def heldout_batch(problem: TeleportProblem, used: Sequence[int]) -> int | None:
    """The first batch that a move was not fitted on, if there is one."""
    first = max(used) + 1
    return first if first < problem.batches else None


def propose(
    problem: TeleportProblem,
    space: Space,
    objectives: Sequence[str],
    settings: LevelSet,
    rule: Acceptance,
    either: bool,
    again: Callable[[tuple[str, ...], TeleportProblem], Move],
    skipped_layers: Mapping[str, str] | None = None,
) -> Move:
    """The move for the first objective; ``again(the others, problem)`` is asked for one if it is rejected.

    Args:
        either: an improvement of another objective than the move's own will do (``objective="auto"``).
    """
    result = climb(problem, space, objectives[0], rule, settings)
    others = tuple(objectives[1:])
    return Move(
        result.delta,
        objectives[0],
        either=either,
        used=result.used,
        skipped_layers=skipped_layers or {},
        notes=result.notes,
        otherwise=partial(again, others) if others else None,
        acceptance=rule,
    )


def climb(
    problem: TeleportProblem, space: Space, objective: str, rule: Acceptance, settings: LevelSet
) -> LevelSetResult:
    """Move along the level set towards a better objective; see the top of the file. The model is left there."""
    used = used_batches(problem, settings.constraints)
    heldout = heldout_batch(problem, used)
    # Asked for while the model stands at theta, and then remembered.
    start = tuple(problem.reference(batch) for batch in (*used, *([] if heldout is None else [heldout])))[: len(used)]
    J = torch.cat([space.gradients(batch)[1] for batch in used])
    theta_norm = _norm(torch.cat([p.detach().reshape(-1).float() for p in problem.params]))
    kept = _Constraints(used, start, heldout, J, space.metric(J), rule, theta_norm)
    u = _ascent(problem, space, objective, J, settings.epsilon * theta_norm)
    s = ob.project_out(J, u, kept.metric)
    phi = None
    if _norm(s) > 1e-6 * _norm(u):
        wanted = ob.wanted_gain(objective, problem.gramian) / float(u @ s)
        phi = _step(problem, space, s, wanted, kept, settings)
    notes = () if phi is not None else ("no step improves the objective and keeps every loss inside the tolerance",)
    space.place(torch.zeros_like(u) if phi is None else phi)
    return LevelSetResult(space.delta(), used, notes)


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _ascent(problem: TeleportProblem, space: Space, objective: str, J: Tensor, epsilon: float) -> Tensor:
    """u [n] by finite differences (step 2 at the top of the file)."""
    M, G = problem.gramian, problem.gradients
    A = ob.conflict_coefficients(M) if objective == "conflict" else ob.norm_coefficients(M)
    u = torch.zeros_like(J[0])
    space.place(u)
    for row, tasks in ob.group_rows(A):
        a = row.to(G.device, G.dtype) @ G
        length = _norm(a)
        if length > 0.0:
            moved = space.gradients_at(a * (epsilon / length), 0, tasks)
            u += (moved - J[tasks].sum(dim=0)) * (length / epsilon)
    return u


def _step(
    problem: TeleportProblem, space: Space, s: Tensor, wanted: float, kept: _Constraints, settings: LevelSet
) -> Tensor | None:
    """The corrected step s * factor, factor <= wanted, of the largest length that keeps the losses; None if there is
    none."""
    probe = settings.shortest * kept.theta_norm / _norm(s)
    space.place(probe * s)
    # Length in theta per unit of s, for coordinates of any meaning: measured once, taken as linear.
    per_unit = space.length() / probe
    if not per_unit > 0:
        return None
    shortest, longest = (x * kept.theta_norm / per_unit for x in (settings.shortest, settings.length))
    scale = min(max(wanted, shortest), longest)
    for _ in range(settings.halvings + 1):
        phi, drift = _corrected(problem, space, s * scale, kept, settings.corrections)
        if drift <= kept.rule.tolerance and _holds_elsewhere(problem, kept):
            return phi
        scale /= 2
    return None


def _holds_elsewhere(problem: TeleportProblem, kept: _Constraints) -> bool:
    if kept.heldout is None:
        return True
    change = ob.relative_change(problem.reference(kept.heldout), problem.evaluate(kept.heldout))
    return change <= kept.rule.tolerance_heldout


def _corrected(
    problem: TeleportProblem, space: Space, phi: Tensor, kept: _Constraints, corrections: int
) -> tuple[Tensor, float]:
    """phi after Gauss-Newton corrections of the losses, and the largest relative change of a loss that is left."""
    drift = float("inf")
    for attempt in range(corrections + 1):
        space.place(phi)
        losses = [problem.evaluate(batch) for batch in kept.used]
        drift = max(ob.relative_change(a, b) for a, b in zip(kept.start, losses, strict=True))
        if drift <= kept.rule.tolerance / 2 or drift == float("inf") or attempt == corrections:
            break
        residual = torch.cat([b - a for a, b in zip(kept.start, losses, strict=True)])
        phi = phi + ob.restore_step(kept.J, residual, None, kept.metric)
    return phi, drift

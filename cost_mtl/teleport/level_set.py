"""One teleport along the level set of all task losses, in any coordinates.

Per inner step (all of it first order: no double backward, so fused attention and RNNs are fine):

1. J: gradients of every task's loss on each constraint batch, in the coordinates phi of the move.
2. Ascent direction u of the objective by finite differences of gradients: with a_j = d objective / d g_j,
   u = sum_j [grad_phi L_j(theta + eps a_j/||a_j||) - grad_phi L_j(theta)] ||a_j|| / eps, the Hessian-vector product
   that double backward would give, from one more pass per distinct a_j.
3. s = P u made orthogonal to J (J s = 0), P a diagonal metric: no loss changes to first order.
4. A step to ||Delta theta|| = length * ||theta||, then Gauss-Newton corrections that bring every loss back to where it
   was to second order. If a loss stays outside the tolerance, the step is halved and done again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cost_mtl.base import TeleportProblem
from cost_mtl.gradients import gramian
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

    def delta(self) -> Tensor:
        """Delta theta [m] of where the model stands."""
        ...


@dataclass(frozen=True)
class LevelSet:
    """Settings of the level-set solver.

    Args:
        length: ||Delta theta|| / ||theta|| to aim for. Default 0.02; longer moves gain more and drift more.
        steps: inner steps. Default 1: further ones gained little per evaluation.
        corrections: most Gauss-Newton corrections after each step.
        halvings: how often a step that leaves the tolerance is halved before the move is given up.
        epsilon: finite-difference displacement relative to ||theta||. Default 0.01: small enough for the curvature,
            large enough for float32 and bf16 gradients.
        constraints: earlier batches whose losses are kept as well, beside the current one, where COST has them.
    """

    length: float = 0.02
    steps: int = 1
    corrections: int = 2
    halvings: int = 4
    epsilon: float = 0.01
    constraints: int = 1

    def __post_init__(self) -> None:
        for name in ("length", "epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number > 0, got {getattr(self, name)}")
        for name, least in (("steps", 1), ("corrections", 0), ("halvings", 0), ("constraints", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class LevelSetResult:
    """Delta theta [m], the batches it was fitted on, and the inner steps taken."""

    delta: Tensor
    used: tuple[int, ...]
    steps: int
    notes: tuple[str, ...]


def used_batches(problem: TeleportProblem, constraints: int) -> tuple[int, ...]:
    """The current batch and up to ``constraints`` earlier ones, leaving the last for the held-out check."""
    return tuple(range(max(1, min(1 + constraints, problem.batches - 1))))


def climb(
    problem: TeleportProblem, space: Space, objective: str, tolerance: float, settings: LevelSet
) -> LevelSetResult:
    """Move along the level set towards a better objective; see the top of the file."""
    used = used_batches(problem, settings.constraints)
    theta_norm = _norm(torch.cat([p.detach().reshape(-1).float() for p in problem.params]))
    phi = torch.empty(0)
    start = [problem.reference(batch) for batch in used]
    notes: list[str] = []
    done = 0
    for step in range(settings.steps):
        M, G = (problem.gramian, problem.gradients) if step == 0 else _gramian_here(problem)
        J = torch.cat([space.gradients(batch)[1] for batch in used])
        if step == 0:
            phi = torch.zeros(J.shape[1], dtype=J.dtype, device=J.device)
        u = _ascent(problem, space, objective, M, G, J, settings.epsilon * theta_norm)
        metric = space.metric(J)
        s = ob.project_out(J, u, metric)
        if not _norm(s) > 1e-6 * _norm(u):
            notes.append("the objective's gradient lies in the span of the task gradients")
            break
        moved = _step(problem, space, phi, s, J, metric, used, start, settings.length * theta_norm, tolerance, settings)
        if moved is None:
            notes.append("no step kept every loss inside the tolerance")
            space.place(phi)
            break
        phi, done = moved, step + 1
    return LevelSetResult(space.delta(), used, done, tuple(notes))


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _gramian_here(problem: TeleportProblem) -> tuple[Tensor, Tensor]:
    _, G = problem.evaluate_gradients(0)
    return gramian(G, dtype=torch.float64), G


def _ascent(
    problem: TeleportProblem, space: Space, objective: str, M: Tensor, G: Tensor, J: Tensor, epsilon: float
) -> Tensor:
    """u [n] by finite differences (step 2 at the top of the file)."""
    A = ob.conflict_coefficients(M) if objective == "conflict" else ob.norm_coefficients(M)
    u = torch.zeros(J.shape[1], dtype=J.dtype, device=J.device)
    for row, tasks in ob.group_rows(A):
        a = row.to(G.device, G.dtype) @ G
        length = _norm(a)
        if length == 0.0:
            continue
        moved = space.gradients_at(a * (epsilon / length), 0, tasks)
        u += (moved - J[tasks].sum(dim=0)) * (length / epsilon)
    return u


def _step(
    problem: TeleportProblem,
    space: Space,
    phi: Tensor,
    s: Tensor,
    J: Tensor,
    metric: Tensor | None,
    used: tuple[int, ...],
    start: list[Tensor],
    target: float,
    tolerance: float,
    settings: LevelSet,
) -> Tensor | None:
    """The corrected step of the largest length that keeps the losses; None if there is none."""
    before = space.delta()
    probe = s * (1e-3 * target / _norm(s))
    space.place(phi + probe)
    # The length of the move in theta, for coordinates of any meaning: measured once, scaled linearly.
    scale = target / max(_norm(space.delta() - before), 1e-12 * target)
    for _ in range(settings.halvings + 1):
        trial = phi + probe * scale
        for attempt in range(settings.corrections + 1):
            space.place(trial)
            losses = [problem.evaluate(batch) for batch in used]
            drift = max(ob.relative_change(a, b) for a, b in zip(start, losses, strict=True))
            if drift <= tolerance / 2 or attempt == settings.corrections or drift == float("inf"):
                break
            residual = torch.cat([b - a for a, b in zip(start, losses, strict=True)])
            trial = trial + ob.restore_step(J, residual, None, metric)
        if drift <= tolerance:
            return trial
        scale /= 2
    return None

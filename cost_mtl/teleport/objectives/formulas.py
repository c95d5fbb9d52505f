"""What a teleport improves, as functions of the task gradients alone.

An objective phi(g_1, ..., g_K) is described by the rows a_j = d phi / d g_j. Each is a combination of the task
gradients, a_j = sum_k A[j, k] g_k, so the whole objective is one coefficient matrix A [K, K] made from the Gramian.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cost_mtl.gradients.gramian import cosines, gramian, norms
from cost_mtl.gradients.reductions import dot, row_norms

MARGIN = 0.03
"""Smallest cosine with the mean gradient that the conflict objective aims for. Little, since the harm a move does to
the losses elsewhere grows faster than its length (docs/ablation.md), and not 0: where the landscape itself has the
conflict (examples/toy_pareto.py) a move to its very border has to be made again and again."""

LEAST_RISE = 0.06
"""Least rise of that cosine to aim for: twice what an accepted move has to gain."""

AIM_NORM = 0.1
"""Relative rise of the balanced gradient norms that the norm objective aims for."""

SOFTNESS = 0.03
"""Difference of two cosines at which the larger one counts 1/e as much in the conflict objective."""

DEGENERATE = 0.2
"""Sine of the angle between g_i and g_0 below which the conflict objective has (nearly) no gradient: at exactly
opposite or exactly equal directions a cosine is at its extremum."""


LITTLE_MORE, LITTLE_LESS = 1.08, 0.9
"""Gain that a second look along a move aims for, in least gains, and harm to the other promise, in allowed ones."""

SHORTEST_LOOK, LONGEST_LOOK = 0.05, 1.5
"""Bounds of such a look, in lengths of the move: what one end says of the gain is too little for more."""


def balance(M: Tensor) -> Tensor:
    """R_i = K (1 - ||g_i|| / sum_j ||g_j||) [K]: tasks with a small gradient count more (COST, Eqn 10)."""
    lengths = norms(M)
    total = lengths.sum()
    if not total > 0:
        return torch.ones_like(lengths)
    return len(M) * (1 - lengths / total) if len(M) > 1 else torch.ones_like(lengths)


def worst_task(M: Tensor) -> int:
    """The task with the smallest cosine with the mean gradient, among those with a gradient."""
    active = norms(M) > 0
    return int(torch.where(active, cosines(M), torch.inf).argmin())


def order(M: Tensor) -> tuple[str, ...]:
    """The objectives to try in turn: the conflict first where it has a usable gradient, else the norm first."""
    if len(M) == 1:
        return ("norm",)
    c = float(cosines(M)[worst_task(M)])
    return ("conflict", "norm") if (1 - c * c) ** 0.5 >= DEGENERATE else ("norm", "conflict")


def near_worst(M: Tensor) -> Tensor:
    """Weights p [K], summing to 1, of the tasks whose cosine is near the smallest: a soft minimum, cut to the few that
    matter. Raising one cosine alone would only hand its place to the next one."""
    c = torch.where(norms(M) > 0, cosines(M), torch.inf)
    p = torch.exp(-(c - c.min()) / SOFTNESS)
    p = torch.where(p >= 0.1, p, 0.0)
    return p / p.sum()


def conflict_coefficients(M: Tensor) -> Tensor:
    """A [K, K] of phi = sum_i p_i cos(g_i, g_0), p from :func:`near_worst` and constant.

    With c_i = cos(g_i, g_0) and unit vectors e: d cos_i / d g_0 = (e_i - c_i e_0) / ||g_0|| reaches every g_j with
    1/K, and g_i itself with (e_0 - c_i e_i) / ||g_i|| as well.
    """
    K = len(M)
    p, c, n = near_worst(M), cosines(M), norms(M)
    n_0 = M.sum().clamp_min(0).sqrt() / K
    q = torch.where(n > 0, p / torch.where(n > 0, n, 1.0), 0.0)
    through_mean = q / (K * n_0) - (p * c).sum() / (K * K * n_0**2)
    itself = q / (K * n_0)
    A = through_mean.expand(K, K) + itself[:, None]
    return A - torch.diag(torch.where(n > 0, q * c / torch.where(n > 0, n, 1.0), 0.0))


def norm_coefficients(M: Tensor) -> Tensor:
    """A [K, K] of phi = sum_i R_i log ||g_i||, R from :func:`balance` and constant: a_i = R_i g_i / ||g_i||^2."""
    squares = M.diagonal()
    positive = squares > 0
    return torch.diag(torch.where(positive, balance(M) / torch.where(positive, squares, 1.0), 0.0))


def conflict_value(M: Tensor) -> float:
    """phi of :func:`conflict_coefficients`."""
    return float((near_worst(M) * cosines(M)).sum())


def norm_value(M: Tensor) -> float:
    """phi of :func:`norm_coefficients`."""
    active = M.diagonal() > 0
    return float((balance(M) * norms(M).log())[active].sum())


def largest_angle(M: Tensor) -> float:
    """Largest angle between a task gradient and the mean gradient, in radians, over the tasks with a gradient."""
    c = cosines(M)[M.diagonal() > 0]
    return math.acos(max(-1.0, min(1.0, float(c.min())))) if len(c) else 0.0


def gain(objective: str, before: Tensor, after: Tensor) -> float:
    """Improvement from the Gramian before to the one after.

    ``"conflict"``: fall of :func:`largest_angle`, in radians; about the rise of the smallest cosine where that is near
    0, and still meaningful near -1, where a cosine hardly moves. ``"norm"``: the R-weighted geometric mean of the norm
    ratios minus 1 (relative). Tasks without a gradient do not count.
    """
    if objective == "conflict":
        return largest_angle(before) - largest_angle(after)
    active = before.diagonal() > 0
    R = balance(before)[active]
    ratios = norms(after)[active].log() - norms(before)[active].log()
    return float(((R * ratios).sum() / R.sum()).exp() - 1)


def wanted_gain(objective: str, M: Tensor) -> float:
    """Rise of phi to aim for: the conflict resolved with a margin, or clearly larger norms."""
    if objective == "conflict":
        return max(MARGIN - float(cosines(M)[worst_task(M)]), LEAST_RISE)
    return AIM_NORM * float(balance(M).sum())


def gain_rate(objective: str, M: Tensor) -> float:
    """:func:`gain` for a small rise of phi: d angle = d cos / sin, and norms with the weights R, which do not sum
    to 1."""
    if objective == "norm":
        return 1 / float(balance(M).sum())
    return 1 / max(math.sin(largest_angle(M)), DEGENERATE)


def along(predicted: float, found: float, least: float, harm: float, allowed: float) -> float | None:
    """The length t, relative to a move that did not keep its promise, at which it may be kept; None if there is none.

    Along the move the gain is taken as ``predicted`` t - (``predicted`` - ``found``) t^2, or, where that is nowhere
    enough, as ``found`` t (the predicted slope may be too steep); the harm to the other promise as ``harm`` t. Wanted
    is the shortest length with a little more than the least gain.

    Args:
        predicted: gain to first order.
        found: gain at t = 1.
        least: gain that is needed.
        harm: fall of the other promise at t = 1.
        allowed: fall that is allowed.
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
        if t * harm > allowed:
            t = LITTLE_LESS * allowed / harm
        if slope * t - bend * t * t >= least and SHORTEST_LOOK <= t <= LONGEST_LOOK:
            return t
    return None


def group_rows(A: Tensor) -> list[tuple[Tensor, list[int]]]:
    """Distinct non-zero rows of A with the tasks that share each: one perturbed evaluation serves a whole group
    (under the conflict objective all tasks but the worst ones share one)."""
    groups: list[tuple[Tensor, list[int]]] = []
    for j, row in enumerate(A):
        if not bool((row != 0).any()):
            continue
        for other, tasks in groups:
            if torch.equal(row, other):
                tasks.append(j)
                break
        else:
            groups.append((row, [j]))
    return groups


def kept(rows: Tensor, invariance: str) -> Tensor:
    """What has to stay as it is, [C, ...] from one row per task [K, ...]: each row, or the mean of them alone."""
    return rows.mean(dim=0, keepdim=True) if invariance == "mean" else rows


def relative_change(before: Tensor, after: Tensor, invariance: str = "each") -> float:
    """Largest relative change of what has to be kept.

    ``"each"``: max_i |L_i' - L_i| / |L_i|. ``"mean"``: |mean_i (L_i' - L_i)| / mean_i |L_i|, so that losses of either
    sign which cancel do not matter. A reference that is exactly 0 has to stay so (else inf). NaN counts as inf.
    """
    change = kept(after - before, invariance).abs()
    relative = torch.where(change == 0, 0.0, change / kept(before.abs(), invariance))
    return float(torch.where(relative.isnan(), torch.inf, relative).max())


def mean_rise(before: Tensor, after: Tensor, invariance: str = "each") -> float:
    """Mean relative rise of what has to be kept: of each task's loss, or of the mean loss; references of 0 left out."""
    change, size = kept(after - before, invariance), kept(before.abs(), invariance)
    return float((change[size > 0] / size[size > 0]).mean()) if bool((size > 0).any()) else 0.0


def project_out(J: Tensor, u: Tensor, metric: Tensor | None = None) -> Tensor:
    """The part of P u that keeps J s = 0: s = P (u - J^T y) with J P J^T y = J P u.

    Args:
        J: [R, n]; rows of very different length are fine.
        u: [n].
        metric: diagonal of P [n]; None: identity.
    """
    return restore_step(J, None, u, metric)


def restore_step(J: Tensor, residual: Tensor | None, u: Tensor | None, metric: Tensor | None = None) -> Tensor:
    """Least-norm step in the metric P^-1 with J s = -residual, on top of the projection of u (either may be None)."""
    lengths = row_norms(J)
    unit = J / torch.where(lengths > 0, lengths, 1.0)
    weighted = unit if metric is None else unit * metric
    S = gramian(unit if metric is None else unit * metric.sqrt(), dtype=torch.float64)
    rhs = torch.zeros(len(J), dtype=torch.float64, device=J.device)
    if u is not None:
        rhs += torch.stack([dot(row, u) for row in weighted]).double()
    if residual is not None:
        rhs += torch.where(lengths[:, 0] > 0, residual / lengths[:, 0].double().clamp_min(1e-300), 0.0)
    y = _pinv_solve(S, rhs).to(J.dtype)
    step = -(weighted.T @ y)
    if u is not None:
        step += u if metric is None else u * metric
    return step


def _pinv_solve(S: Tensor, rhs: Tensor, rcond: float = 1e-6) -> Tensor:
    # Tasks with the same gradient are normal: S is then singular, and the pseudo-inverse simply counts them once.
    values, vectors = torch.linalg.eigh((S + S.T) / 2)
    keep = values > rcond * values[-1].clamp_min(0)
    inverse = torch.where(keep, 1 / torch.where(keep, values, 1.0), 0.0)
    solved: Tensor = vectors @ (inverse * (vectors.T @ rhs))
    return solved

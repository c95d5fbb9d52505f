"""From the Gramian to the weights: absent tasks left out, and an exact Gramian where the weights depend on its digits.

Tasks that are absent from a batch lose nothing, and the others are weighed as if they were not there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cost_mtl.base import DETERMINED, State, StatefulWeighting, Weighed, WeightingInputs
from cost_mtl.step.combined import fit_one_pass
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.host_read import HostRead, can_read_exactly, read_exactly
from cost_mtl.step.state import Progress, detached
from cost_mtl.step.tasks import goes_by_name

UNUSUAL = 1e3
"""How many times longer or shorter than the plain sum's gradient makes d is unusual: in every run that was seen to
diverge at the sum's learning rate, and in no other (docs/default_scale.md)."""


@dataclass(frozen=True)
class Weights:
    """The weights of one step.

    Attributes:
        weighed: what the weighting said, its weights [K] on the Gramian's device and in its dtype.
        values: w [K] in float64 on the host. Ones where the gradients are combined already, or nothing is shared.
        gramian: M [K, K] that they were made from, on the device; host: the same on the host.
        rows: the tasks that the weighting was told of.
    """

    weighed: Weighed
    values: Tensor
    gramian: Tensor
    host: HostRead
    rows: tuple[int, ...]


def weigh(
    weighting: StatefulWeighting, now: Evaluation, M: Tensor, host: HostRead, progress: Progress, group: Any
) -> Weights:
    """Ask the weighting; ``progress`` is read only.

    The weighting gets a copy of its state: what a step that is left out changed in place would stay.

    Args:
        M: the Gramian [K, K] on the device; host: the same on the host.

    Raises:
        TypeError: the weighting does not return a :class:`~cost_mtl.base.Weighed`.
        ValueError: a weight is not finite.
    """
    rows = present_rows(now, host) if goes_by_name(weighting) else list(range(len(now.names)))
    state = detached(progress.weighting) if progress.weighting else {}
    weighed = _weigh_rows(weighting, _inputs(weighting, now, host, rows, progress), state, rows, len(now.names))
    if _depends_on_rounding(weighed) and can_read_exactly(now, host):
        M, host = read_exactly(now, host, group)
        weighed = _weigh_rows(weighting, _inputs(weighting, now, host, rows, progress), state, rows, len(now.names))
    values = weighed.weights.detach().cpu().double()
    if not bool(torch.isfinite(values).all()):
        raise ValueError(
            f"weighting: {type(weighting).__name__} returned weights that are not finite, {values.tolist()}, from "
            "losses and gradients that are. Parameters and optimizer state are as before"
        )
    weighed = replace(weighed, weights=weighed.weights.to(M.device, M.dtype, non_blocking=True))
    return Weights(weighed, values, M, host, tuple(rows))


def unweighed(now: Evaluation, M: Tensor, host: HostRead, state: State) -> Weights:
    """The weights of a step in which no weighting is asked: those of an earlier step, which the gradients are combined
    with already, or ones, where the tasks share nothing."""
    K = len(now.names)
    weights = now.weights if now.weights is not None else torch.ones(K, dtype=M.dtype, device=M.device)
    return Weights(Weighed(weights, state), torch.ones(K, dtype=torch.float64), M, host, tuple(range(K)))


def is_weighed(now: Evaluation) -> bool:
    """Whether the weighting is asked: tasks that share something (one alone does not), and no weights of an earlier
    step."""
    return now.weights is None and bool(now.layout.params)


def present_rows(now: Evaluation, host: HostRead) -> list[int]:
    """The tasks that have something to say in this batch; all of them where none has.

    A task is absent if its shared gradient is exactly zero, and its loss is exactly zero as well (masked, no labels) or
    has no graph. Zero gradient alone is not enough: a task behind a ``detach()`` still trains its own parameters.
    """
    silent = (host.gramian.diagonal() == 0).tolist()
    losses = host.losses.tolist()
    rows = [i for i in range(len(now.names)) if not (silent[i] and (losses[i] == 0 or not now.graphs[i]))]
    return rows or list(range(len(now.names)))


def reusable(weights: Weights, names: Sequence[str], before: Mapping[str, float] | None) -> dict[str, float] | None:
    """Task name -> weight for the cheap steps until the next solve, those of absent tasks from ``before``; None where
    they are beyond the range of one backward pass, so that the coming step solves."""
    if not fit_one_pass(weights.values):
        return None
    fresh = {names[i]: w for i, w in enumerate(weights.values.tolist()) if i in weights.rows}
    return {**(before or {}), **fresh}


def unusual_length(weights: Weights, max_norm: float | None) -> tuple[float, float] | None:
    """The norms of d = G^T w (clipped) and of the plain sum's gradient s, where the one has nothing to do with the
    other; else None. None also where d is the weighting's own, no combination of the gradients.

    Too short counts only beside the part of s along d, which vanishes on the Pareto front. Lengths that are rounding
    errors of M tell nothing.

    Args:
        max_norm: what d will be clipped to.
    """
    if weights.weighed.direction is not None:
        return None
    w, M, noise = weights.values, weights.host.gramian, weights.host.noise
    rates, lengths = M @ w, M.diagonal().clamp_min(0).sqrt()
    d, s = float(w @ rates), float(M.sum())
    least = noise * max(float((w.abs() * lengths).sum()) ** 2, 0.0), noise * float(lengths.sum()) ** 2
    if not (d > least[0] and s > least[1]) or not (math.isfinite(d) and math.isfinite(s)):
        return None
    d, s, along = d**0.5, s**0.5, abs(float(rates.sum()))
    shown = d if max_norm is None else min(d, max_norm)
    return None if s / UNUSUAL * min(1.0, along / (d * s)) <= shown <= s * UNUSUAL else (shown, s)


def _weigh_rows(
    weighting: StatefulWeighting, inputs: WeightingInputs, state: State, rows: Sequence[int], K: int
) -> Weighed:
    """The weights [K] of all tasks: 0 for those whose rows are not among the inputs."""
    weighed = weighting.weigh(inputs, state)
    if not isinstance(weighed, Weighed):
        raise TypeError(f"weighting: expected weigh() to return a Weighed, got {type(weighed).__name__}")
    if len(rows) == K:
        return weighed
    weights = weighed.weights.new_zeros(K)
    weights[torch.tensor(rows, device=weights.device)] = weighed.weights
    return replace(weighed, weights=weights)


def _inputs(
    weighting: StatefulWeighting, now: Evaluation, host: HostRead, rows: Sequence[int], progress: Progress
) -> WeightingInputs:
    """What the weighting may look at, of the given tasks."""
    gramian_only = getattr(weighting, "needs", "gradients") == "gramian"
    gathered = now if gramian_only or now.share is None else now.gathered()
    M, losses, G, names = host.gramian, host.losses, gathered.gradients.matrix, now.names
    if len(rows) < len(names):
        at = torch.tensor(rows, device="cpu")
        M, losses, names = M[at][:, at], losses[at], tuple(names[i] for i in rows)
        G = G if gramian_only else G[at.to(G.device)]
    known = tuple(progress.names)
    return WeightingInputs(M, losses, G, progress.step, host.noise, names, known, now.named)


def _depends_on_rounding(weighed: Weighed) -> bool:
    """Whether the weights depend on digits that M may not have."""
    return weighed.solver is not None and weighed.solver.rounding > DETERMINED

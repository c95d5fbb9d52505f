"""From weights and task gradients to ``.grad``, and the check that all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cost_mtl.base import DETERMINED, SolverReport
from cost_mtl.evaluation import Evaluation
from cost_mtl.gradients import Layout, TaskGradients, combine, exact_gramian, gramian, gramian_noise
from cost_mtl.parallel import broadcast_, union
from cost_mtl.reductions import norm
from cost_mtl.sharding import like, local, sum_pieces_


@dataclass(frozen=True)
class HostRead:
    """The one host read of a step: loss values [K], M and the size of the other gradients, as float64 on the
    CPU; how far M's entries may be off, relative to ||g_i|| ||g_j||; and the loss scale (1: none)."""

    losses: Tensor
    gramian: Tensor
    own_norm: float
    noise: float
    scale: float = 1.0


def host_read(now: Evaluation, group: Any = None, scale: Tensor | None = None) -> tuple[Tensor, HostRead]:
    """M [K, K] in float64, on the device, and what decisions hang on, on the host, in one transfer.

    In a group every process gets the first one's numbers: decisions and weights are then the same to the last bit,
    whatever the hardware.
    """
    G = now.gradients.matrix
    wide = torch.float32 if G.device.type == "mps" else torch.float64
    M = _summed(gramian(_mine(now), dtype=wide), now)
    own = [grad for by_task in now.gradients.own.values() for grad in by_task.values()]
    K = len(now.losses)
    size = norm_of(own, M.device).to(M.dtype).reshape(1)
    sums = sum_pieces_(torch.cat([M.flatten(), size]), now.pieces)
    factor = torch.ones_like(size) if scale is None else scale.to(M.device, M.dtype).reshape(1)
    everything = broadcast_(torch.cat([now.losses.to(M.device, M.dtype), factor, sums]), group)
    M, values = everything[K + 1 : -1].view_as(M).clone(), everything.cpu().double()
    read = values[K + 1 : -1].view(len(G), len(G))
    host = HostRead(values[:K], read, float(values[-1]), gramian_noise(G), float(values[K]))
    diagonal = host.gramian.diagonal()
    if not math.isfinite(host.own_norm):  # the squares, or the gradients themselves
        size = norm_of(own, M.device, exact=True).to(M.dtype)
        host = replace(host, own_norm=float(broadcast_(sum_pieces_(size, now.pieces), group)))
    if now.layout.params and not bool((torch.isfinite(diagonal) & (diagonal > 1e-32)).all()):
        # A float32 square may have left its range while the gradient itself is fine.
        return read_exactly(now, host, group)
    return M, host


def read_exactly(now: Evaluation, host: HostRead, group: Any = None) -> tuple[Tensor, HostRead]:
    """The same with M from products in float64: on the device, and on the host the same numbers in all processes."""
    G = now.gradients.matrix
    exact = broadcast_(sum_pieces_(_summed(exact_gramian(_mine(now)), now), now.pieces), group)
    M = exact.to(G.device, torch.float32 if G.device.type == "mps" else torch.float64)
    return M, replace(host, gramian=exact.cpu(), noise=gramian_noise(G, exact=True))


def needs_more_digits(report: SolverReport | None, now: Evaluation, host: HostRead) -> bool:
    """Whether the weights depend on digits that M does not have, but an exact one would."""
    if report is None or not report.rounding > DETERMINED:
        return False
    return host.noise > gramian_noise(now.gradients.matrix, exact=True)


def _mine(now: Evaluation) -> Tensor:
    """The columns of G that are averaged here."""
    G = now.gradients.matrix
    return G if now.share is None else now.share.of(G)


def _summed(M: Tensor, now: Evaluation) -> Tensor:
    """The Gramian of all shares, in place of one's."""
    return M if now.share is None else sum_pieces_(M, now.share.group)


def direction(now: Evaluation, weights: Tensor, *, wide: bool) -> Tensor:
    """d = G^T w [m], in the place of G's first row; see :func:`cost_mtl.combine`."""
    mine = _mine(now)
    combine(mine, weights, out=mine[0], wide=wide)
    d = now.gradients.matrix[0]
    return d if now.share is None else now.share.gather_(d)


def bad_tasks(now: Evaluation, host: HostRead, group: Any = None) -> list[int]:
    """Tasks whose loss or gradient is not finite, or whose gradient is too long for its square to be a number (1e154 in
    float64): nothing can be told from such a Gramian."""
    suspicious = not torch.isfinite(host.losses).all() or not torch.isfinite(host.gramian).all()
    if not suspicious and math.isfinite(host.own_norm):
        return []
    found = set(not_finite(now))
    if not found and now.weights is None and now.layout.params:
        found = set(torch.nonzero(~torch.isfinite(host.gramian.diagonal())).flatten().tolist())
    flags = torch.tensor([i in found for i in range(len(now.names))], dtype=torch.uint8, device=now.losses.device)
    return union(union(flags, now.pieces), group).nonzero().flatten().tolist()


def complaint(now: Evaluation, bad: Sequence[int], step: int) -> str:
    """The message for tasks that are not finite."""
    which = ", ".join(f"task {now.names[i]!r} (loss {float(now.losses[i]):g})" for i in bad)
    return (
        f"not finite: the loss or a gradient of {which} in step {step}. Parameters and optimizer state are as before; "
        "on_nonfinite='skip' leaves such steps out"
    )


def refuse_weights(weights: Tensor, weighting: Any) -> None:
    """Refuse weights [K], on the CPU, that would make parameters not finite.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    if not bool(torch.isfinite(weights).all()):
        raise ValueError(
            f"weighting: {type(weighting).__name__} returned weights that are not finite, {weights.tolist()}, from "
            "losses and gradients that are. Parameters and optimizer state are as before"
        )


def norm_of(grads: Sequence[Tensor], device: torch.device, *, exact: bool = False) -> Tensor:
    """Euclidean norm [] of some gradients (dense or sparse), not finite if one of them is not."""
    return norm([_values(g) for g in grads], exact=exact, device=device)


def not_finite(evaluation: Evaluation) -> list[int]:
    """Tasks that have a loss or a gradient which is not finite, looked up entry by entry: the slow, exact answer."""
    if evaluation.weights is not None:
        return _not_finite_combined(evaluation)
    bad = []
    for i in range(len(evaluation.names)):
        grads = [by_task[i] for by_task in evaluation.gradients.own.values() if i in by_task]
        parts = [evaluation.losses[i], evaluation.gradients.matrix[i], *grads]
        if not all(bool(torch.isfinite(_values(p)).all()) for p in parts):
            bad.append(i)
    return bad


def _not_finite_combined(evaluation: Evaluation) -> list[int]:
    # The tasks' gradients were never apart: a loss tells on its task, a gradient on all of them.
    bad = torch.nonzero(~torch.isfinite(evaluation.losses)).flatten().tolist()
    grads = [evaluation.gradients.matrix, *(by_task[0] for by_task in evaluation.gradients.own.values())]
    fine = all(bool(torch.isfinite(_values(g)).all()) for g in grads)
    return bad if bad or fine else list(range(len(evaluation.names)))


def _values(grad: Tensor) -> Tensor:
    """The entries that are there, on this process."""
    grad = local(grad)
    return grad.coalesce().values() if grad.is_sparse else grad


def clip_(d: Tensor, max_norm: float | None, pieces: Any = None, *, scale: float = 1.0, exact: bool = False) -> Tensor:
    """Scale d [m], or this process's piece of it, in place so that ||d|| <= max_norm, without a host read.

    Args:
        scale: d has been multiplied by it, so that it fits; it is taken off again as far as the norm allows.
        exact: the squares of d leave the range of float32.
    """
    if max_norm is not None and max_norm != math.inf:  # inf / inf would be NaN
        length = norm(d, exact=exact)
        if pieces is not None:
            length = sum_pieces_(length.square(), pieces).sqrt()
        d.mul_((max_norm / length.clamp_min(max_norm * scale)).to(d.dtype))
    return d


Found = list[tuple[Tensor, Tensor | None]]
"""Parameters and what is to become their ``.grad``."""


def shared_grads(layout: Layout, d: Tensor, reached: set[int]) -> Found:
    """Of the shared parameters: views of d [m], or copies where dtype or device differ. None where no task's graph
    reached the parameter."""
    return [
        (p, like(p, layout.view(d, k).to(p.device, p.dtype)) if k in reached else None)
        for k, p in enumerate(layout.params)
    ]


def own_grads(own: Sequence[Tensor], gradients: TaskGradients, weights: Tensor | None, *, wide: bool) -> Found:
    """Of the other parameters: the sum of the gradients of the tasks that reach it, times the tasks' weights [K] where
    given.

    Args:
        wide: weights or partial sums may leave the parameters' range.
    """
    return [(p, _summed_up(gradients.own.get(id(p), {}), weights, wide)) for p in own]


def _summed_up(by_task: Mapping[int, Tensor], weights: Tensor | None, wide: bool) -> Tensor | None:
    if not by_task:
        return None
    first = next(iter(by_task.values()))
    if weights is None and len(by_task) == 1:
        return first
    work = _working_dtype(first, wide)
    total: Tensor | None = None
    for task in sorted(by_task):
        grad = by_task[task]
        if work != grad.dtype:
            grad = like(grad, local(grad).to(work))
        if weights is not None:
            grad = like(grad, local(grad) * weights[task].to(grad.device, grad.dtype))
        total = grad if total is None else total + grad
    if total is None or work == first.dtype:
        return total
    return like(first, local(total).to(first.dtype))


def _working_dtype(grad: Tensor, wide: bool) -> torch.dtype:
    """Sums of half precision are taken in float32, and all in float64 where their range asks for it."""
    if grad.is_complex():
        return torch.complex128 if wide else grad.dtype
    if wide and grad.device.type != "mps":
        return torch.float64
    return torch.float32 if grad.dtype.itemsize < 4 else grad.dtype

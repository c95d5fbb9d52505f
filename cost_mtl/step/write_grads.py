"""From weights and task gradients to ``.grad``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cost_mtl._torch.dtensor import like, local, sum_pieces_
from cost_mtl.gradients.backward import TaskGradients
from cost_mtl.gradients.gramian import combine
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.reductions import norm
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.host_read import _mine


def direction(now: Evaluation, weights: Tensor, *, wide: bool) -> Tensor:
    """d = G^T w [m], in the place of G's first row; see :func:`cost_mtl.combine`."""
    mine = _mine(now)
    combine(mine, weights, out=mine[0], wide=wide)
    d = now.gradients.matrix[0]
    return d if now.share is None else now.share.gather_(d)


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

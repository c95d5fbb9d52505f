"""Which parameters several tasks reach, where that is found from the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cost_mtl._torch.dtensor import local
from cost_mtl.distributed.collectives import union
from cost_mtl.gradients.layout import Layout
from cost_mtl.step.combined import _dense
from cost_mtl.step.evaluate import Evaluation


def reached_by_several(now: Evaluation, params: Sequence[Tensor]) -> list[int]:
    """Indices of the parameters that two losses or more have reached and that are not shared yet.

    A gradient that is zero throughout does not count: in a compiled closure, or behind arithmetic on a tensor of
    stacked losses, every loss gives every parameter one.
    """
    candidates = [(k, list(now.gradients.own.get(id(p), {}).values())) for k, p in enumerate(params)]
    candidates = [(k, grads) for k, grads in candidates if len(grads) > 1]
    if not candidates:
        return []
    every = [_is_nonzero(grad).to(now.losses.device) for _, grads in candidates for grad in grads]
    nonzero = iter(union(torch.stack(every), now.pieces).tolist())
    return [k for k, grads in candidates if sum(next(nonzero) for _ in grads) > 1]


def _is_nonzero(grad: Tensor) -> Tensor:
    """1 or 0 []."""
    dense = local(grad)
    return (dense.coalesce().values() if dense.is_sparse else dense).ne(0).any().to(torch.uint8)


def promote(now: Evaluation, layout: Layout) -> Evaluation:
    """The same evaluation with other parameters counted as shared, those of ``layout`` (more or fewer)."""
    G = torch.zeros(len(now.names), layout.numel, dtype=layout.dtype, device=layout.device)
    reached = set()
    for k, p in enumerate(layout.params):
        old = now.layout.index.get(id(p))
        by_task = now.gradients.own.pop(id(p), {})
        if by_task or old in now.gradients.reached:
            reached.add(k)
        for i, row in enumerate(G):
            if old is not None:
                layout.view(row, k).copy_(now.layout.view(now.gradients.matrix[i], old))
            elif i in by_task:
                layout.view(row, k).copy_(_dense(by_task[i]))
    return replace(now, layout=layout, gradients=replace(now.gradients, matrix=G, reached=reached))

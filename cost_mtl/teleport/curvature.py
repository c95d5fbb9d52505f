"""Hessian-vector products of task losses by double backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cost_mtl.distributed.failures import lacks_memory
from cost_mtl.gradients.losses import TaskLosses
from cost_mtl.teleport.base import NoDoubleBackwardError


def curvature(
    losses: TaskLosses,
    members: Sequence[int],
    params: Sequence[Tensor],
    direction: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> list[Tensor | None]:
    """Gradient of <direction, g> with respect to ``inputs``, g the gradient of the members' summed losses with respect
    to ``params``. The graph is kept.

    Args:
        direction: one tensor per parameter, in its shape.

    Raises:
        NoDoubleBackwardError: some node of the graph has no derivative of its derivative.
    """
    roots = [root for i in members if (root := losses.roots[i]) is not None]
    if not roots:
        return [None] * len(inputs)
    seeds = [losses.seed(root, 1.0) for root in roots]
    with torch.enable_grad():
        try:
            grads = torch.autograd.grad(roots, list(params), seeds, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
            pairs = [(g, v) for g, v in zip(grads, direction, strict=True) if g is not None]
            if not any(g.requires_grad for g, _ in pairs):
                # Linear losses, or a function whose backward hides its arithmetic: nothing tells them apart.
                raise NoDoubleBackwardError("the gradients have no graph of their own")
            product = torch.stack([(g * v.detach().to(g.dtype)).sum() for g, v in pairs]).sum()
            seconds = torch.autograd.grad(product, list(inputs), retain_graph=True, allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, NoDoubleBackwardError) or lacks_memory(error):
                raise
            raise NoDoubleBackwardError(str(error).splitlines()[0]) from error
    if losses.scale is None:
        return list(seconds)
    scale = losses.scale
    return [None if s is None else s / scale.to(s.device, s.dtype) for s in seconds]

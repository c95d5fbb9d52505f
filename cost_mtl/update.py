"""From weights and task gradients to ``.grad``, and the check that all of it is finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_mtl.evaluation import Evaluation
from cost_mtl.gradients import Layout, TaskGradients


@dataclass(frozen=True)
class HostRead:
    """The one host read of a step: [K] loss values, M [K, K] and the size of the other gradients, as float64 on the
    CPU."""

    losses: Tensor
    gramian: Tensor
    own_norm: float

    def bad_tasks(self) -> list[int]:
        """Tasks with a loss or a shared gradient that is not finite."""
        finite = torch.isfinite(self.losses) & torch.isfinite(self.gramian.diagonal())
        return torch.nonzero(~finite).flatten().tolist()


def read(losses: Tensor, M: Tensor, own: Sequence[Tensor]) -> HostRead:
    """Bring what decisions hang on to the host, in one transfer."""
    K = len(losses)
    size = norm_of(own, M.device).to(M.dtype).reshape(1)
    host = torch.cat([losses.to(M.device, M.dtype), M.flatten(), size]).cpu().double()
    return HostRead(host[:K], host[K : K + K * K].view(K, K), float(host[-1]))


def norm_of(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Euclidean norm [] of some gradients (dense or sparse), not finite if one of them is not."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    dense = [g for g in dense if g.numel()]
    if not dense:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(dense, norm_type=2.0).to(device)


def not_finite(evaluation: Evaluation) -> list[int]:
    """Tasks that have a loss or a gradient which is not finite, looked up entry by entry: the slow, exact answer."""
    bad = []
    for i in range(len(evaluation.names)):
        grads = [by_task[i] for by_task in evaluation.gradients.own.values() if i in by_task]
        parts = [evaluation.losses[i], evaluation.gradients.matrix[i], *grads]
        if not all(bool(torch.isfinite(p.coalesce().values() if p.is_sparse else p).all()) for p in parts):
            bad.append(i)
    return bad


def clip_(d: Tensor, max_norm: float | None) -> Tensor:
    """Scale d [m] in place so that ||d|| <= max_norm, without a synchronisation."""
    if max_norm is not None and d.numel():
        length = torch.linalg.vector_norm(d)
        d.mul_((max_norm / length.clamp_min(max_norm)).to(d.dtype))
    return d


def write_shared(layout: Layout, d: Tensor, reached: set[int]) -> None:
    """``.grad`` of the shared parameters: views of d [m], or copies where the dtype differs. None where no task's
    graph reached the parameter."""
    for k, p in enumerate(layout.params):
        if k not in reached:
            p.grad = None
            continue
        part = layout.view(d, k)
        p.grad = part if part.dtype == p.dtype and part.device == p.device else part.to(p.device, p.dtype)


def write_own(own: Sequence[Tensor], gradients: TaskGradients, weights: Sequence[float] | None) -> None:
    """``.grad`` of the other parameters: the sum of the gradients of the tasks that reach it, times the tasks' weights
    where given."""
    for p in own:
        by_task = gradients.own.get(id(p))
        p.grad = None
        for task in sorted(by_task or {}):
            grad = (by_task or {})[task]
            if weights is not None:
                grad = grad * weights[task]
            p.grad = grad if p.grad is None else p.grad + grad

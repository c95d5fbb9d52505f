"""From weights and task gradients to ``.grad``, and the check that all of it is finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cost_mtl.evaluation import Evaluation
from cost_mtl.gradients import Layout, TaskGradients, exact_gramian, gramian


@dataclass(frozen=True)
class HostRead:
    """The one host read of a step: loss values [K], M and the size of the other gradients, as float64 on the
    CPU."""

    losses: Tensor
    gramian: Tensor
    own_norm: float


def host_read(now: Evaluation) -> tuple[Tensor, HostRead]:
    """M [K, K] in float64, on the device, and what decisions hang on, on the host, in one transfer."""
    G = now.gradients.matrix
    wide = torch.float32 if G.device.type == "mps" else torch.float64
    M = gramian(G, dtype=wide)
    own = [grad for by_task in now.gradients.own.values() for grad in by_task.values()]
    K = len(now.losses)
    size = norm_of(own, M.device).to(M.dtype).reshape(1)
    values = torch.cat([now.losses.to(M.device, M.dtype), M.flatten(), size]).cpu().double()
    host = HostRead(values[:K], values[K:-1].view(len(G), len(G)), float(values[-1]))
    diagonal = host.gramian.diagonal()
    if G.numel() and not bool((torch.isfinite(diagonal) & (diagonal > 1e-32)).all()):
        # A float32 square may have left its range while the gradient itself is fine.
        M = exact_gramian(G).to(wide)
        host = replace(host, gramian=M.cpu().double())
    return M, host


def bad_tasks(now: Evaluation, host: HostRead) -> list[int]:
    """Tasks whose loss or gradient is not finite."""
    suspicious = not torch.isfinite(host.losses).all() or not torch.isfinite(host.gramian).all()
    return not_finite(now) if suspicious or not math.isfinite(host.own_norm) else []


def complaint(now: Evaluation, bad: Sequence[int], step: int) -> str:
    """The message for tasks that are not finite."""
    which = ", ".join(f"task {now.names[i]!r} (loss {float(now.losses[i]):g})" for i in bad)
    return (
        f"not finite: the loss or a gradient of {which} in step {step}. Parameters and optimizer state are as before; "
        "on_nonfinite='skip' leaves such steps out"
    )


def norm_of(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Euclidean norm [] of some gradients (dense or sparse), not finite if one of them is not."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    dense = [g for g in dense if g.numel()]
    if not dense:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(dense, norm_type=2.0).to(device)


def not_finite(evaluation: Evaluation) -> list[int]:
    """Tasks that have a loss or a gradient which is not finite, looked up entry by entry: the slow, exact answer."""
    if evaluation.weights is not None:
        return _not_finite_combined(evaluation)
    bad = []
    for i in range(len(evaluation.names)):
        grads = [by_task[i] for by_task in evaluation.gradients.own.values() if i in by_task]
        parts = [evaluation.losses[i], evaluation.gradients.matrix[i], *grads]
        if not all(bool(torch.isfinite(p.coalesce().values() if p.is_sparse else p).all()) for p in parts):
            bad.append(i)
    return bad


def _not_finite_combined(evaluation: Evaluation) -> list[int]:
    # The tasks' gradients were never apart: a loss tells on its task, a gradient on all of them.
    bad = torch.nonzero(~torch.isfinite(evaluation.losses)).flatten().tolist()
    grads = [evaluation.gradients.matrix, *(by_task[0] for by_task in evaluation.gradients.own.values())]
    fine = all(bool(torch.isfinite(g.coalesce().values() if g.is_sparse else g).all()) for g in grads)
    return bad if bad or fine else list(range(len(evaluation.names)))


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


def write_own(own: Sequence[Tensor], gradients: TaskGradients, weights: Tensor | None) -> None:
    """``.grad`` of the other parameters: the sum of the gradients of the tasks that reach it, times the tasks' weights
    [K] where given."""
    for p in own:
        by_task = gradients.own.get(id(p))
        p.grad = None
        for task in sorted(by_task or {}):
            grad = (by_task or {})[task]
            if weights is not None:
                grad = grad * weights[task].to(grad.device, grad.dtype)
            p.grad = grad if p.grad is None else p.grad + grad

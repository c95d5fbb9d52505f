"""More than one process: the mean of task gradients over a group, on torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BUCKET = 1 << 23
"""Elements per all-reduce: 32 MiB of float32, DDP's order of magnitude, so that a backend's scratch stays small."""


def group_for(model: nn.Module, process_group: Any) -> Any:
    """The group to average over, or None for a single process.

    ``process_group``: None: the group of a DDP-wrapped model, else the default group where torch.distributed is
    initialised; False: none; anything else is taken as the group.
    """
    if process_group is False or not dist.is_available() or not dist.is_initialized():
        return None
    if process_group is not None:
        group = process_group
    elif isinstance(model, DistributedDataParallel):
        group = model.process_group
    else:
        group = dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def mean_(tensor: Tensor, group: Any) -> Tensor:
    """In-place mean of a contiguous tensor over the group; nothing for a single process."""
    if group is None:
        return tensor
    flat = tensor.view(-1)
    for part in flat.split(BUCKET):
        dist.all_reduce(part, group=group)
    return tensor.div_(dist.get_world_size(group))


def broadcast_(tensor: Tensor, group: Any) -> Tensor:
    """In-place copy of the group's first process's tensor."""
    if group is not None:
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
    return tensor


def mean_own(own: dict[int, dict[int, Tensor]], params: Sequence[Tensor], num_tasks: int, group: Any) -> None:
    """Mean of the unshared gradients, in place, in one order on every process.

    A task without labels on one process has no gradient there; it counts as zero, as it does in DDP.
    """
    if group is None or not params:
        return
    device = params[0].device
    present = torch.zeros(len(params), num_tasks, device=device)
    for r, p in enumerate(params):
        for task in own.get(id(p), {}):
            present[r, task] = 1.0
    dist.all_reduce(present, group=group)
    for r, task in present.nonzero().tolist():
        p = params[r]
        grads = own.setdefault(id(p), {})
        grad = grads.get(task)
        grad = torch.zeros_like(p) if grad is None else grad.to_dense() if grad.is_sparse else grad.contiguous()
        dist.all_reduce(grad, group=group)
        grads[task] = grad.div_(dist.get_world_size(group))


def union(indices: set[int], size: int, device: torch.device, group: Any) -> set[int]:
    """The union over the group of sets of indices below ``size``."""
    if group is None or size == 0:
        return indices
    flags = torch.zeros(size, device=device)
    flags[sorted(indices)] = 1.0
    dist.all_reduce(flags, group=group)
    return set(flags.nonzero().flatten().tolist())


@contextmanager
def without_reducer(model: nn.Module) -> Iterator[None]:
    """Forward passes of a DDP model whose backward passes we run and average ourselves.

    DDP's reducer is told to stay out (``no_sync``); its broadcast of buffers before the forward pass, which
    ``no_sync`` would also end, goes on as without us.
    """
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    sync_buffers = model.require_forward_param_sync
    with model.no_sync():
        yield
    model.require_forward_param_sync = sync_buffers

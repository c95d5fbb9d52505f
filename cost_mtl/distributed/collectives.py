"""Means and copies over a group of processes, bucket by bucket, on torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_mtl._torch.dtensor import is_sharded

BUCKET = 1 << 23
"""Elements per all-reduce: 32 MiB of float32, DDP's order of magnitude, so that a backend's scratch stays small."""


def mean_(tensor: Tensor, group: Any) -> Tensor:
    """In-place mean of a contiguous tensor over the group; nothing for a single process."""
    if group is None or not tensor.numel():
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


def union(flags: Tensor, group: Any) -> Tensor:
    """In-place "set on any process" of 0/1 flags."""
    if group is not None and flags.numel():
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return flags


def mean_own_(own: dict[int, dict[int, Tensor]], present: list[tuple[Tensor, int]], group: Any) -> None:
    """Mean of the unshared gradients, in place, bucket by bucket.

    Args:
        own: parameter id -> task -> gradient.
        present: (parameter, task) for every gradient that some process has, in one order on all of them. Where this
            one has none (a task without labels in its part of the batch) it counts as zero, as it does in DDP; a
            sparse gradient becomes dense.
    """
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for p, task in present:
        if is_sharded(p):  # averaged by FSDP
            continue
        grads = own.setdefault(id(p), {})
        grad = grads.get(task)
        grads[task] = torch.zeros_like(p) if grad is None else grad.to_dense() if grad.is_sparse else grad
        buckets.setdefault((p.dtype, p.device), []).append(grads[task])
    for grads_of_a_kind in buckets.values():
        for bucket in _buckets(grads_of_a_kind):
            real = [torch.view_as_real(g) if g.is_complex() else g for g in bucket]
            flat = mean_(torch.cat([g.reshape(-1) for g in real]), group)
            for g, part in zip(real, flat.split([g.numel() for g in real]), strict=True):
                g.copy_(part.view(g.shape))


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        if bucket and size + grad.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel()
    if bucket:
        yield bucket

"""Keeping processes equal: parameters, buffers and tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from cost_mtl._torch.dtensor import is_sharded
from cost_mtl._torch.param_groups import held_by
from cost_mtl._torch.undo import undoing
from cost_mtl.distributed.collectives import broadcast_
from cost_mtl.distributed.group import data_parallel, group_for
from cost_mtl.gradients.losses import TaskLosses, no_graph


def synchronize_(base: Optimizer, model: nn.Module, process_group: Any, *, first: bool) -> Any:
    """Make the processes equal before a step; returns the group to average over, None for a single process.

    The group is looked up in each step, since torch.distributed may be initialised after COST is made.

    Args:
        first: the first step, before which parameters are compared and made equal.
    """
    group = group_for(model, process_group)
    if group is not None:
        if first:
            share_parameters_(base, model, group)
        share_buffers_(model, group)
    return group


def share_parameters_(base: Optimizer, model: nn.Module, group: Any) -> None:
    """Give every process the first one's parameters, as DDP does when it is constructed: averaged gradients keep
    models equal only if they were.

    Raises:
        ValueError: the parameters differ in number, shape or dtype.
    """
    params = list({id(p): p for p in (*model.parameters(), *held_by(base))}.values())
    kinds = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in params]
    if not _same(_digest(kinds), params[0].device, group):
        raise ValueError(
            f"model: expected the same parameters on every process of the group, got {len(params)} on this one, which "
            "differ in number, shape, dtype or requires_grad from another one's. Models that are split over processes "
            "can't be averaged: process_group=False makes this process train alone"
        )
    if not data_parallel(model):
        _broadcast_all_([p for p in params if not is_sharded(p)], group)


def share_buffers_(model: nn.Module, group: Any) -> None:
    """Give every process the first one's buffers (running statistics), as DDP does before each forward pass; nothing
    for a model in DDP, which does that itself."""
    if not data_parallel(model):
        _broadcast_all_([b for b in model.buffers() if not is_sharded(b)], group)


def _broadcast_all_(tensors: Sequence[Tensor], group: Any) -> None:
    """In-place copies of the first process's tensors, as bytes: one broadcast a device, whatever the dtypes."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided and tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor.detach())
    for found in by_device.values():
        rows = [t.contiguous().reshape(-1).view(torch.uint8) for t in found]
        received = broadcast_(torch.cat(rows), group)
        for t, row in zip(found, received.split([r.numel() for r in rows]), strict=True):
            t.copy_(row.clone().view(t.dtype).view(t.shape))


def agree_on_tasks(tasks: TaskLosses, device: torch.device, group: Any, *, lockstep: bool) -> None:
    """Check that the closure returned the same tasks on every process, before the backward passes.

    Args:
        lockstep: the backward passes themselves communicate (``fully_shard``, SyncBatchNorm), so that every task needs
            one on every process.

    Raises:
        ValueError: the tasks differ from process to process; no loss on any process has a graph; under ``lockstep``, a
            task has a graph on one process and none on another.
    """
    if group is None:
        if not tasks.has_graph:
            raise ValueError(no_graph(tasks))
        return
    graphs = [root is not None for root in tasks.roots]
    names, where = _digest(tasks.names), _digest(graphs)
    values = torch.tensor([names, -names, where, -where, int(tasks.has_graph)], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    most, least, most_graphs, least_graphs, any_graph = values.tolist()
    if most != -least:
        raise ValueError(f"closure: expected the same tasks in the same order on every process, got "
                         f"{list(tasks.names)} on this one")  # fmt: skip
    if not any_graph:
        raise ValueError(no_graph(tasks))
    if lockstep and most_graphs != -least_graphs:
        raise ValueError(
            "closure: expected losses with a graph, since every task needs a backward pass on every process under "
            f"fully_shard or SyncBatchNorm, got {dict(zip(tasks.names, graphs, strict=True))} on this process: return "
            "0 * output.sum() for a task without labels"
        )


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _same(number: int, device: torch.device, group: Any) -> bool:
    values = torch.tensor([number, -number], device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    most, least = values.tolist()
    return bool(most == -least)


def communicates(model: nn.Module, params: Sequence[Tensor]) -> bool:
    """Whether backward passes of the model communicate."""
    return any(is_sharded(p) for p in params) or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())


@contextmanager
def refusing_foreign_wrappers(model: nn.Module) -> Iterator[None]:
    """While active, a forward pass of a DDP wrapper that is not part of ``model`` is refused: its reducer would take
    the first of the K backward passes for the only one.

    Raises:
        ValueError: in that forward pass.
    """
    known = {id(ddp) for ddp in data_parallel(model)}
    active = [True]

    def look(module: nn.Module, _: Any) -> None:
        if active and isinstance(module, DistributedDataParallel) and id(module) not in known:
            raise ValueError("model: expected the DistributedDataParallel module that the closure calls, got a model "
                             "without it: pass the wrapped model, COST(base, ddp_model, ...)")  # fmt: skip

    register: Callable[..., Any] = register_module_forward_pre_hook

    def leave() -> None:
        active.clear()
        for key in [key for key, hook in _global_forward_pre_hooks.items() if hook is look]:
            _global_forward_pre_hooks.pop(key, None)

    with undoing(leave):
        register(look)
        yield

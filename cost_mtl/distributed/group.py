"""The process group that task gradients are averaged over.

DistributedDataParallel's own reducer cannot do it: it reduces one backward pass per forward pass, and here are K.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cost_mtl._torch.undo import undoing


def active() -> bool:
    """Whether torch.distributed is initialised."""
    return dist.is_available() and dist.is_initialized()


def data_parallel(model: nn.Module) -> list[DistributedDataParallel]:
    """The DDP wrappers in a model: itself, or parts of it."""
    return [m for m in model.modules() if isinstance(m, DistributedDataParallel)] if active() else []


def group_for(model: nn.Module, process_group: Any) -> Any:
    """The group to average over, or None for a single process.

    ``process_group``: None: the group of a DDP-wrapped model, else the default group where torch.distributed is
    initialised; False: none; or a process group that this process belongs to.

    Raises:
        TypeError: ``process_group`` is something else.
        ValueError: the settings would leave processes unsynchronised, or the model is wrapped in FSDP 1.
    """
    if not (process_group is None or process_group is False or _is_group(process_group)):
        raise TypeError(
            "process_group: expected None, False or a torch.distributed process group this process belongs to, got "
            f"{process_group!r}"
        )
    _refuse_fsdp1(model)
    if not active():
        if process_group not in (None, False):
            raise ValueError(
                "process_group: expected None or False while torch.distributed is not initialised, got "
                f"{process_group!r}"
            )
        return None
    wrapped = data_parallel(model)
    if any(ddp.static_graph for ddp in wrapped):
        raise ValueError("model: expected DistributedDataParallel without static_graph, got static_graph=True, which "
                         "counts one backward pass per forward pass: COST averages the gradients itself")  # fmt: skip
    if process_group is False:
        if any(dist.get_world_size(ddp.process_group) > 1 for ddp in wrapped):
            raise ValueError(
                "process_group: expected None or a group for a DistributedDataParallel model, got False, which leaves "
                "its processes unsynchronised: give the closure and COST the model that it wraps (model.module), or "
                "process_group=None"
            )
        return None
    group = process_group
    if group is None:
        group = wrapped[0].process_group if wrapped else dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _is_group(value: Any) -> bool:
    return dist.is_available() and isinstance(value, dist.ProcessGroup) and dist.get_rank(value) >= 0


def _refuse_fsdp1(model: nn.Module) -> None:
    kinds = {type(m).__name__ for m in model.modules()}
    if "FullyShardedDataParallel" in kinds:
        raise ValueError(
            "model: expected torch.distributed.fsdp.fully_shard(model), got FullyShardedDataParallel, which flattens "
            "parameters, so that those of several layers can't be separated"
        )


@contextmanager
def without_reducer(model: nn.Module) -> Iterator[None]:
    """Forward passes of DDP models whose backward passes we run and average ourselves.

    DDP's reducer is switched off (``no_sync``). Its broadcast of buffers before the forward pass, which ``no_sync``
    would also end, stays on. An earlier forward pass (for logging, say) may have left the reducer waiting for a
    backward pass; it would take one of ours for that, so it is reset.

    Raises:
        RuntimeError: DDP's ``join()`` was entered: its shadow collectives do not match ours.
    """
    wrapped = data_parallel(model)
    if any(ddp._join_config.enable for ddp in wrapped):
        raise RuntimeError("model: expected DistributedDataParallel outside of join(), got it inside: give every "
                           "process the same number of batches (drop_last=True)")  # fmt: skip
    flags = [(ddp, ddp.require_backward_grad_sync, ddp.require_forward_param_sync) for ddp in wrapped]

    def restore() -> None:
        for ddp, backward, forward in flags:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = backward, forward

    with undoing(restore), ExitStack() as stack:
        for ddp in wrapped:
            reset = getattr(ddp.reducer, "_reset_state", None)
            if reset is not None:
                reset()
            stack.callback(setattr, ddp, "require_forward_param_sync", ddp.require_forward_param_sync)
            stack.enter_context(ddp.no_sync())
        yield

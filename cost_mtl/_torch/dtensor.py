"""Parameters that FSDP2 (``fully_shard``) has cut into pieces: DTensors, of which each process holds its own part.

A task gradient arrives averaged and cut alike, so each process keeps its pieces of G, [K, m / processes], and the only
thing to be summed over the processes is the K x K Gramian.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NO_TELEPORTS = (
    "no teleports: the parameters are sharded by fully_shard, and PEFT can't merge an adapter into a piece of a weight "
    "(nor are there moves of pieces without one). Training goes on without; teleporter=None says so"
)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Nobody has one before its module is imported, which takes a while."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharded_among(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The DTensors among some tensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return [] if module is None else [t for t in tensors if isinstance(t, module.DTensor)]


def local(tensor: Tensor) -> Tensor:
    """This process's piece of a DTensor (the same storage); any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        piece: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return piece


def like(tensor: Tensor, piece: Tensor) -> Tensor:
    """A piece, made a DTensor cut as the given one; for any other tensor the piece itself."""
    if not is_sharded(tensor):
        return piece
    sharded: Tensor = type(tensor).from_local(  # type: ignore[attr-defined]
        piece,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return sharded


def pieces_group(params: Sequence[Tensor]) -> Any:
    """The process group whose members hold the pieces of the sharded ones among the parameters; None if none is.

    Raises:
        ValueError: a parameter is cut along two mesh dimensions (tensor parallelism beside FSDP), or two of them are
            cut over different groups: the Gramian would need one sum per kind.
    """
    groups = []
    for p in sharded_among(params):
        cut = [dim for dim, placement in enumerate(p.placements) if placement.is_shard()]  # type: ignore[attr-defined]
        if len(cut) != 1:
            raise ValueError(f"model: expected parameters that fully_shard cut along one dimension of the device mesh, "
                             f"got placements {p.placements}")  # type: ignore[attr-defined]  # fmt: skip
        groups.append(p.device_mesh.get_group(cut[0]))  # type: ignore[attr-defined]
    if any(set(dist.get_process_group_ranks(g)) != set(dist.get_process_group_ranks(groups[0])) for g in groups[1:]):
        raise ValueError("model: expected all sharded parameters on one device mesh, got several")
    return groups[0] if groups else None


def reshard(model: nn.Module) -> None:
    """Let go of gathered parameters after a forward pass without a backward pass: FSDP2 would take them, out of date by
    then, for the next forward pass."""
    module = sys.modules.get("torch.distributed.fsdp")
    for m in model.modules() if module is not None else ():
        if isinstance(m, module.FSDPModule):  # type: ignore[union-attr]
            m.reshard()


def sum_pieces_(values: Tensor, group: Any) -> Tensor:
    """In-place sum over the processes that hold the pieces; nothing where there are none (group None)."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values

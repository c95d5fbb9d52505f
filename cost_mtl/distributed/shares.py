"""Task gradients of a group of processes, of which each one averages its share of the columns.

A reduce-scatter moves half of what an all-reduce does, and what is left to do with G [K, m], the Gramian and the
combination, is split as well: K x K numbers are summed over the processes, and one row [m] is gathered. Whoever wants
the whole of G (a teleport, a method that reads gradients) gathers it, which then comes to the all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cost_mtl.distributed.collectives import mean_

# The names until torch 2.12, and since.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

_without: set[str] = set()
"""Backends that turned out not to have a reduce-scatter."""


@dataclass(frozen=True)
class Share:
    """The columns of G that are averaged on this process; elsewhere G has this process's own gradients.

    Attributes:
        group: the processes.
        start, stop: the columns [start, stop).
        each: columns per process; the last one has the few that remain, too.
    """

    group: Any
    start: int
    stop: int
    each: int

    def of(self, G: Tensor) -> Tensor:
        """This process's columns of G [K, m] (a view)."""
        return G[:, self.start : self.stop]

    def gather_(self, row: Tensor) -> Tensor:
        """A vector [m] of which every process has its share, made whole in place."""
        world = dist.get_world_size(self.group)
        even = world * self.each
        if self.each:
            _all_gather(row[:even], row[self.start : self.start + self.each].clone(), group=self.group)  # type: ignore[misc]
        if even < len(row):
            dist.broadcast(row[even:], dist.get_global_rank(self.group, world - 1), group=self.group)
        return row

    def gather_all_(self, G: Tensor) -> Tensor:
        """Every row of G, made whole in place."""
        for row in G:
            self.gather_(row)
        return G


def scatter_mean_(G: Tensor, group: Any) -> Share | None:
    """Mean over the group, in place, of this process's share of the columns of G [K, m], row by row: beside G itself
    there is one share of one row.

    Returns:
        The share; None where all columns were averaged on all processes, since the backend has no reduce-scatter.
    """
    backend, (rank, world), m = dist.get_backend(group), (dist.get_rank(group), dist.get_world_size(group)), G.shape[1]
    each = m // world
    share = Share(group, rank * each, (rank + 1) * each if rank < world - 1 else m, each)
    if backend in _without or _reduce_scatter is None or not each:
        mean_(G, group)
        return None
    part = G.new_empty(each)
    for row in G:
        try:
            _reduce_scatter(part, row[: world * each], group=group)
        except (RuntimeError, NotImplementedError) as error:
            if "support" not in str(error) and "implement" not in str(error):
                raise
            _without.add(backend)
            return scatter_mean_(G, group)
        row[share.start : share.start + each].copy_(part.div_(world))
    rest = G[:, world * each :].contiguous()
    G[:, world * each :].copy_(mean_(rest, group))
    return share

"""The one host read of a step: losses and Gramian, for finiteness, trigger and weights together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cost_mtl._torch.dtensor import sum_pieces_
from cost_mtl.distributed.collectives import broadcast_
from cost_mtl.gradients.gramian import exact_gramian, gramian, gramian_noise
from cost_mtl.gradients.reductions import norm_of
from cost_mtl.step.evaluate import Evaluation


@dataclass(frozen=True)
class HostRead:
    """The one host read of a step: loss values [K], M and the size of the other gradients, as float64 on the
    CPU; how far M's entries may be off, relative to ||g_i|| ||g_j||; and the loss scale (1: none)."""

    losses: Tensor
    gramian: Tensor
    own_norm: float
    noise: float
    scale: float = 1.0

    @property
    def finite(self) -> bool:
        """Whether every number of it is."""
        tensors = self.losses, self.gramian
        return math.isfinite(self.own_norm) and all(bool(torch.isfinite(t).all()) for t in tensors)


def host_read(now: Evaluation, group: Any = None, scale: Tensor | None = None) -> tuple[Tensor, HostRead]:
    """M [K, K] in float64, on the device, and what decisions hang on, on the host, in one transfer.

    In a group every process gets the first one's numbers: decisions and weights are then the same to the last bit,
    whatever the hardware.
    """
    G = now.gradients.matrix
    wide = torch.float32 if G.device.type == "mps" else torch.float64
    M, noise = gramian(G if now.share is None else now.share.of(G), dtype=wide), gramian_noise(G)
    if now.share is not None:
        sum_pieces_(M, now.share.group)
    own = [grad for by_task in now.gradients.own.values() for grad in by_task.values()]
    K = len(now.losses)
    size = norm_of(own, M.device, plain=now.pieces is None).to(M.dtype).reshape(1)
    sums = torch.cat([M.flatten(), size])
    if now.pieces is not None:
        sum_pieces_(sums, now.pieces)
    factor = torch.ones_like(size) if scale is None else scale.to(M.device, M.dtype).reshape(1)
    everything = torch.cat([now.losses.to(M.device, M.dtype), factor, sums])
    if group is not None:
        broadcast_(everything, group)
    M, values = everything[K + 1 : -1].view_as(M).clone(), everything.cpu().double()
    read = values[K + 1 : -1].view(len(G), len(G))
    host = HostRead(values[:K], read, float(values[-1]), noise, float(values[K]))
    diagonal = host.gramian.diagonal()
    if not math.isfinite(host.own_norm):  # the squares, or the gradients themselves
        size = norm_of(own, M.device, exact=True).to(M.dtype)
        host = replace(host, own_norm=float(broadcast_(sum_pieces_(size, now.pieces), group)))
    if now.layout.params and not bool((torch.isfinite(diagonal) & (diagonal > 1e-32)).all()):
        # A float32 square may have left its range while the gradient itself is fine.
        return read_exactly(now, host, group)
    return M, host


def read_exactly(now: Evaluation, host: HostRead, group: Any = None) -> tuple[Tensor, HostRead]:
    """The same with M from products in float64: on the device, and on the host the same numbers in all processes."""
    G = now.gradients.matrix
    exact = exact_gramian(G if now.share is None else now.share.of(G))
    if now.share is not None:
        sum_pieces_(exact, now.share.group)
    broadcast_(sum_pieces_(exact, now.pieces), group)
    M = exact.to(G.device, torch.float32 if G.device.type == "mps" else torch.float64)
    return M, replace(host, gramian=exact.cpu(), noise=gramian_noise(G, exact=True))


def can_read_exactly(now: Evaluation, host: HostRead) -> bool:
    """Whether an exact Gramian has digits that this one does not have."""
    return host.noise > gramian_noise(now.gradients.matrix, exact=True)

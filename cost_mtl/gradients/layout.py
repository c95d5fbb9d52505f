"""Where each shared parameter lives in the columns of G."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from cost_mtl._torch.dtensor import local, pieces_group, sharded_among

BLOCK = 8192
"""Columns that pass through the processor's cache at a time where G is read and written in place."""


class Layout:
    """Where each shared parameter lives in the columns of G.

    A parameter's entries are stored in the order of its own memory, so that a gradient handed out as a view of G has
    the parameter's strides (channels_last, transposed weights), which fused optimizer kernels insist on. Of parameters
    that FSDP2 has sharded, a process has the columns of its own pieces.

    Raises:
        TypeError: a parameter is complex.
        ValueError: some parameters are sharded and others are not.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = tuple(params)
        self.index = {id(p): k for k, p in enumerate(self.params)}
        sharded = sharded_among(self.params)
        self.pieces = [local(p) for p in self.params] if sharded else list(self.params)
        self.pieces_group = pieces_group(self.params) if sharded else None
        self._check(len(sharded))
        sizes = [p.numel() for p in self.pieces]
        self.starts = list(accumulate(sizes, initial=0))
        self.numel = sum(sizes)
        self.dense = [_fills_its_memory(p) for p in self.pieces]
        doubles = any(p.dtype == torch.float64 for p in self.params)
        # bf16 and fp16 gradients are kept in float32: their Gramian in 8 or 11 bits would decide nothing reliably.
        self.dtype = torch.float64 if doubles else torch.float32
        self.device = self.params[0].device if self.params else torch.device("cpu")

    def _check(self, sharded: int) -> None:
        odd = next((p for p in self.params if p.is_complex()), None)
        if odd is not None:
            raise TypeError(f"shared: expected real parameters, got a complex one of shape {list(odd.shape)}: keep its "
                            "real and imaginary parts as a real parameter (torch.view_as_real)")  # fmt: skip
        if sharded not in (0, len(self.params)):
            raise ValueError("shared: expected all parameters to be sharded by fully_shard or none, got both kinds: "
                             "call fully_shard on the whole model, too")  # fmt: skip

    def view(self, flat: Tensor, k: int) -> Tensor:
        """Parameter k's part of a flat vector [m], in the parameter's shape and strides (no copy)."""
        p = self.pieces[k]
        part = flat[self.starts[k] : self.starts[k] + p.numel()]
        return part.as_strided(p.shape, p.stride()) if self.dense[k] else part.view(p.shape)

    def views(self, flat: Tensor) -> list[Tensor]:
        return [self.view(flat, k) for k in range(len(self.params))]

    def views_of_rows(self, G: Tensor) -> list[list[Tensor]]:
        """:meth:`views` of each row of G [K, m]."""
        return [self.views(row) for row in G]

    def flatten(self, tensors: Sequence[Tensor], *, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor per parameter -> one flat vector [m]."""
        flat = torch.empty(self.numel, dtype=dtype or self.dtype, device=self.device)
        for k, tensor in enumerate(tensors):
            self.view(flat, k).copy_(local(tensor))
        return flat

    def buffer(self, rows: int, out: Tensor | None = None) -> Tensor:
        """A [rows, m] buffer: ``out`` where it fits, else a new one."""
        if out is not None and out.shape == (rows, self.numel) and out.dtype == self.dtype:
            return out
        return torch.empty(rows, self.numel, dtype=self.dtype, device=self.device)


def _fills_its_memory(p: Tensor) -> bool:
    """Whether p's entries occupy p.numel() adjacent places, in whatever order."""
    expected = 1
    for stride, size in sorted((st, n) for st, n in zip(p.stride(), p.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True

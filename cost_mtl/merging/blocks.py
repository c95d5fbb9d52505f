"""Blocks (one parameter tensor each): lazily computed mappings, and the few operations done on each block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cost_mtl._validation import is_number
from cost_mtl.merging.source import TensorInfo

__all__ = [
    "LazyBlocks",
    "add_block",
    "all_finite",
    "check_real",
    "checked_factor",
    "compute_dtype",
    "converted",
    "dot",
    "shape_of",
    "subtract",
    "weighted_sum",
]

_CHUNK = 1 << 20
"""Elements converted to float64 at a time in :func:`dot`: 8 MiB."""


class LazyBlocks(Mapping[str, Tensor]):
    """A mapping block -> tensor whose values are computed at each access and never kept.

    Args:
        infos: block -> shape and dtype of what ``compute`` returns.
        compute: block -> tensor.
    """

    def __init__(self, infos: Mapping[str, TensorInfo], compute: Callable[[str], Tensor]) -> None:
        self.infos = dict(infos)
        self._compute = compute

    def __getitem__(self, block: str) -> Tensor:
        if block not in self.infos:
            raise KeyError(block)
        return self._compute(block)

    def __contains__(self, block: object) -> bool:  # Mapping's own would compute the block
        return block in self.infos

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)


def checked_factor(value: float, name: str) -> float:
    """The factor as a float.

    Raises:
        ValueError: it is not finite, or too large for float32; ``name`` says which argument it is.
    """
    if not is_number(value) or not abs(value) <= torch.finfo(torch.float32).max:  # False for NaN
        raise ValueError(f"{name}: expected a finite number that float32 can hold, got {value!r}")
    return float(value)


def shape_of(blocks: Mapping[str, Tensor], block: str) -> TensorInfo:
    """Shape and dtype of a block, without computing it where it is lazy."""
    if isinstance(blocks, LazyBlocks):
        return blocks.infos[block]
    return TensorInfo(tuple(blocks[block].shape), blocks[block].dtype)


def compute_dtype(*dtypes: torch.dtype, label: str) -> torch.dtype:
    """The dtype to compute in: float32, or wider where the models are (float64, complex).

    A subtraction in bfloat16 loses everything below 1/256 of the weight, and task vectors are that small.

    Raises:
        ValueError: one of them is an integer or an 8-bit float, or some are complex and others are not; ``label`` says
            of what.
    """
    if len({dtype.is_complex for dtype in dtypes}) > 1:
        raise ValueError(f"{label}: expected all weights real or all complex, got {', '.join(map(str, dtypes))}")
    result = torch.float32
    for dtype in dtypes:
        if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
            raise ValueError(
                f"{label}: expected floating-point weights of at least 16 bits, got {dtype}: dequantise them first"
            )
        result = torch.promote_types(result, dtype)
    return result


def check_real(dtype: torch.dtype, label: str) -> None:
    """Raises ValueError for complex weights, where a method has no meaning for them."""
    if dtype.is_complex:
        raise ValueError(f"{label}: expected real weights, got {dtype}")


def subtract(finetuned: Tensor, base: Tensor, label: str) -> Tensor:
    """τ = finetuned − base in :func:`compute_dtype`, on the base's device.

    Raises:
        ValueError: the difference is not finite; ``label`` says of what.
    """
    dtype = compute_dtype(finetuned.dtype, base.dtype, label=label)
    # In place, and the base widened element by element: one tensor more in memory, not three.
    tau = finetuned.to(base.device, dtype, copy=True).sub_(base)
    if not all_finite(tau):
        where = "the fine-tuned model" if all_finite(base) else "the base"
        raise ValueError(f"{label}: expected a finite difference, got NaN or infinity in {where}, or an overflow")
    return tau


def add_block(base: Tensor, tau: Tensor, scale: float, label: str, dtype: torch.dtype | None = None) -> Tensor:
    """base + scale τ, computed in :func:`compute_dtype` and returned in ``dtype`` (default: the base's).

    Raises:
        ValueError: shapes differ, or the sum is not finite in that dtype; ``label`` says of what.
    """
    if base.shape != tau.shape:
        raise ValueError(
            f"{label}: expected the base's shape {list(base.shape)}, got {list(tau.shape)} in the task vector"
        )
    compute_dtype(base.dtype, tau.dtype, dtype or base.dtype, label=label)
    # torch computes in the wider of the two dtypes, which is a vector's.
    result = torch.add(base, tau.to(base.device), alpha=scale).to(dtype or base.dtype)
    if not all_finite(result):
        raise ValueError(
            f"{label}: expected finite merged weights, got NaN or infinity in {result.dtype} (scale {scale:g})"
        )
    return result


def converted(tensor: Tensor, dtype: torch.dtype, label: str) -> Tensor:
    """A copy in another dtype.

    Raises:
        ValueError: it is not finite there although it was, or one of the two dtypes is complex; ``label`` says of what.
    """
    if dtype == tensor.dtype:
        return tensor.clone()
    compute_dtype(tensor.dtype, dtype, label=label)
    result = tensor.to(dtype)
    if not all_finite(result) and all_finite(tensor):
        raise ValueError(f"{label}: expected weights that are finite in {dtype}, got an overflow")
    return result


def weighted_sum(terms: Iterable[tuple[float, Tensor]], infos: Sequence[TensorInfo], label: str) -> Tensor:
    """Σ w τ over one block, added up in place, so that two tensors are held whatever the number of terms.

    Args:
        terms: weights and tensors, at least one, produced one at a time.
        infos: shapes and dtypes of the tensors.
        label: what errors call the block.
    """
    shapes = {info.shape for info in infos}
    if len(shapes) > 1:
        raise ValueError(f"{label}: expected task vectors of one shape, got {sorted(map(list, shapes))}")
    dtype = compute_dtype(*(info.dtype for info in infos), label=label)
    total: Tensor | None = None
    for weight, tensor in terms:
        if total is None:
            total = tensor.to(dtype, copy=True).mul_(weight)
        else:
            total.add_(tensor.to(total.device), alpha=weight)
        del tensor  # or it would be kept while the next one is computed
    if total is None:
        raise ValueError(f"{label}: expected at least one task vector, got none")
    return total


def all_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity; without the copies that ``isfinite`` makes."""
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(_as_real(tensor))  # NaN if there is one
    return math.isfinite(float(low)) and math.isfinite(float(high))


def dot(a: Tensor, b: Tensor) -> float:
    """Inner product of two tensors of one shape, in float64 (real part of ⟨a, b⟩ for complex ones).

    One float32 dot product over millions of elements is off by some 0.5 %; chunks in float64 are not, and cost 8 MiB.
    """
    total = 0.0
    flat_a, flat_b = _as_real(a).reshape(-1), _as_real(b).reshape(-1)
    for start in range(0, flat_a.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        total += float(torch.dot(flat_a[part].double(), flat_b[part].to(flat_a.device).double()))
    return total


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor

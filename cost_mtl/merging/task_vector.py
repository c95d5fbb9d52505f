"""Task vectors: τ = θ − θ_pre of one fine-tuning, and their arithmetic (Ilharco et al., 2023, arXiv 2212.04089)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from cost_mtl.merging.apply import apply_vector
from cost_mtl.merging.blocks import LazyBlocks, checked_factor, compute_dtype, dot, shape_of, weighted_sum
from cost_mtl.merging.difference import difference
from cost_mtl.merging.fields import HasFields
from cost_mtl.merging.fingerprint import BaseDigests
from cost_mtl.merging.keys import KeyPolicy
from cost_mtl.merging.opening import open_source
from cost_mtl.merging.source import Model, TensorInfo, TensorSource
from cost_mtl.merging.statistics import BufferPolicy
from cost_mtl.merging.storage import load_vector, save_vector

__all__ = ["TaskVector", "combine", "gram"]


class TaskVector:
    """τ = θ − θ_pre, one tensor ("block") per weight.

    Computed in float32 (float64 for float64 models), whatever the models' dtype. With a module or state_dict the
    blocks are computed at once; from files alone they are computed at each access, tensor by tensor, and so are sums
    and multiples of such vectors: see :meth:`materialize`.

    Exactness. ``base + (finetuned - base)`` is the fine-tuned model bit for bit for bfloat16 and float16 models as
    long as the two values of each weight are within a factor 2^15 or 2^12 of each other (the float32 difference is
    then exact), and for float32 models where they are within a factor of 2; elsewhere it is off by at most one
    rounding of the larger value. The same holds for applying and subtracting a vector again.

    Args:
        base: θ_pre: a module, a state_dict, or the path of a safetensors checkpoint.
        finetuned: θ: the same, or a PEFT LoRA adapter (its folder, or a PeftModel) trained on ``base``.
        keys: "strict" (default: the key sets must be equal, since a key that differs is most often a mistake),
            "intersection" or "union", see :func:`cost_mtl.merging.keys.match_keys`. An adapter needs none of these.
        exclude: shell patterns of keys to leave alone, for example heads of different size (``["head.*"]``).
        name: what errors call the fine-tuned model.

    Raises:
        TypeError, ValueError, FileNotFoundError: the models can't be read, or don't belong together; the message
            names the model and the key.

    Attributes:
        blocks: block -> tensor. Tied weights are one block, under the name that comes first in the base.
        added: blocks that the base lacks, with the fine-tuned model's dtype (``keys="union"`` only).
        base_digests: block -> digest of the base's values; from files computed, and kept, at first use.
        statistics: BatchNorm's running statistics of every fine-tuned model that went in; no part of the arithmetic.
        origins: files and folders that were read for it, which :meth:`save` and merges never overwrite.

    Example:
        >>> base, tuned = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([2.0, 4.0])}
        >>> tau = TaskVector(base, tuned)
        >>> tau.norms()
        {'w': 2.23606797749979}
        >>> (0.5 * tau).apply_to(base)
        {'w': tensor([1.5000, 3.0000])}
    """

    blocks: Mapping[str, Tensor]
    added: Mapping[str, torch.dtype]
    base_digests: BaseDigests
    statistics: tuple[Mapping[str, Tensor], ...]
    origins: frozenset[Path] = frozenset()  # what vectors pickled by earlier versions have

    __array_ufunc__ = None  # NumPy scalars leave ``scalar * vector`` to __rmul__

    def __init__(
        self,
        base: Model | TensorSource,
        finetuned: Model | TensorSource,
        *,
        keys: KeyPolicy = "strict",
        exclude: Sequence[str] = (),
        name: str = "finetuned",
    ) -> None:
        self._take(difference(open_source(base, "base"), finetuned, keys, exclude, name))

    def _take(self, fields: HasFields) -> None:
        self.blocks, self.base_digests, self.added = fields.blocks, fields.base_digests, fields.added
        self.statistics, self.origins = fields.statistics, fields.origins

    @classmethod
    def from_blocks(
        cls,
        blocks: Mapping[str, Tensor],
        *,
        like: TaskVector | None = None,
        added: Mapping[str, torch.dtype] | None = None,
        base_digests: BaseDigests | None = None,
        statistics: tuple[Mapping[str, Tensor], ...] = (),
        origins: frozenset[Path] = frozenset(),
    ) -> TaskVector:
        """A vector from its blocks.

        Args:
            blocks: block -> tensor; not copied.
            like: a vector of the same base, whose ``added``, ``base_digests``, ``statistics`` and ``origins`` are taken
                over.
            added, base_digests, statistics, origins: these, where no ``like`` is given.
        """
        if not blocks:
            raise ValueError("blocks: expected at least one block, got none")
        vector = cls.__new__(cls)
        vector.blocks = blocks
        vector.added = dict(like.added if like else added or {})
        vector.base_digests = like.base_digests if like else base_digests or BaseDigests()
        vector.statistics = like.statistics if like else statistics
        vector.origins = like.origins if like else origins
        return vector

    @property
    def base_hash(self) -> str:
        """One hash of all the base's blocks that the vector changes."""
        return self.base_digests.combined()

    def without_base(self) -> TaskVector:
        """The same vector without the memory of its base, for arithmetic across different bases."""
        return TaskVector.from_blocks(self.blocks, added=self.added, statistics=self.statistics, origins=self.origins)

    # -------------------------------------------------------------------------------------------- arithmetic

    def __add__(self, other: TaskVector) -> TaskVector:
        return combine([self, other], [1.0, 1.0]) if isinstance(other, TaskVector) else NotImplemented

    def __radd__(self, other: object) -> TaskVector:
        return self if other == 0 else NotImplemented  # sum() starts with 0

    def __sub__(self, other: TaskVector) -> TaskVector:
        return combine([self, other], [1.0, -1.0]) if isinstance(other, TaskVector) else NotImplemented

    def __neg__(self) -> TaskVector:
        return self.map_blocks(lambda _, tau: -tau)

    def __mul__(self, scale: float) -> TaskVector:
        if not isinstance(scale, Real):
            return NotImplemented
        factor = checked_factor(scale, "scale")
        return self.map_blocks(lambda _, tau: tau * factor)

    __rmul__ = __mul__

    def __truediv__(self, scale: float) -> TaskVector:
        if not isinstance(scale, Real):
            return NotImplemented
        divisor = checked_factor(scale, "divisor")
        if divisor == 0:
            raise ZeroDivisionError("divisor: expected a number other than 0, got 0")
        return self.map_blocks(lambda _, tau: tau / divisor)

    def scale_blocks(self, coefficients: Mapping[str, float]) -> TaskVector:
        """Λ τ: each block times its coefficient.

        Args:
            coefficients: block -> coefficient, for every block.

        Raises:
            ValueError: a block has no coefficient, or a coefficient no block.
        """
        wrong = sorted(set(coefficients) ^ set(self.blocks))
        if wrong:
            raise ValueError(
                f"coefficients: expected one for each block of the vector, got {wrong[0]!r} in only one of the two"
            )
        factors = {block: checked_factor(value, f"coefficients[{block!r}]") for block, value in coefficients.items()}
        return self.map_blocks(lambda block, tau: tau * factors[block])

    def map_blocks(self, function: Callable[[str, Tensor], Tensor]) -> TaskVector:
        """A vector of ``function(block, tensor)``, shape and dtype kept: lazily where this vector is lazy."""
        if not isinstance(self.blocks, LazyBlocks):
            return TaskVector.from_blocks({b: function(b, tau) for b, tau in self.blocks.items()}, like=self)
        blocks = self.blocks
        return TaskVector.from_blocks(LazyBlocks(blocks.infos, lambda b: function(b, blocks[b])), like=self)

    def select(self, keep: Callable[[str], bool]) -> TaskVector:
        """The vector of those blocks for which ``keep(block)`` holds."""
        chosen = [block for block in self.blocks if keep(block)]
        if isinstance(self.blocks, LazyBlocks):
            blocks = self.blocks
            lazy = LazyBlocks({block: blocks.infos[block] for block in chosen}, blocks.__getitem__)
            return TaskVector.from_blocks(lazy, like=self)
        return TaskVector.from_blocks({block: self.blocks[block] for block in chosen}, like=self)

    def materialize(self) -> TaskVector:
        """The same vector with all blocks in memory."""
        return TaskVector.from_blocks(dict(self.blocks), like=self)

    # -------------------------------------------------------------------------------------------- measures

    def norms(self) -> dict[str, float]:
        """Block -> Euclidean norm."""
        return {block: dot(tau, tau) ** 0.5 for block, tau in self.blocks.items()}

    def norm(self) -> float:
        """Euclidean norm over all blocks, summed in float64."""
        return float(sum(value**2 for value in self.norms().values()) ** 0.5)

    def cosine(self, other: TaskVector) -> float:
        """cos(τ, τ'); 0 where one of them is zero. Blocks that only one has count as zero in the other."""
        matrix = gram([self, other])
        norms = float(matrix[0, 0].sqrt() * matrix[1, 1].sqrt())
        return float(matrix[0, 1]) / norms if norms else 0.0

    # -------------------------------------------------------------------------------------------- use

    @overload
    def apply_to(
        self,
        base: nn.Module,
        scale: float = ...,
        *,
        buffers: BufferPolicy = ...,
        batches: Iterable[Any] | None = ...,
    ) -> nn.Module: ...
    @overload
    def apply_to(
        self, base: Mapping[str, Tensor] | str | os.PathLike[str], scale: float = ..., *, buffers: BufferPolicy = ...
    ) -> dict[str, Tensor]: ...
    def apply_to(
        self,
        base: Model,
        scale: float = 1.0,
        *,
        buffers: BufferPolicy = "keep",
        batches: Iterable[Any] | None = None,
    ) -> nn.Module | dict[str, Tensor]:
        """θ = base + scale τ, in the base's dtypes and on its devices; ``base`` itself is not changed.

        Args:
            base: a module gives a new module, a state_dict or a path a new state_dict.
            scale: the factor; −1 takes the vector off again, or unlearns the task.
            buffers: BatchNorm's running statistics: "keep" the base's (default, with a warning when the fine-tuned
                models' differ), "average" the fine-tuned models', or "recalibrate" them on ``batches``.
            batches: inputs for "recalibrate", which needs a module.

        Raises:
            ValueError: a block is not in the base or has another shape there, or the result is not finite.
        """
        return apply_vector(base, self, scale, buffers, batches)

    def save(self, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, overwrite: bool = False) -> None:
        """Writes the vector, with its base's digests, to a safetensors file or (path without suffix) to shards.

        See :func:`cost_mtl.merging.storage.save_vector`.
        """
        save_vector(self, path, dtype=dtype, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, base: Model | None) -> TaskVector:
        """Reads a saved vector, and checks that it was taken from ``base`` (None: no check).

        See :func:`cost_mtl.merging.storage.load_vector`.
        """
        vector = cls.__new__(cls)
        vector._take(load_vector(path, base=base))
        return vector

    def __len__(self) -> int:
        return len(self.blocks)

    def __repr__(self) -> str:
        numel = sum(torch.Size(shape_of(self.blocks, block).shape).numel() for block in self.blocks)
        kind = "computed at access" if isinstance(self.blocks, LazyBlocks) else "in memory"
        return f"TaskVector({len(self)} blocks, {numel:,} weights, {kind})"


def combine(vectors: Sequence[TaskVector], weights: Sequence[float]) -> TaskVector:
    """Σ w_i τ_i; blocks that a vector lacks count as zero in it.

    Lazy where one of the vectors is, and then two tensors of one block at a time are in memory, whatever T.

    Raises:
        ValueError: no vectors, not one weight for each, different shapes, or vectors of different bases (use
            :meth:`TaskVector.without_base` where that is meant).

    Example:
        >>> one = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
        >>> two = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([4.0, -1.0, 1.0, 0.0])})
        >>> combine([one, two], [1.0, 0.5]).blocks["w"]
        tensor([3.0000, 1.5000, 3.5000, 4.0000])
    """
    if not vectors:
        raise ValueError("vectors: expected at least one task vector, got none")
    if len(weights) != len(vectors):
        raise ValueError(f"weights: expected one for each of the {len(vectors)} vectors, got {len(weights)}")
    holders: dict[str, list[tuple[float, TaskVector]]] = {}
    for weight, vector in zip(weights, vectors, strict=True):
        factor = checked_factor(weight, "weights")
        for block in vector.blocks:
            holders.setdefault(block, []).append((factor, vector))

    def compute(block: str) -> Tensor:
        infos = [shape_of(vector.blocks, block) for _, vector in holders[block]]
        return weighted_sum(((w, v.blocks[block]) for w, v in holders[block]), infos, repr(block))

    base_digests = BaseDigests.merged([vector.base_digests for vector in vectors])
    added = {block: dtype for vector in vectors for block, dtype in vector.added.items()}
    statistics = tuple(entry for vector in vectors for entry in vector.statistics)
    origins = frozenset(path for vector in vectors for path in vector.origins)
    blocks: Mapping[str, Tensor]
    if any(isinstance(vector.blocks, LazyBlocks) for vector in vectors):
        blocks = LazyBlocks({block: _result_info(block, holding) for block, holding in holders.items()}, compute)
    else:
        blocks = {block: compute(block) for block in holders}
    return TaskVector.from_blocks(
        blocks, added=added, base_digests=base_digests, statistics=statistics, origins=origins
    )


def _result_info(block: str, holding: Sequence[tuple[float, TaskVector]]) -> TensorInfo:
    infos = [shape_of(vector.blocks, block) for _, vector in holding]
    return TensorInfo(infos[0].shape, compute_dtype(*(info.dtype for info in infos), label=repr(block)))


def gram(vectors: Sequence[TaskVector]) -> Tensor:
    """Inner products ⟨τ_i, τ_j⟩ [T, T], float64, summed block by block (T tensors of one block in memory).

    Example:
        >>> one = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
        >>> two = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([4.0, -1.0, 1.0, 0.0])})
        >>> gram([one, two])
        tensor([[30.,  5.],
                [ 5., 18.]], dtype=torch.float64)
    """
    if not vectors:
        raise ValueError("vectors: expected at least one task vector, got none")
    result = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for block in dict.fromkeys(block for vector in vectors for block in vector.blocks):
        taus = {i: vector.blocks[block] for i, vector in enumerate(vectors) if block in vector.blocks}
        if len({tau.shape for tau in taus.values()}) > 1:
            raise ValueError(
                f"{block!r}: expected task vectors of one shape, got {sorted({tuple(t.shape) for t in taus.values()})}"
            )
        for i, tau in taus.items():
            for j in taus:
                if j <= i:
                    result[i, j] += dot(tau, taus[j])
    return result + result.tril(-1).T

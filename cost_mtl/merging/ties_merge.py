"""TIES: trim, elect sign, merge (Yadav et al., 2023, arXiv 2306.01708), computed by peft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cost_mtl._validation import share
from cost_mtl.merging.blocks import LazyBlocks, check_real, checked_factor, compute_dtype, shape_of
from cost_mtl.merging.fingerprint import BaseDigests
from cost_mtl.merging.source import TensorInfo
from cost_mtl.merging.task_vector import TaskVector

__all__ = ["ties"]


def ties(vectors: Sequence[TaskVector], density: float = 0.2, weights: Sequence[float] | None = None) -> TaskVector:
    """One task vector: the mean of the trimmed values whose sign is the elected one, weight by weight.

    Differs from the paper in that the trimming keeps the largest ``density`` of each block rather than of the whole
    vector (peft's ``merge_utils.ties``; a block of fewer than 1/density weights is trimmed away). All T vectors' values
    of one block are in memory at once, several times over.

    Args:
        vectors: T task vectors of one base. A block that one lacks counts as zero, which has no sign.
        density: share of the weights kept, in (0, 1]; default 0.2, as published.
        weights: one factor per vector, applied after the election; default all 1.

    Raises:
        ValueError: no vectors, a density out of range, not one weight per vector, or vectors of different bases.

    Example:
        >>> one = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
        >>> two = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([4.0, -2.0, 1.0, 0.0])})
        >>> ties([one, two], density=0.5).blocks["w"]
        tensor([ 4., -2.,  3.,  4.])
    """
    check_density(density)
    if not vectors:
        raise ValueError("vectors: expected at least one task vector, got none")
    factors = torch.tensor([1.0] * len(vectors) if weights is None else [checked_factor(w, "weights") for w in weights])
    if factors.shape != (len(vectors),):
        raise ValueError(f"weights: expected one for each of the {len(vectors)} vectors, got {len(factors)}")
    infos = _infos(vectors)

    def compute(block: str) -> Tensor:
        from peft.utils.merge_utils import ties as peft_ties  # heavy, and only some merges need it

        info = infos[block]
        taus = [
            v.blocks[block].to(info.dtype) if block in v.blocks else torch.zeros(info.shape, dtype=info.dtype)
            for v in vectors
        ]
        taus = [tau.to(taus[0].device) for tau in taus]
        if density == 1:  # peft keeps all then too, and warns
            return _elected_mean(torch.stack(taus), factors.to(taus[0]))
        merged: Tensor = peft_ties(taus, factors.to(taus[0]), density)
        return merged

    blocks: Mapping[str, Tensor] = LazyBlocks(infos, compute)
    if not any(isinstance(vector.blocks, LazyBlocks) for vector in vectors):
        blocks = dict(blocks)
    return TaskVector.from_blocks(
        blocks,
        added={block: dtype for vector in vectors for block, dtype in vector.added.items()},
        base_digests=BaseDigests.merged([vector.base_digests for vector in vectors]),
        statistics=tuple(entry for vector in vectors for entry in vector.statistics),
        origins=frozenset(path for vector in vectors for path in vector.origins),
    )


def check_density(density: float) -> None:
    """Raises ValueError unless 0 < density <= 1."""
    share("density", density, zero=False)


def _elected_mean(taus: Tensor, weights: Tensor) -> Tensor:
    from peft.utils.merge_utils import calculate_majority_sign_mask, disjoint_merge, reshape_weight_task_tensors

    mask = calculate_majority_sign_mask(taus)
    merged: Tensor = disjoint_merge(taus * reshape_weight_task_tensors(taus, weights), mask)
    return merged


def _infos(vectors: Sequence[TaskVector]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    for vector in vectors:
        for block in vector.blocks:
            info = shape_of(vector.blocks, block)
            known = infos.setdefault(block, info)
            if known.shape != info.shape:
                raise ValueError(f"{block!r}: expected task vectors of one shape, got {known.shape} and {info.shape}")
            check_real(info.dtype, repr(block))
            infos[block] = TensorInfo(info.shape, compute_dtype(known.dtype, info.dtype, label=repr(block)))
    return infos

"""Rank pruning: learning which singular directions of each task vector to merge (AdaRank, Lee et al., 2025,
arXiv 2503.22178)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cost_mtl._validation import finite, share
from cost_mtl.merging.blocks import check_real
from cost_mtl.merging.merged_model import MergedModel
from cost_mtl.merging.task_vector import TaskVector

__all__ = ["RankPruning"]

_MARGIN = 0.1
"""Scores start at ±0.1, as in the public code: ten steps of Adam at 0.01 flip one."""


@dataclass(frozen=True)
class _Decomposed:
    """The vectors' values of one matrix: rows [n] of the scores, U [n, o, r], S [n, r], Vᵀ [n, r, i]."""

    rows: slice | list[int]
    u: Tensor
    s: Tensor
    vt: Tensor


class RankPruning(MergedModel):
    """θ_pre + Σ_t λ_tb U (m ∘ S) Vᵀ for each matrix, with τ_t = U S Vᵀ and binary masks m; θ_pre + Σ_t λ_tb τ_t for
    biases and norms.

    Masks m = 1[score > 0] are learned through the straight-through estimator, as if m were sigmoid(score); the λ are
    learned too. The published objective is the entropy of the outputs at test time: ``fit`` with
    :func:`cost_mtl.merging.entropy`. A convolution counts as the matrix [out, in · kernel].

    Differs from the public code in that all parameters with two or more dimensions are decomposed, not only those of
    attention and MLP layers. The singular vectors take up to twice the memory of the T task vectors.

    Args:
        model: at θ_pre, see :class:`MergedModel`.
        vectors: T task vectors.
        scale: start of all λ; default 0.3, the usual scale of task arithmetic.
        keep: share of the singular directions, largest first, that are in the merge at the start; default 1, all.

    Raises:
        ValueError: no vectors, a block that the model lacks, other shapes, or ``keep`` out of range.

    Attributes:
        coefficients: λ [T, B], float32; columns in the order of ``blocks``.
        scores: one parameter [T, r_b] per decomposed block, in the order of ``matrices``.
        matrices: the names of the decomposed blocks.

    Example:
        >>> base, one, two = (nn.Linear(2, 1) for _ in range(3))
        >>> vectors = [TaskVector(base, one), TaskVector(base, two)]
        >>> pruning = RankPruning(base, vectors, keep=1.0)
        >>> pruning.ranks()
        {'weight': [1, 1]}
        >>> merged = pruning.merged_model()
    """

    def __init__(
        self, model: nn.Module, vectors: Sequence[TaskVector], *, scale: float = 0.3, keep: float = 1.0
    ) -> None:
        super().__init__(model, vectors)
        finite("scale", scale)
        share("keep", keep, zero=True)
        device = self._base[self.blocks[0]].device
        self.coefficients = nn.Parameter(torch.full((len(vectors), len(self.blocks)), float(scale), device=device))
        self.matrices = tuple(block for block in self.blocks if self._base[block].dim() > 1)
        self._column = {block: number for number, block in enumerate(self.blocks)}
        self._plain: dict[str, tuple[slice | list[int], Tensor]] = {}
        self._decomposed: dict[str, _Decomposed] = {}
        for block in self.blocks:
            rows, taus = self._stacked(block, vectors)
            check_real(taus.dtype, repr(block))
            if block in self.matrices:
                u, s, vt = torch.linalg.svd(taus.flatten(2), full_matrices=False)
                self._decomposed[block] = _Decomposed(rows, u, s, vt)
            else:
                self._plain[block] = rows, taus
        self.scores = nn.ParameterList(
            _initial_scores(len(vectors), self._decomposed[block].s.shape[-1], keep, device) for block in self.matrices
        )
        self._score_of = dict(zip(self.matrices, range(len(self.matrices)), strict=True))

    def mask(self, block: str) -> Tensor:
        """m [T, r] of a matrix: 0 or 1 in value, sigmoid in gradient."""
        score: Tensor = self.scores[self._score_of[block]]
        soft = score.sigmoid()
        hard = (score > 0).to(soft)
        return hard + (soft - soft.detach())  # the bracket is exactly zero

    def ranks(self) -> dict[str, list[int]]:
        """Decomposed block -> number of singular directions kept, per task vector."""
        return {block: [int(row.sum()) for row in self.mask(block).detach()] for block in self.matrices}

    def merged_block(self, block: str) -> Tensor:
        base = self._base[block]
        if block in self._plain:
            rows, taus = self._plain[block]
            weights = self.coefficients[rows, self._column[block]].to(taus)
            change: Tensor = torch.tensordot(weights, taus, dims=1)
            return base.to(change.dtype) + change
        parts = self._decomposed[block]
        weights = self.coefficients[parts.rows, self._column[block]].to(parts.s)
        kept = weights.unsqueeze(1) * self.mask(block)[parts.rows].to(parts.s) * parts.s
        change = torch.einsum("tor,tr,tri->oi", parts.u, kept, parts.vt)
        return base.to(change.dtype) + change.view(base.shape)


def _initial_scores(tasks: int, rank: int, keep: float, device: torch.device) -> nn.Parameter:
    scores = torch.full((tasks, rank), -_MARGIN, device=device)
    scores[:, : round(keep * rank)] = _MARGIN
    return nn.Parameter(scores)

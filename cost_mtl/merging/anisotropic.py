"""Anisotropic scaling: one learned coefficient per task vector and block (aTLAS, Zhang et al., 2024,
arXiv 2407.02880)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from cost_mtl._validation import finite, one_of
from cost_mtl.merging.fingerprint import BaseDigests
from cost_mtl.merging.merged_model import MergedModel
from cost_mtl.merging.task_vector import TaskVector

__all__ = ["AnisotropicScaling"]


class AnisotropicScaling(MergedModel):
    """θ_pre + Σ_t Λ_t τ_t, with Λ_t one coefficient per block.

    With all coefficients equal to α it is task arithmetic (to float32 rounding). It holds the T vectors in float32
    beside the model, and in each evaluation one more copy of the model's weights.

    ::

        scaling = AnisotropicScaling(model, [tau_1, tau_2])
        report = scaling.fit(loss, train, held_out)      # or your own training loop over scaling.parameters()
        merged = scaling.merged_model()

    Args:
        model: at θ_pre, see :class:`MergedModel`.
        vectors: T task vectors.
        init: start of the coefficients: a number (default 0: the pre-trained model, as published), or [T, B].
        granularity: "block" (default) learns [T, B] coefficients; "vector" learns one per vector [T, 1], which is task
            arithmetic with learned α_t.

    Raises:
        ValueError: no vectors, a block that the model lacks, other shapes, or ``init`` of another shape.

    Attributes:
        coefficients: the parameter [T, B] or [T, 1], float32; columns in the order of ``blocks``.

    Example:
        >>> base, one, two = (nn.Linear(2, 1) for _ in range(3))
        >>> vectors = [TaskVector(base, one), TaskVector(base, two)]
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean()
        >>> train, held_out = ([(torch.randn(16, 2), torch.randn(16, 1))] for _ in range(2))
        >>> scaling = AnisotropicScaling(base, vectors)
        >>> report = scaling.fit(loss, train, held_out)
        >>> scaling.coefficients.shape, report.best <= report.starts[0]
        (torch.Size([2, 2]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        vectors: Sequence[TaskVector],
        *,
        init: float | Tensor = 0.0,
        granularity: Literal["block", "vector"] = "block",
    ) -> None:
        super().__init__(model, vectors)
        one_of("granularity", granularity, ("block", "vector"))
        shape = (len(vectors), len(self.blocks) if granularity == "block" else 1)
        if not isinstance(init, Tensor):
            finite("init", init)
        elif tuple(init.shape) != shape:
            raise ValueError(f"init: expected a number or shape {list(shape)}, got {list(init.shape)}")
        elif not bool(torch.isfinite(init).all()):
            raise ValueError(f"init: expected finite numbers, got {init.tolist()}")
        values = init.detach().float() if isinstance(init, Tensor) else torch.full(shape, float(init))
        self.coefficients = nn.Parameter(values.to(self._base[self.blocks[0]].device, copy=True))
        self._column = {block: number if granularity == "block" else 0 for number, block in enumerate(self.blocks)}
        self._taus = {block: self._stacked(block, vectors) for block in self.blocks}
        self._digests = [vector.base_digests for vector in vectors]
        self._origins = frozenset(path for vector in vectors for path in vector.origins)

    def change(self, block: str) -> Tensor:
        """Σ_t Λ_t τ_t of one block."""
        rows, taus = self._taus[block]
        change: Tensor = torch.tensordot(self.coefficients[rows, self._column[block]].to(taus), taus, dims=1)
        return change

    def merged_block(self, block: str) -> Tensor:
        change = self.change(block)
        return self._base[block].to(change.dtype) + change

    def starting_points(self) -> list[list[Tensor]]:
        """The coefficients as they are, and zero: a fit can only improve on θ_pre."""
        points = super().starting_points()
        zero = torch.zeros_like(points[0][0])
        return points if torch.equal(points[0][0], zero) else [*points, [zero]]

    @torch.no_grad()
    def vector(self) -> TaskVector:
        """Σ_t Λ_t τ_t as one task vector, to be saved, or added up with others."""
        blocks = {block: self.change(block) for block in self.blocks}
        return TaskVector.from_blocks(blocks, base_digests=BaseDigests.merged(self._digests), origins=self._origins)

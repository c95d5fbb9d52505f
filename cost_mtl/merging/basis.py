"""Task vector bases: M < T combinations of T task vectors from which all are recovered (Zeng et al., 2025,
arXiv 2502.01015)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cost_mtl._validation import at_least, integer, one_of
from cost_mtl.merging.task_vector import TaskVector, combine, gram

__all__ = ["TaskVectorBasis"]

_STEPS = 600
_LR = 0.05


@dataclass(frozen=True)
class TaskVectorBasis:
    """M vectors b = E τ that stand for T task vectors: τ̂ = D b. Stores M vectors instead of T.

    Everything is found from the Gram matrix ⟨τ_i, τ_j⟩ [T, T]; the vectors are read once for it, and once to be
    combined.

    Attributes:
        vectors: b_1, ..., b_M, task vectors themselves.
        encoder: E [M, T], float64.
        decoder: D [T, M], float64: the least-squares one for E.
        errors: ‖τ_i − τ̂_i‖ / ‖τ_i‖ [T], float64; 0 for a zero vector.

    Example:
        >>> one = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
        >>> two = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([4.0, -1.0, 1.0, 0.0])})
        >>> basis = TaskVectorBasis.fit([one, two, one + two], 2, method="pca")  # the third is no new direction
        >>> len(basis.vectors), bool(basis.errors.max() < 1e-4)
        (2, True)
    """

    vectors: tuple[TaskVector, ...]
    encoder: Tensor
    decoder: Tensor
    errors: Tensor

    @staticmethod
    def fit(
        vectors: Sequence[TaskVector], size: int, method: Literal["softmax", "pca"] = "softmax", seed: int = 0
    ) -> TaskVectorBasis:
        """Finds a basis of ``size`` vectors.

        Args:
            vectors: T task vectors of one base.
            size: M, 1 to T.
            method: "softmax" (default, the published one): the rows of E are convex weights, so each basis vector is
                an average of task vectors, and usable as one; learned by Adam on the logits. "pca": the leading
                eigenvectors of the Gram matrix, the smallest total error there is, without that meaning.
            seed: of the logits' start ("softmax").

        Raises:
            ValueError: ``size`` or ``method`` out of range, or all vectors are zero.
        """
        one_of("method", method, ("softmax", "pca"))
        integer("seed", seed)
        at_least("size", size, 1)
        if size > len(vectors):
            raise ValueError(f"size: expected 1 to {len(vectors)} (the number of vectors), got {size}")
        products = gram(vectors)
        if not products.diagonal().any():
            raise ValueError(f"vectors: expected at least one that is not zero, got {len(vectors)} zero vectors")
        # Only ratios matter, and Adam's steps and the solver's conditioning are then those of a unit problem.
        products = products / products.diagonal().mean()
        encoder = _softmax_encoder(products, size, seed) if method == "softmax" else _pca_encoder(products, size)
        decoder = _least_squares_decoder(products, encoder)
        combined = tuple(combine(vectors, [float(weight) for weight in row]) for row in encoder)
        return TaskVectorBasis(combined, encoder, decoder, _relative_errors(products, decoder @ encoder))

    def recover(self, index: int) -> TaskVector:
        """τ̂ of the task vector with this index."""
        return combine(self.vectors, [float(weight) for weight in self.decoder[index]])

    def combine(self, weights: Sequence[float]) -> TaskVector:
        """Σ w_i τ̂_i, for one weight per original vector: arithmetic on the basis alone."""
        if len(weights) != len(self.decoder):
            raise ValueError(f"weights: expected {len(self.decoder)}, one per original vector, got {len(weights)}")
        mixed = torch.tensor(list(weights), dtype=torch.float64) @ self.decoder
        return combine(self.vectors, [float(weight) for weight in mixed])


def _pca_encoder(products: Tensor, size: int) -> Tensor:
    vectors: Tensor = torch.linalg.eigh(products).eigenvectors  # ascending
    return vectors[:, -size:].flip(1).T.contiguous()


def _softmax_encoder(products: Tensor, size: int, seed: int) -> Tensor:
    """Minimises tr((I − D E) G (I − D E)ᵀ) over the logits of E and over D."""
    generator = torch.Generator().manual_seed(seed)
    count = len(products)
    start = torch.randn(size, count, generator=generator, dtype=torch.float64) * 0.1
    # Each row starts near vectors of its own, or the rows would stay alike by symmetry.
    start[torch.arange(count) % size, torch.arange(count)] += 2.0
    logits = start.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=_LR)
    best, best_encoder = float("inf"), logits.detach().softmax(dim=1)
    for _ in range(_STEPS):
        encoder = logits.softmax(dim=1)
        loss = _residual(products, _least_squares_decoder(products, encoder) @ encoder).diagonal().sum()
        if float(loss.detach()) < best:
            best, best_encoder = float(loss.detach()), encoder.detach()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits.grad = gradient
        optimizer.step()
    return best_encoder


def _least_squares_decoder(products: Tensor, encoder: Tensor) -> Tensor:
    """D = G Eᵀ (E G Eᵀ)⁺, the best for E. The ridge keeps it finite where task vectors are multiples of each other."""
    inner = encoder @ products @ encoder.T
    ridge = 1e-12 * inner.diagonal().mean() * torch.eye(len(inner), dtype=inner.dtype)
    solution: Tensor = torch.linalg.solve(inner + ridge, encoder @ products)
    return solution.T


def _residual(products: Tensor, recovery: Tensor) -> Tensor:
    """Gram matrix of τ − τ̂, with τ̂ = (D E) τ."""
    rest = torch.eye(len(products), dtype=products.dtype) - recovery
    return rest @ products @ rest.T


def _relative_errors(products: Tensor, recovery: Tensor) -> Tensor:
    squared = _residual(products, recovery).diagonal().clamp(min=0)
    norms = products.diagonal()
    return (squared / norms.where(norms > 0, 1.0)).sqrt()

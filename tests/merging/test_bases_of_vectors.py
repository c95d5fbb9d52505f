"""Task vector bases: errors in closed form, and exact recovery where there is one."""

from __future__ import annotations

import pytest
import torch

from cost_mtl.merging import TaskVector, TaskVectorBasis, combine


def vectors_of(rows):
    """Task vectors with the given rows [T, m], in two blocks."""
    cut = rows.shape[1] // 2
    base = {"a": torch.zeros(cut), "b": torch.zeros(rows.shape[1] - cut)}
    return [TaskVector(base, {"a": row[:cut].float(), "b": row[cut:].float()}) for row in rows]


def flat(vector):
    return torch.cat([vector.blocks["a"], vector.blocks["b"]]).double()


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    directions = torch.randn(3, 40, generator=generator, dtype=torch.float64)
    return mixing @ directions + 0.1 * torch.randn(5, 40, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_pca_leaves_the_discarded_singular_values(rows, size):
    """Eckart and Young: the total squared error is the sum of the discarded squared singular values."""
    vectors = vectors_of(rows)
    basis = TaskVectorBasis.fit(vectors, size, "pca")
    error = sum(float((flat(basis.recover(i)) - row).square().sum()) for i, row in enumerate(rows))
    discarded = float(torch.linalg.svdvals(rows)[size:].square().sum())
    assert error == pytest.approx(discarded, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("method", ["softmax", "pca"])
def test_the_reported_errors_are_the_errors(rows, method):
    vectors = vectors_of(rows)
    basis = TaskVectorBasis.fit(vectors, 3, method)
    assert len(basis.vectors) == 3
    for i, row in enumerate(rows):
        error = float((flat(basis.recover(i)) - row).norm() / row.norm())
        assert error == pytest.approx(float(basis.errors[i]), abs=1e-5)
        assert 0 < error < 0.5


def test_softmax_rows_are_averages(rows):
    vectors = vectors_of(rows)
    basis = TaskVectorBasis.fit(vectors, 2)
    assert (basis.encoder >= 0).all()
    torch.testing.assert_close(basis.encoder.sum(dim=1), torch.ones(2, dtype=torch.float64))
    for vector, weights in zip(basis.vectors, basis.encoder, strict=True):
        torch.testing.assert_close(flat(vector), weights @ rows, rtol=1e-5, atol=1e-5)


def test_softmax_gets_near_the_best_there_is(rows):
    """No basis has a smaller total error than PCA's; this one may not be far above."""
    vectors = vectors_of(rows)
    best, learned = (TaskVectorBasis.fit(vectors, 3, method) for method in ("pca", "softmax"))
    norms = rows.square().sum(dim=1)
    total = {
        name: float((basis.errors.square() * norms).sum()) for name, basis in (("pca", best), ("softmax", learned))
    }
    assert total["pca"] <= total["softmax"] * (1 + 1e-9)
    assert total["softmax"] < 2 * total["pca"]


@pytest.mark.parametrize("method", ["softmax", "pca"])
def test_recovery_is_exact_for_vectors_that_span_no_more(method):
    """Five vectors in a plane, two of them multiples of each other: two basis vectors hold them all."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    rows = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0], [-1, 3]], dtype=torch.float64) @ plane
    basis = TaskVectorBasis.fit(vectors_of(rows), 2, method)
    assert float(basis.errors.max()) < 1e-4


@pytest.mark.parametrize("method", ["softmax", "pca"])
def test_arithmetic_on_the_basis_is_arithmetic_on_the_recovered_vectors(rows, method):
    basis = TaskVectorBasis.fit(vectors_of(rows), 2, method)
    weights = [0.3, -1.0, 0.0, 2.0, 0.5]
    expected = combine([basis.recover(i) for i in range(5)], weights)
    torch.testing.assert_close(flat(basis.combine(weights)), flat(expected), rtol=1e-4, atol=1e-5)


def test_a_full_basis_recovers_everything(rows):
    basis = TaskVectorBasis.fit(vectors_of(rows), 5)
    assert float(basis.errors.max()) < 1e-3


def test_the_scale_of_the_vectors_does_not_matter(rows):
    errors = [TaskVectorBasis.fit(vectors_of(rows * scale), 2).errors for scale in (1.0, 1e-4)]
    torch.testing.assert_close(*errors, rtol=1e-3, atol=1e-6)


def test_a_zero_vector_is_recovered(rows):
    rows = torch.cat([rows, torch.zeros(1, 40, dtype=torch.float64)])
    basis = TaskVectorBasis.fit(vectors_of(rows), 3, "pca")
    assert float(basis.errors[-1]) == 0
    assert float(flat(basis.recover(5)).norm()) < 1e-6


def test_wrong_settings(rows):
    vectors = vectors_of(rows)
    with pytest.raises(ValueError, match="size: expected 1 to 5"):
        TaskVectorBasis.fit(vectors, 6)
    with pytest.raises(ValueError, match="size: expected 1 to 0"):
        TaskVectorBasis.fit([], 1)
    with pytest.raises(ValueError, match="method: expected one of 'softmax', 'pca'"):
        TaskVectorBasis.fit(vectors, 2, "ica")
    with pytest.raises(ValueError, match="at least one that is not zero"):
        TaskVectorBasis.fit(vectors_of(torch.zeros(2, 40)), 1)
    with pytest.raises(ValueError, match="expected 5, one per original vector, got 2"):
        TaskVectorBasis.fit(vectors, 2).combine([1.0, 1.0])

"""RankPruning against the singular value decomposition."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from cost_mtl.merging import (
    AnisotropicScaling,
    FitSettings,
    RankPruning,
    TaskVector,
    task_arithmetic,
)
from tests.merging.learning import same_state, square_loss


def test_all_ranks_kept_is_task_arithmetic(problem):
    model, vectors, *_ = problem
    pruned = RankPruning(model, vectors, scale=0.3)
    expected = task_arithmetic(model, vectors, 0.3)
    same_state(pruned.merged_state(), expected.state_dict(), rtol=1e-4, atol=1e-5)
    assert pruned.matrices == ("0.weight", "2.weight")
    assert pruned.ranks() == {"0.weight": [5, 5], "2.weight": [3, 3]}


def test_a_share_of_the_ranks_is_the_truncated_svd(problem):
    model, vectors, *_ = problem
    pruned = RankPruning(model, vectors[:1], scale=0.7, keep=0.4)
    u, s, vt = torch.linalg.svd(vectors[0].blocks["0.weight"].double(), full_matrices=False)
    expected = model[0].weight.double() + 0.7 * (u[:, :2] * s[:2]) @ vt[:2]
    torch.testing.assert_close(pruned.merged_state()["0.weight"].double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert pruned.ranks()["0.weight"] == [2]
    bias = model[0].bias + 0.7 * vectors[0].blocks["0.bias"]
    torch.testing.assert_close(pruned.merged_state()["0.bias"], bias.detach())


def test_the_gradient_passes_straight_through(problem):
    """d merged / d score_r = λ σ'(score_r) S_r u_r v_rᵀ, although the mask itself is a step."""
    model, vectors, *_ = problem
    pruned = RankPruning(model, vectors[:1], scale=0.7)
    direction = torch.randn(6, 5, dtype=torch.float64)
    (pruned.merged_block("0.weight").double() * direction).sum().backward()
    u, s, vt = torch.linalg.svd(vectors[0].blocks["0.weight"].double(), full_matrices=False)
    slope = torch.sigmoid(torch.tensor(0.1, dtype=torch.float64))
    slope = slope * (1 - slope)
    expected = 0.7 * slope * s * torch.einsum("or,oi,ri->r", u, direction, vt)
    torch.testing.assert_close(pruned.scores[0].grad[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_masks_are_zero_or_one_and_learned(problem):
    """Data made by the merge without the first singular direction: the fit takes that direction out."""
    model, vectors, _, train, _ = problem
    truth = RankPruning(model, vectors[:1], scale=1.0)
    with torch.no_grad():
        truth.scores[0][0, 0] = -0.1
    data = [(x, truth(x).detach()) for x, _ in train]
    pruned = RankPruning(model, vectors[:1], scale=1.0)
    pruned.coefficients.requires_grad_(False)
    optimizer = torch.optim.Adam(pruned.scores.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        sum(square_loss(pruned, batch) for batch in data).backward()
        optimizer.step()
    mask = pruned.mask("0.weight").detach()
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    assert mask[0, 0] == 0
    assert mask[0, 1:3].tolist() == [1.0, 1.0]


def test_a_fit_of_ranks_is_never_worse_on_the_selection_data(problem):
    model, vectors, _, train, held_out = problem
    report = RankPruning(model, vectors).fit(square_loss, train, held_out, settings=FitSettings(max_epochs=10))
    assert report.best <= report.starts[0]


def test_convolutions_count_as_matrices(perturb):
    model = nn.Sequential(nn.Conv2d(2, 4, 3))
    tau = TaskVector(model, perturb(model, 1))
    same_state(
        RankPruning(model, [tau], scale=1.0).merged_state(), tau.apply_to(model).state_dict(), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="keep: expected a number in"):
        RankPruning(model, [tau], keep=1.5)


def test_no_warnings_in_an_ordinary_fit(problem):
    model, vectors, _, train, held_out = problem
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AnisotropicScaling(model, vectors).fit(square_loss, train, held_out, settings=FitSettings(max_epochs=2))

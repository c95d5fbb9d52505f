"""AnisotropicScaling: its equation, its gradients, and what it leaves alone."""

from __future__ import annotations

import copy

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


def test_equal_coefficients_are_task_arithmetic(problem):
    model, vectors, *_ = problem
    expected = task_arithmetic(model, vectors, 0.3)
    for granularity in ("block", "vector"):
        scaling = AnisotropicScaling(model, vectors, init=0.3, granularity=granularity)
        same_state(scaling.merged_model().state_dict(), expected.state_dict(), rtol=1e-6, atol=1e-7)
        same_state(scaling.merged_state(), expected.state_dict(), rtol=1e-6, atol=1e-7)
        x = torch.randn(3, 5)
        torch.testing.assert_close(scaling(x), expected(x))


def test_zero_coefficients_are_the_model_bit_for_bit(problem):
    model, vectors, *_ = problem
    same_state(AnisotropicScaling(model, vectors).merged_state(), model.state_dict(), rtol=0, atol=0)


def test_each_block_has_its_coefficient(problem):
    model, vectors, target, *_ = problem
    scaling = AnisotropicScaling(model, vectors, init=target)
    for column, block in enumerate(scaling.blocks):
        expected = model.state_dict()[block].double()
        for row, tau in enumerate(vectors):
            expected = expected + float(target[row, column]) * tau.blocks[block].double()
        torch.testing.assert_close(scaling.merged_state()[block].double(), expected, rtol=1e-6, atol=1e-6)


def test_gradients_are_the_inner_products_with_the_vectors(problem):
    """dL/dc[t, b] = <dL/dθ_b, τ_t,b>, the chain rule on the merged model itself."""
    model, vectors, target, train, _ = problem
    scaling = AnisotropicScaling(model, vectors, init=target + 0.1)
    square_loss(scaling, train[0]).backward()
    merged = scaling.merged_model()
    square_loss(merged, train[0]).backward()
    gradients = {name: parameter.grad for name, parameter in merged.named_parameters()}
    for column, block in enumerate(scaling.blocks):
        for row, tau in enumerate(vectors):
            expected = (gradients[block] * tau.blocks[block]).sum()
            torch.testing.assert_close(scaling.coefficients.grad[row, column], expected, rtol=1e-4, atol=1e-6)


def test_the_true_coefficients_are_found(problem):
    model, vectors, target, train, held_out = problem
    scaling = AnisotropicScaling(model, vectors)
    report = scaling.fit(
        square_loss, train, held_out, settings=FitSettings(lr=0.05, max_epochs=300, patience=50, clip=None)
    )
    assert report.best < 1e-4 * report.starts[0]
    torch.testing.assert_close(scaling.coefficients.detach(), target, rtol=0.05, atol=0.05)


def test_the_model_is_not_touched(problem):
    model, vectors, _, train, held_out = problem
    model.train()
    before = copy.deepcopy(model.state_dict())
    scaling = AnisotropicScaling(model, vectors)
    assert [name for name, _ in scaling.named_parameters()] == ["coefficients"]
    scaling.fit(square_loss, train, held_out, settings=FitSettings(max_epochs=3))
    same_state(model.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_loop_of_ones_own(problem):
    model, vectors, _, train, _ = problem
    scaling = AnisotropicScaling(model, vectors)
    optimizer = torch.optim.Adam(scaling.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = sum(square_loss(scaling, batch) for batch in train)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


def test_parameters_outside_the_vectors_are_used_as_they_are(mlp, perturb):
    tau = TaskVector(mlp, perturb(mlp, 1), exclude=["2.*"])
    scaling = AnisotropicScaling(mlp, [tau], init=1.0)
    assert scaling.blocks == ("0.weight", "0.bias")
    expected = tau.apply_to(mlp)
    x = torch.randn(3, 5)
    torch.testing.assert_close(scaling(x), expected(x))
    scaling.fit(square_loss, [(x, torch.zeros(3, 3))], [(x, torch.zeros(3, 3))], settings=FitSettings(max_epochs=2))
    assert mlp[2].weight.grad is None


def test_tied_weights_move_together(tied, perturb):
    tuned = perturb(tied, 1)
    scaling = AnisotropicScaling(tied, [TaskVector(tied, tuned)], init=1.0)
    tokens = torch.arange(7)
    torch.testing.assert_close(scaling(tokens), tuned(tokens))
    merged = scaling.merged_model()
    assert merged.head.weight is merged.embed.weight
    scaling(tokens).sum().backward()
    tuned(tokens).sum().backward()
    tau = tuned.embed.weight.detach() - tied.embed.weight.detach()
    column = scaling.blocks.index("embed.weight")
    torch.testing.assert_close(scaling.coefficients.grad[0, column], (tuned.embed.weight.grad * tau).sum())
    assert tied.head.weight is tied.embed.weight


def test_half_precision_models_keep_their_dtype(mlp, perturb):
    half = mlp.to(torch.bfloat16)
    scaling = AnisotropicScaling(half, [TaskVector(half, perturb(half, 1))], init=0.5)
    assert scaling(torch.randn(2, 5).bfloat16()).dtype == torch.bfloat16
    assert {value.dtype for value in scaling.merged_state().values()} == {torch.bfloat16}
    assert scaling.coefficients.dtype == torch.float32


def test_the_learned_change_is_a_task_vector(problem, tmp_path):
    model, vectors, target, *_ = problem
    scaling = AnisotropicScaling(model, vectors, init=target)
    tau = scaling.vector()
    same_state(tau.apply_to(model).state_dict(), scaling.merged_state())
    tau.save(tmp_path / "tau.safetensors")
    TaskVector.load(tmp_path / "tau.safetensors", base=model)


@pytest.mark.parametrize("build", [AnisotropicScaling, RankPruning])
def test_scalars_and_empty_parameters(build):
    """CLIP's logit scale has no dimension; an empty parameter has no values."""

    class Odd(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(value))
            self.nothing = nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return x * self.scale

    model = Odd(1.0)
    merged = build(model, [TaskVector(model, Odd(3.0)), TaskVector(model, Odd(5.0))])
    with torch.no_grad():
        merged.coefficients.fill_(0.5)
    assert float(merged(torch.tensor(2.0)).detach()) == 2 * (1 + 0.5 * 2 + 0.5 * 4)
    assert float(merged.merged_model().scale.detach()) == 4


def test_vectors_of_different_blocks(mlp, perturb):
    whole = TaskVector(mlp, perturb(mlp, 1))
    part = TaskVector(mlp, perturb(mlp, 2)).select(lambda block: block == "2.bias")
    scaling = AnisotropicScaling(mlp, [part, whole], init=torch.tensor([[1.0, 9, 9, 9], [0.5, 0.5, 0.5, 0.5]]))
    assert scaling.blocks[0] == "2.bias"
    same_state(scaling.merged_state(), (part + 0.5 * whole).apply_to(mlp.state_dict()))

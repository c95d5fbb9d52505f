"""Learned merges: AnisotropicScaling, RankPruning, and how their coefficients are fitted."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from cost_mtl.merging import (
    AnisotropicScaling,
    FitSettings,
    RankPruning,
    TaskVector,
    entropy,
    negation_loss,
    task_arithmetic,
)


def square_loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


@pytest.fixture
def problem(mlp, perturb):
    """A model, two task vectors, and data that a certain scaling of them explains exactly."""
    vectors = [TaskVector(mlp, perturb(mlp, seed, 0.5)) for seed in (1, 2)]
    blocks = list(vectors[0].blocks)
    target = torch.tensor([[0.9, 0.2, 0.5, 0.7], [0.1, 0.8, 0.3, -0.4]])
    truth = AnisotropicScaling(mlp, vectors, init=target).merged_model()
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(40, 5, generator=generator) for _ in range(4)]
    batches = [(x, truth(x).detach()) for x in inputs]
    assert len(blocks) == 4
    return mlp, vectors, target, batches[:3], batches[3:]


def same_state(first, second, **tolerance):
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], **tolerance)


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


# ------------------------------------------------------------------------------------------------ the fit


def test_the_best_coefficients_are_kept_not_the_last(problem):
    """Selection data made with a third of the coefficients: training passes by there, and goes on."""
    model, vectors, target, train, _ = problem
    nearer = AnisotropicScaling(model, vectors, init=target / 3)
    held_out = [(x, nearer(x).detach()) for x, _ in train]
    scaling = AnisotropicScaling(model, vectors)
    report = scaling.fit(square_loss, train, held_out, settings=FitSettings(lr=0.05, max_epochs=30, patience=30))
    assert report.selection[-1] > 1.5 * report.best
    assert report.best == min(report.selection)
    assert report.selection[report.best_epoch - 1] == report.best
    with torch.no_grad():
        kept = sum(float(square_loss(scaling, batch)) for batch in held_out) / len(held_out)
    assert kept == pytest.approx(report.best)


def test_never_worse_than_the_pre_trained_model_on_the_selection_data(problem):
    """A loss whose minimum is elsewhere: training leads away, and zero is what is left."""
    model, vectors, _, train, _ = problem
    held_out = [(x, model(x).detach()) for x, _ in train]  # the pre-trained model itself is right here
    scaling = AnisotropicScaling(model, vectors, init=0.3)
    report = scaling.fit(square_loss, train, held_out, settings=FitSettings(max_epochs=4))
    assert report.starts[1] == report.best == pytest.approx(0, abs=1e-12)
    assert report.best_epoch == 0
    assert not scaling.coefficients.any()


def test_patience_and_budget(problem):
    model, vectors, _, train, held_out = problem
    hopeless = [(x, model(x).detach()) for x, _ in train]
    report = AnisotropicScaling(model, vectors).fit(square_loss, train, hopeless, settings=FitSettings(patience=3))
    assert (report.stopped, report.epochs) == ("patience", 3)
    report = AnisotropicScaling(model, vectors).fit(square_loss, train, held_out, settings=FitSettings(max_epochs=2))
    assert (report.stopped, report.epochs) == ("budget", 2)
    none = AnisotropicScaling(model, vectors).fit(square_loss, train, held_out, settings=FitSettings(max_epochs=0))
    assert (none.stopped, none.epochs, none.train) == ("budget", 0, ())


def test_patience_follows_the_training_not_the_candidate(problem):
    """From a bad start the course falls every epoch; that zero coefficients are better still does not cut it short."""
    model, vectors, _, train, _ = problem
    own = [(x, model(x).detach()) for x, _ in train]
    scaling = AnisotropicScaling(model, vectors, init=2.0)
    report = scaling.fit(square_loss, own, own, settings=FitSettings(lr=0.02, max_epochs=25, patience=2))
    assert report.epochs == 25
    assert report.best_epoch == 0
    assert list(report.selection) == sorted(report.selection, reverse=True)
    assert not scaling.coefficients.any()


def test_penalties_shrink_the_coefficients(problem):
    model, vectors, _, train, held_out = problem
    sizes = {}
    for name, settings in {
        "none": FitSettings(max_epochs=60),
        "l1": FitSettings(max_epochs=60, l1=0.2),
        "l2": FitSettings(max_epochs=60, l2=0.5),
    }.items():
        scaling = AnisotropicScaling(model, vectors)
        scaling.fit(square_loss, train, held_out, settings=settings)
        sizes[name] = float(scaling.coefficients.detach().norm())
    assert sizes["l1"] < 0.7 * sizes["none"]
    assert sizes["l2"] < 0.7 * sizes["none"]


def test_clipping_bounds_the_gradient(problem, monkeypatch):
    model, vectors, _, train, held_out = problem
    norms = []
    real = torch.optim.AdamW.step

    def spy(self, *args):
        norms.append(float(self.param_groups[0]["params"][0].grad.norm()))
        return real(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    for clip in (None, 1e-3):
        AnisotropicScaling(model, vectors).fit(
            square_loss, train, held_out, settings=FitSettings(max_epochs=1, clip=clip)
        )
    assert max(norms[: len(train)]) > 1e-2
    assert max(norms[len(train) :]) <= 1e-3 * (1 + 1e-5)


def test_a_selection_of_ones_own(problem):
    model, vectors, _, train, held_out = problem
    seen = []

    def accuracy_like(merged):
        seen.append(float(square_loss(merged, held_out[0])))
        return seen[-1]

    scaling = AnisotropicScaling(model, vectors)
    report = scaling.fit(square_loss, train, selection=accuracy_like, settings=FitSettings(max_epochs=5))
    assert list(report.starts) + list(report.selection) == seen
    assert report.best == min(seen)


def test_the_merge_is_computed_once_per_batch(problem, monkeypatch):
    model, vectors, _, train, held_out = problem
    calls = []
    real = AnisotropicScaling._merged
    monkeypatch.setattr(AnisotropicScaling, "_merged", lambda self: calls.append(1) or real(self))
    three_times = lambda merged, batch: sum(square_loss(merged, batch) for _ in range(3))  # noqa: E731
    AnisotropicScaling(model, vectors).fit(three_times, train, held_out, settings=FitSettings(max_epochs=1))
    assert len(calls) == 1 + len(train) + 1  # the start, the batches, the epoch's selection


def test_dropout_and_batchnorm_are_at_rest_during_a_fit(normed, perturb):
    model = nn.Sequential(*normed, nn.Dropout(0.5))
    model.train()
    model[1].eval()  # a mode of its own, which must come back
    vectors = [TaskVector(model, perturb(model, 1))]
    statistics = model[1].running_mean.clone()
    x = torch.randn(16, 5)
    batch = (x, torch.zeros(16, 3))
    values = [
        AnisotropicScaling(model, vectors)
        .fit(square_loss, [batch], [batch], settings=FitSettings(max_epochs=2))
        .selection
        for _ in range(2)
    ]
    assert values[0] == values[1]  # dropout would have made them differ
    assert torch.equal(model[1].running_mean, statistics)
    assert [module.training for module in model] == [True, False, True, True, True]


def test_a_loss_that_stops_being_finite_keeps_the_best(problem):
    model, vectors, _, train, held_out = problem
    count = iter(range(100))

    def breaking(merged, batch):
        return square_loss(merged, batch) * (float("nan") if next(count) >= 8 else 1.0)

    scaling = AnisotropicScaling(model, vectors)
    with pytest.warns(UserWarning, match="the loss is not finite in epoch 2"):
        report = scaling.fit(breaking, train, held_out)
    assert report.stopped == "non_finite"
    assert torch.isfinite(scaling.coefficients).all()
    assert report.best == min(report.starts[0], report.selection[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"held_out": None}, "exactly one of them"),
        ({"selection": lambda merged: 0.0}, "exactly one of them"),
        ({"held_out": []}, "held_out: expected at least one batch"),
        ({"train": []}, "train: expected at least one batch"),
        ({"loss": lambda merged, batch: merged(batch[0])}, r"loss: expected a scalar tensor, got shape \[40, 3\]"),
        ({"loss": lambda merged, batch: torch.tensor(1.0)}, "it does not depend on the coefficients"),
        ({"selection": lambda merged: float("nan"), "held_out": None}, "expected a finite value before training"),
    ],
)
def test_wrong_fits(problem, change, message):
    model, vectors, _, train, held_out = problem
    arguments = {"loss": square_loss, "train": train, "held_out": held_out} | change
    with pytest.raises(ValueError, match=message):
        AnisotropicScaling(model, vectors).fit(**arguments)


def test_a_generator_that_is_used_up_is_noticed(problem):
    model, vectors, _, train, held_out = problem
    with pytest.raises(ValueError, match="a generator that is used up"):
        AnisotropicScaling(model, vectors).fit(square_loss, (batch for batch in train), held_out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"max_epochs": -1}, "max_epochs"),
        ({"patience": 0}, "patience"),
        ({"clip": 0.0}, "clip"),
        ({"l1": -1.0}, "l1"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        FitSettings(**options)


@pytest.mark.parametrize("build", [AnisotropicScaling, RankPruning])
def test_wrong_vectors(mlp, perturb, build):
    tau = TaskVector(mlp, perturb(mlp, 1))
    with pytest.raises(ValueError, match="vectors: expected at least one"):
        build(mlp, [])
    with pytest.raises(ValueError, match=r"model: it has no parameter '0\.weight'"):
        build(nn.Linear(2, 2), [tau])
    wider = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with pytest.raises(ValueError, match=r"'0\.weight': shape \[7, 5\] in the model, \[6, 5\] in a vector"):
        build(wider, [tau])


def test_wrong_coefficients(problem):
    model, vectors, *_ = problem
    with pytest.raises(ValueError, match=r"init: expected a number or shape \[2, 4\], got \[4, 2\]"):
        AnisotropicScaling(model, vectors, init=torch.zeros(4, 2))
    with pytest.raises(ValueError, match='granularity: expected "block" or "vector"'):
        AnisotropicScaling(model, vectors, granularity="layer")
    with pytest.raises(ValueError, match=r"'0\.weight': the merged weights are not finite"):
        AnisotropicScaling(model, vectors, init=float("inf")).merged_model()


# ------------------------------------------------------------------------------------------------ objectives


def test_entropy_in_closed_form():
    assert float(entropy(torch.zeros(4, 8))) == pytest.approx(float(torch.log(torch.tensor(8.0))))
    assert float(entropy(torch.tensor([[1e4, 0.0, 0.0]]))) == 0
    logits = torch.randn(6, 5, dtype=torch.float64)
    expected = torch.distributions.Categorical(logits=logits).entropy().mean()
    torch.testing.assert_close(entropy(logits), expected)


def test_an_unsupervised_fit_lowers_the_entropy(problem):
    model, vectors, _, train, held_out = problem
    scaling = AnisotropicScaling(model, vectors)
    report = scaling.fit(lambda m, b: entropy(m(b[0])), train, held_out, settings=FitSettings(max_epochs=10))
    assert report.best < report.starts[0]


def test_negation(problem):
    model, _, _, train, held_out = problem
    loss = negation_loss(square_loss, square_loss)
    batch = (train[0], held_out[0])
    expected = square_loss(model, held_out[0]) - square_loss(model, train[0])
    torch.testing.assert_close(loss(model, batch), expected)


# ------------------------------------------------------------------------------------------------ rank pruning


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

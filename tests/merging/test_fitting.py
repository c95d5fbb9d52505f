"""How coefficients are fitted: stopping, selection, and the objectives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cost_mtl.merging import (
    DVBASI,
    AnisotropicScaling,
    FitSettings,
    RankPruning,
    TaskVector,
    entropy,
    negation_loss,
)
from tests.merging.learning import square_loss


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
        ({"loss": lambda merged, batch: torch.tensor(1.0)}, "expected one that depends on the coefficients"),
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
    with pytest.raises(ValueError, match=r"model: expected .* got a model without the parameter '0\.weight'"):
        build(nn.Linear(2, 2), [tau])
    wider = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    with pytest.raises(ValueError, match=r"'0\.weight': expected the model's shape \[7, 5\], got \[6, 5\] in a vector"):
        build(wider, [tau])


@pytest.mark.parametrize("build", [AnisotropicScaling, RankPruning])
def test_a_state_dict_is_no_model_to_run(mlp, perturb, build):
    with pytest.raises(TypeError, match="model: expected a module to run, got OrderedDict"):
        build(mlp.state_dict(), [TaskVector(mlp, perturb(mlp, 1))])
    with pytest.raises(TypeError, match="model: expected a module to run, got OrderedDict"):
        DVBASI().run(mlp.state_dict(), perturb(mlp, 1), lambda model, batch: batch.sum(), [torch.ones(1)])


def test_wrong_coefficients(problem):
    model, vectors, *_ = problem
    with pytest.raises(ValueError, match=r"init: expected a number or shape \[2, 4\], got \[4, 2\]"):
        AnisotropicScaling(model, vectors, init=torch.zeros(4, 2))
    with pytest.raises(ValueError, match="granularity: expected one of 'block', 'vector'"):
        AnisotropicScaling(model, vectors, granularity="layer")
    with pytest.raises(ValueError, match=r"'0\.weight': expected finite merged weights"):
        AnisotropicScaling(model, vectors, init=3e38).merged_model()


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

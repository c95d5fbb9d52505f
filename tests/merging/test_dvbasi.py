"""DV-BASI: the iteration against its equations, its guarantee, and what its directions can and can not reach."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from cost_mtl.merging import DVBASI, AnisotropicScaling, FitSettings, TaskVector, task_arithmetic
from cost_mtl.merging.directions import difference_direction, history_directions, random_matched_direction

DIRECTIONS = ["difference", "history", "random_matched"]


def square_loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def loss_of(model, batches):
    with torch.no_grad():
        return sum(float(square_loss(model, batch)) for batch in batches) / len(batches)


@pytest.fixture
def problem(mlp, perturb):
    """θ_pre, a merge that is too short in each block, and data that longer blocks explain."""
    vectors = [TaskVector(mlp, perturb(mlp, seed, 0.5)) for seed in (1, 2)]
    start = task_arithmetic(mlp, vectors, 0.3)
    truth = AnisotropicScaling(mlp, vectors, init=torch.tensor([[0.6, 0.5, 0.7, 0.4]] * 2)).merged_model()
    generator = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(4):
        x = torch.randn(40, 5, generator=generator)
        batches.append((x, truth(x).detach()))
    return mlp, start, vectors, batches[:3], batches[3:]


def run(problem, start=None, **settings):
    pretrained, merged, _, train, held_out = problem
    options = {key: settings.pop(key) for key in ("history", "exclude", "selection", "on_iteration") if key in settings}
    settings.setdefault("fit", FitSettings(max_epochs=15))
    data = {} if "selection" in options else {"held_out": held_out}
    return DVBASI(**settings).run(start or merged, pretrained, square_loss, train, **data, **options)


def assert_same(first: nn.Module, second: nn.Module, **tolerance):
    for (name, value), (_, other) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        torch.testing.assert_close(value, other, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def test_the_iteration_is_its_equations(problem):
    """θ_M = θ_pre + Π(I + Λ_m) δ_0, block by block."""
    pretrained, start, *_ = problem
    result = run(problem, iterations=3)
    assert len(result.iterations) == 3
    assert all(iteration.moved for iteration in result.iterations)
    final = dict(result.model.named_parameters())
    for column, block in enumerate(result.iterations[0].blocks):
        theta_pre = dict(pretrained.named_parameters())[block].double()
        delta = dict(start.named_parameters())[block].double() - theta_pre
        product = 1.0
        for iteration in result.iterations:
            product *= 1 + float(iteration.coefficients[0, column])
        torch.testing.assert_close(final[block].double(), theta_pre + product * delta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_never_worse_than_the_start_on_the_selection_data(problem, direction):
    _, start, _, _, held_out = problem
    result = run(problem, direction=direction)
    values = [result.iterations[0].before, *(iteration.after for iteration in result.iterations)]
    assert values[0] == pytest.approx(loss_of(start, held_out))
    assert values == sorted(values, reverse=True)
    assert loss_of(result.model, held_out) == pytest.approx(values[-1])
    for iteration in result.iterations:
        assert iteration.after == iteration.fit.best <= iteration.before


@pytest.mark.parametrize("direction", ["difference", "history"])
def test_it_improves_a_merge_that_is_too_short(problem, direction):
    _, start, _, _, held_out = problem
    assert loss_of(run(problem, direction=direction).model, held_out) < 0.5 * loss_of(start, held_out)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_it_stands_still_where_nothing_is_better(problem, direction):
    """Training data lead away from the start, the selection data are the start's own outputs."""
    pretrained, start, _, train, _ = problem
    own = [(x, start(x).detach()) for x, _ in train]
    result = DVBASI(iterations=3, direction=direction).run(start, pretrained, square_loss, train, own)
    assert_same(result.model, start, rtol=0, atol=0)
    assert not any(iteration.moved for iteration in result.iterations)
    assert [float(iteration.after) for iteration in result.iterations] == pytest.approx([0.0] * len(result.iterations))
    if direction == "random_matched":  # the next directions are new
        assert (result.stopped, len(result.iterations)) == ("budget", 3)
    else:
        assert (result.stopped, len(result.iterations)) == ("stagnated", 1)


def test_the_single_task_form(problem):
    """From one fine-tuned model, with that task's data alone."""
    pretrained, _, vectors, _, held_out = problem
    tuned = vectors[0].apply_to(pretrained)
    result = run(problem, start=tuned)
    assert loss_of(result.model, held_out) < loss_of(tuned, held_out)


def test_the_given_models_are_not_changed(problem):
    pretrained, start, *_ = problem
    before = copy.deepcopy((pretrained, start))
    result = run(problem)
    assert_same(pretrained, before[0], rtol=0, atol=0)
    assert_same(start, before[1], rtol=0, atol=0)
    result.model[0].weight.data.zero_()
    assert_same(start, before[1], rtol=0, atol=0)


def test_runs_are_repeatable_and_leave_the_random_state(problem):
    state = torch.get_rng_state()
    first, second = (run(problem, direction="random_matched", seed=5) for _ in range(2))
    assert_same(first.model, second.model, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    other = run(problem, direction="random_matched", seed=6)
    assert any(not torch.equal(a, b) for a, b in zip(first.model.parameters(), other.model.parameters(), strict=True))


def test_reports_and_callbacks(problem):
    seen = []
    result = run(problem, iterations=2, on_iteration=lambda iteration, model: seen.append((iteration.number, model)))
    assert [number for number, _ in seen] == [1, 2]
    assert_same(seen[-1][1], result.model, rtol=0, atol=0)
    assert result.epochs == sum(iteration.fit.epochs for iteration in result.iterations) <= 30


def test_a_selection_of_ones_own(problem):
    _, _, _, _, held_out = problem
    result = run(problem, selection=lambda merged: float(square_loss(merged, held_out[0])))
    assert_same(result.model, run(problem).model, rtol=0, atol=0)


def test_excluded_parameters_stay(problem):
    _, start, *_ = problem
    result = run(problem, exclude=["2.*"])
    assert torch.equal(result.model[2].weight, start[2].weight)
    assert result.iterations[0].blocks == ("0.weight", "0.bias")


def test_batchnorm_statistics_are_the_starts(normed, perturb):
    start = perturb(normed, 1)
    start[1].running_mean.fill_(0.5)
    start[1].running_var.fill_(2.0)
    x = torch.randn(32, 5)
    batch = [(x, torch.zeros(32, 3))]
    result = DVBASI(iterations=1, fit=FitSettings(max_epochs=2)).run(start, normed, square_loss, batch, batch)
    assert torch.equal(result.model[1].running_mean, torch.full((6,), 0.5))
    assert torch.equal(result.model[1].running_var, torch.full((6,), 2.0))


# ------------------------------------------------------------------------------------------------ directions


def multiples(points, deltas):
    """Per block: how far a change is from being a multiple of δ_0, 0 to 1."""
    rests = {}
    for block, delta in deltas.items():
        change = points[block].double()
        along = (change * delta.double()).sum() / delta.double().square().sum() * delta.double()
        rests[block] = float((change - along).norm() / change.norm()) if change.any() else 0.0
    return rests


@pytest.mark.parametrize("direction", ["difference", "history"])
def test_without_earlier_points_every_direction_stays_in_the_span_of_the_first(problem, direction):
    pretrained, start, *_ = problem
    result = run(problem, direction=direction, iterations=3)
    change, delta = TaskVector(pretrained, result.model).blocks, TaskVector(pretrained, start).blocks
    assert max(multiples(change, delta).values()) < 1e-4


def test_history_with_earlier_points_and_random_directions_leave_it(problem):
    pretrained, start, vectors, *_ = problem
    earlier = [vectors[0].apply_to(pretrained)]
    delta = TaskVector(pretrained, start).blocks
    for options in ({"direction": "history", "history": earlier}, {"direction": "random_matched"}):
        result = run(problem, **options)
        if any(iteration.moved for iteration in result.iterations):
            change = TaskVector(pretrained, result.model).blocks
            assert max(multiples(change, delta).values()) > 1e-3  # rounding: 1e-6
    assert any(i.moved for i in run(problem, direction="history", history=earlier).iterations)


def test_history_grows_by_one_direction_per_move(problem, perturb):
    result = run(problem, direction="history", iterations=3)
    assert [iteration.coefficients.shape[0] for iteration in result.iterations] == [1, 2, 3]
    pretrained, start, vectors, *_ = problem
    delta = difference_direction(pretrained, start)
    directions = history_directions(delta, [start, pretrained, vectors[0].apply_to(pretrained)], start)
    assert len(directions) == 3  # the start itself is no direction
    torch.testing.assert_close(directions[1].blocks["0.weight"], delta.blocks["0.weight"])


def test_random_directions_have_the_norms_of_the_difference(problem):
    pretrained, start, *_ = problem
    delta = difference_direction(pretrained, start)
    first, second = random_matched_direction(delta, 0, 1), random_matched_direction(delta, 0, 2)
    assert first.norms() == pytest.approx(delta.norms(), rel=1e-6)
    assert abs(first.cosine(delta)) < 0.5
    assert abs(first.cosine(second)) < 0.5
    assert torch.equal(first.blocks["0.bias"], random_matched_direction(delta, 0, 1).blocks["0.bias"])
    empty = TaskVector({"w": torch.zeros(0, 3), "v": torch.zeros(2)}, {"w": torch.zeros(0, 3), "v": torch.ones(2)})
    assert random_matched_direction(empty, 0, 1).blocks["w"].shape == (0, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": float("nan")}, "init: expected a finite number, got nan"),
        ({"iterations": 0}, "iterations: expected an integer >= 1, got 0"),
        (
            {"direction": "sideways"},
            "direction: expected one of 'difference', 'history', 'random_matched', got 'sideways'",
        ),
        ({"history": [nn.Linear(2, 2)]}, 'history: expected direction="history" with it'),
    ],
)
def test_wrong_settings(problem, settings, message):
    with pytest.raises(ValueError, match=message):
        run(problem, **settings)


def test_a_start_at_the_pre_trained_model_has_no_difference(problem):
    pretrained = problem[0]
    with pytest.raises(ValueError, match="expected one that differs from pretrained"):
        run(problem, start=copy.deepcopy(pretrained))

"""Probable mistakes that are no errors are said: a head that nothing steps, a metric among the losses, tasks that swap
places under a weighting with a memory."""

import warnings

import pytest
import torch

from cost_mtl import COST, DenseTeleporter, FairGrad, Move, TeleportSchedule
from cost_mtl.base import State, Weighed
from tests.nets import data, losses, mlp


def named(model, x, ys):
    return dict(zip("abc", losses(model, x, ys), strict=True))


def optimizer(model, **settings):
    return COST(torch.optim.SGD(model.parameters(), lr=0.01), model, shared=model.trunk, **settings)


def test_heads_that_the_base_does_not_hold_are_named():
    model = mlp(2)
    with pytest.warns(UserWarning, match=r"model: 4 parameters are in no param group .*heads.0.weight"):
        COST(torch.optim.SGD(model.trunk.parameters(), lr=0.1), model, shared=model.trunk)
    some = [*model.trunk.parameters(), model.heads[0].weight]  # chosen knowingly
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        COST(torch.optim.SGD(some, lr=0.1), model, shared=model.trunk)
    model.heads.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        COST(torch.optim.SGD(model.trunk.parameters(), lr=0.1), model, shared=model.trunk)


def test_a_metric_among_the_losses_is_said_and_a_constant_zero_is_not():
    model, (x, ys) = mlp(2), data(2)
    with pytest.warns(UserWarning, match="task '2' has no graph.*A metric"):
        optimizer(model).step(lambda: [*losses(model, x, ys), torch.tensor(0.7)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer(model).step(lambda: [*losses(model, x, ys), torch.zeros(())])


def test_an_integer_loss_is_refused():
    model, (x, ys) = mlp(2), data(2)
    with pytest.raises(TypeError, match=r"got a tensor of torch\.int64 \(a metric\?\) as the loss of task '2'"):
        optimizer(model).step(lambda: [*losses(model, x, ys), torch.tensor(3)])


class LastWeights:
    """Remembers what it gave to each place, as a weighting of somebody else's may."""

    def initial_state(self, num_tasks: int) -> State:
        return {"weights": torch.zeros(num_tasks)}

    def weigh(self, inputs, state):
        weights = state["weights"] + torch.arange(1.0, 1 + len(inputs.losses))
        return Weighed(weights, {"weights": weights})


@pytest.mark.parametrize("other", [lambda d: dict(reversed(d.items())), lambda d: {k + "'": v for k, v in d.items()}])
def test_a_weightings_memory_is_not_handed_to_another_task(other):
    model, (x, ys) = mlp(3), data(3)
    opt = optimizer(model, weighting=LastWeights())
    for _ in range(3):
        opt.step(lambda: named(model, x, ys))
    assert opt.last_step.weights.tolist() == [3, 6, 9]
    with pytest.warns(UserWarning, match="the tasks .* instead of a, b, c, in this order; the weighting starts again"):
        opt.step(lambda: other(named(model, x, ys)))
    assert opt.last_step.weights.tolist() == [1, 2, 3]


def test_a_weighting_without_memory_does_not_mind_the_order():
    model, (x, ys) = mlp(3), data(3)
    opt = optimizer(model, weighting=FairGrad())
    opt.step(lambda: named(model, x, ys))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: dict(reversed(named(model, x, ys).items())))


def test_a_weighting_that_works_in_place_leaves_the_report_alone():
    model, (x, ys) = mlp(2), data(2)

    def greedy(gramian):
        gramian.zero_()
        return torch.ones(2)

    opt = optimizer(model, weighting=greedy)
    opt.step(lambda: losses(model, x, ys))
    assert (opt.last_step.gramian.diagonal() > 0).all()


class Bare:
    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs, state):
        return torch.ones(len(inputs.gramian))


def test_what_weighting_and_teleporter_return_is_looked_at():
    model, (x, ys) = mlp(2), data(2)
    with pytest.raises(TypeError, match=r"expected weigh\(\) to return a Weighed, got Tensor"):
        optimizer(model, weighting=Bare()).step(lambda: losses(model, x, ys))

    class Wrong(DenseTeleporter):
        def propose(self, problem):
            return torch.zeros(3)

    with pytest.raises(TypeError, match=r"expected propose\(\) to return a cost_mtl.Move, got Tensor"):
        optimizer(model, teleporter=Wrong()).teleport(lambda: losses(model, x, ys))
    with pytest.raises(ValueError, match="objective: expected 'conflict', 'norm' or 'none', got 'conflct'"):
        Move(torch.zeros(3), "conflct")
    with pytest.raises(ValueError, match="max_norm: expected a number > 0 or None, got '1'"):
        optimizer(model, max_norm="1")
    with pytest.raises(TypeError, match="EqualWeighting"):
        optimizer(model, weighting=None)


def test_a_sum_of_the_losses_is_said_to_leave_nothing_to_weigh():
    model, (x, ys) = mlp(3), data(3)
    opt = optimizer(model)
    with pytest.warns(UserWarning, match="returned one loss, so there is nothing to weigh"):
        opt.step(lambda: sum(losses(model, x, ys)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: sum(losses(model, x, ys)))


def test_tasks_that_share_nothing_are_said():
    model, (x, ys) = mlp(2), data(2)

    def apart():
        z = model.trunk(x).detach()
        return [(head(z) - y).square().mean() for head, y in zip(model.heads, ys, strict=True)]

    opt = COST(torch.optim.SGD(model.parameters(), lr=0.01), model)
    with pytest.warns(UserWarning, match="no trainable parameter is reached by two of its losses"):
        opt.step(apart)


def test_the_report_says_why_a_conflict_led_to_no_attempt():
    model, (x, ys) = mlp(2), data(2)
    answers = iter([True, False])
    opt = optimizer(model, trigger=lambda M: next(answers), schedule=TeleportSchedule(1, 30))
    opt.step(losses, model, x, ys)
    opt.step(losses, model, x, ys)
    assert opt.last_step.conflict
    assert opt.last_step.teleport is None
    assert opt.last_step.no_teleport.startswith("the conflict is not there on the batch before")
    opt.step(losses, model, x, ys)
    assert opt.last_step.conflict is None
    assert opt.last_step.no_teleport == ""


def test_a_trigger_that_returns_no_truth_value_is_named():
    model, (x, ys) = mlp(2), data(2)
    opt = optimizer(model, trigger=lambda M: M < 0, schedule=TeleportSchedule(0, 1))
    with pytest.raises(TypeError, match=r"trigger: expected it to return a bool, got a tensor of shape \[2, 2\]"):
        opt.step(lambda: losses(model, x, ys))


def test_an_earlier_batch_with_the_same_losses_is_remarked_on():
    model, (x, ys) = mlp(2), data(2)
    opt = optimizer(model, teleporter=DenseTeleporter())
    other = data(2, seed=5)
    for pair in ((x, ys), (x, ys)):
        opt.step(losses, model, *pair)
    assert any("exactly the current losses" in note for note in opt.teleport(losses, model, x, ys).notes)
    for _ in range(4):
        opt.step(losses, model, *other)
    assert not any("exactly the current losses" in note for note in opt.teleport(losses, model, x, ys).notes)


def test_reports_can_be_compared_and_kept_in_sets():
    model, (x, ys) = mlp(2), data(2)
    opt = optimizer(model)
    opt.step(lambda: losses(model, x, ys))
    first = opt.last_step
    opt.step(lambda: losses(model, x, ys))
    assert len({first, opt.last_step}) == 2
    assert first != opt.last_step

"""Probable mistakes that are no errors are said: a head that nothing steps, a metric among the losses, tasks that swap
places under a weighting with a memory."""

import warnings

import pytest
import torch

from cost_mtl import COST, DWA, DenseTeleporter, FairGrad, Move
from cost_mtl.base import State
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
    with pytest.raises(TypeError, match=r"the loss of task '2' is a tensor of torch.int64 \(a metric\?\)"):
        optimizer(model).step(lambda: [*losses(model, x, ys), torch.tensor(3)])


@pytest.mark.parametrize("other", [lambda d: dict(reversed(d.items())), lambda d: {k + "'": v for k, v in d.items()}])
def test_a_weightings_memory_is_not_handed_to_another_task(other):
    model, (x, ys) = mlp(3), data(3)
    opt = optimizer(model, weighting=DWA(steps_per_epoch=1))
    for _ in range(3):
        opt.step(lambda: named(model, x, ys))
    assert not torch.allclose(opt.last_step.weights, torch.ones(3, dtype=opt.last_step.weights.dtype))
    with pytest.warns(UserWarning, match="the tasks .* instead of a, b, c, in this order; the weighting starts anew"):
        opt.step(lambda: other(named(model, x, ys)))
    torch.testing.assert_close(opt.last_step.weights, torch.ones(3, dtype=opt.last_step.weights.dtype))


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

"""A warning of COST points at the user's line, whatever stands between."""

import warnings

import pytest
import torch

from cost_mtl import COST, DenseTeleporter, FairGrad
from tests.nets import data, losses, mlp


class Derived(COST):
    def step(self, closure=None, *batch):
        return super().step(closure, *batch)  # the subclass's own line


def plain(model, **settings):
    return COST(torch.optim.SGD(model.parameters(), lr=0.01), model, shared=model.trunk, **settings)


def with_scheduler(model):
    optimizer = plain(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def with_hooks(model):
    optimizer = plain(model)
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def derived(model):
    return Derived(torch.optim.SGD(model.parameters(), lr=0.01), model, shared=model.trunk)


def with_everything(model):
    optimizer = derived(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def lines(call):
    """(file, text) of the lines that the warnings of a call point at."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found = [w for w in caught if "COST" not in str(w.category) and "lr_scheduler.step" not in str(w.message)]
    assert found
    with open(__file__) as file:
        text = file.read().splitlines()
    return [(w.filename, text[w.lineno - 1].strip() if w.filename == __file__ else "") for w in found]


def metric(model, x, ys):
    return [*losses(model, x, ys), torch.tensor(0.7)]


@pytest.mark.parametrize("make", [plain, with_scheduler, with_hooks, derived, with_everything])
def test_warnings_of_a_step(make):
    model, (x, ys) = mlp(2), data(2)
    optimizer = make(model)
    own = "return super().step(closure, *batch)  # the subclass's own line"
    called = "optimizer.step(metric, model, x, ys)"

    def call():
        optimizer.step(metric, model, x, ys)

    assert lines(call) == [(__file__, own if isinstance(optimizer, Derived) else called)]


def test_warnings_of_every_depth_of_a_step():
    model, (x, ys) = mlp(2), data(2)
    optimizer = with_scheduler(model)

    def one_loss():
        optimizer.step(lambda: losses(model, x, ys)[0])

    assert lines(one_loss) == [(__file__, "optimizer.step(lambda: losses(model, x, ys)[0])")]
    optimizer = plain(mlp(2), weighting=lambda M: torch.full((2,), 1e-9, dtype=M.dtype))

    def short():
        optimizer.step(losses, optimizer.model, x, ys)

    assert lines(short) == [(__file__, "optimizer.step(losses, optimizer.model, x, ys)")]


def test_warnings_of_the_constructor_and_of_loading():
    model, (x, ys) = mlp(2), data(2)

    def make():
        COST(torch.optim.SGD(model.trunk.parameters(), lr=0.1), model, shared=model.trunk)

    line = "COST(torch.optim.SGD(model.trunk.parameters(), lr=0.1), model, shared=model.trunk)"
    assert lines(make) == [(__file__, line)]
    optimizer = plain(model)
    optimizer.step(lambda batch: losses(model, x, ys), object())
    saved = optimizer.state_dict()

    def load():
        optimizer.load_state_dict(saved)

    assert lines(load) == [(__file__, "optimizer.load_state_dict(saved)")]


def test_warnings_of_a_teleport():
    model, (x, ys) = mlp(2), data(2)
    optimizer = plain(model, teleporter=DenseTeleporter(), weighting=FairGrad(scale="project"))
    optimizer.step(losses, model, x, ys)
    optimizer.step(lambda *batch: [torch.zeros(()), *losses(*batch)][1:], model, x, ys)
    optimizer.progress.memory[0].batch[1].fill_(float("nan"))  # an earlier batch that is of no use any more
    good = data(2, seed=5)

    def call():
        optimizer.teleport(losses, model, *good)

    assert lines(call) == [(__file__, "optimizer.teleport(losses, model, *good)")]

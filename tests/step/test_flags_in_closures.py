"""Closures that switch ``requires_grad``: adapters of several tasks, schedules that freeze and unfreeze."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cost_mtl
from cost_mtl import COST, EqualWeighting, task_gradients
from tests.nets import data, flat
from tests.optimizer.bases import everything


class Branches(nn.Module):
    """A trunk, a branch for each task and a head that both share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.out = nn.Linear(6, 4), nn.Linear(4, 1)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, task):
        return self.out(torch.tanh(self.branches[task](torch.tanh(self.trunk(x)))))


def only(model, task):
    """What peft's set_adapter does."""
    for k, branch in enumerate(model.branches):
        branch.requires_grad_(k == task)


def switching(model, x, ys, give_back):
    values = []
    for task, y in enumerate(ys):
        only(model, task)
        values.append(F.mse_loss(model(x, task), y))
    if give_back:
        model.branches.requires_grad_(True)
    return values


def make(model, **settings):
    settings = {"shared": model.out, "weighting": EqualWeighting(), "teleporter": None} | settings
    return COST(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, **settings)


SETTINGS = {"given": {}, "found": {"shared": None}, "every": {"every": 3}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("micro", [1, 2])
def test_flags_given_back_train_as_the_plain_loop(settings, micro):
    model = Branches()
    plain = copy.deepcopy(model)
    optimizer, base = make(model, **settings), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        batches = [data(2, seed=step * micro + k) for k in range(micro)]
        closures = [lambda b=b: switching(model, *b, True) for b in batches]
        optimizer.step(closures if micro > 1 else closures[0])
        base.zero_grad()
        (sum(sum(switching(plain, *b, True)) for b in batches) / micro).backward()
        base.step()
        torch.testing.assert_close(flat(list(model.parameters())), flat(list(plain.parameters())), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_flags_left_off_are_refused_by_name_and_given_back(settings):
    """autograd alone would drop the gradients silently."""
    model = Branches()
    optimizer = make(model, **settings)
    x, ys = data(2)
    optimizer.step(lambda: switching(model, x, ys, True))
    before, cost = everything(model, optimizer), copy.deepcopy(optimizer.state_dict()["cost"])
    for _ in range(2):  # in a step that reuses its weights (every=3), too
        with pytest.raises(
            RuntimeError, match=r"closure: .*requires_grad off for 2 .*branches\.0\.weight.*set_adapter.*back at"
        ):
            optimizer.step(lambda: switching(model, x, ys, False))
        assert everything(model, optimizer) == before
        assert repr(optimizer.state_dict()["cost"]) == repr(cost)
        assert all(p.requires_grad for p in model.parameters())
        assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
        assert all(p.grad is None for p in model.parameters())
    twin = copy.deepcopy(model)
    reference = make(twin, **settings)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step(lambda: switching(model, x, ys, True))
    reference.step(lambda: switching(twin, x, ys, True))
    assert torch.equal(flat(list(model.parameters())), flat(list(twin.parameters())))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("shared", ["out", "trunk", None])
def test_a_closure_may_freeze_and_unfreeze_for_good_as_in_the_plain_loop(shared, every):
    """The trunk is frozen in the closure of step 2, before the forward pass, and thawed in that of step 4."""
    model = Branches()
    plain = copy.deepcopy(model)
    part = getattr(model, shared) if shared else None
    optimizer = make(model, shared=part, every=every)
    base = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)

    def scheduled(model, step, x, ys):
        if step in (2, 4):
            model.trunk.requires_grad_(step == 4)
        return [F.mse_loss(model(x, task), y) for task, y in enumerate(ys)]

    for step in range(6):
        start = flat(list(plain.trunk.parameters()))
        x, ys = data(2, seed=step)
        optimizer.step(lambda step=step, x=x, ys=ys: scheduled(model, step, x, ys))
        base.zero_grad()
        sum(scheduled(plain, step, x, ys)).backward()
        base.step()
        assert torch.equal(flat(list(plain.trunk.parameters())), start) == (step in (2, 3))
        torch.testing.assert_close(flat(list(model.parameters())), flat(list(plain.parameters())), rtol=1e-5, atol=1e-7)


def test_micro_batches_that_differ_are_refused():
    model = Branches()
    optimizer = make(model)
    x, ys = data(2)

    def closure(thaw):
        model.trunk.requires_grad_(thaw)
        return [F.mse_loss(model(x, task), y) for task, y in enumerate(ys)]

    model.trunk.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"closure: .*every micro-batch.*trunk\.weight"):
        optimizer.step([lambda: closure(False), lambda: closure(True)])
    assert not model.trunk.weight.requires_grad
    optimizer.step([lambda: closure(True), lambda: closure(True)])
    assert model.trunk.weight.grad is not None


def test_flags_switched_in_a_teleporting_closure():
    """The teleport freezes weights of its own accord; the closure's switching must not meet it."""
    model = Branches()
    optimizer = make(model, shared=model.trunk, trigger=lambda M: True, teleporter=cost_mtl.DenseTeleporter(),
                     schedule=cost_mtl.TeleportSchedule(start=0, cooldown=1))  # fmt: skip
    for step in range(3):
        x, ys = data(2, seed=step)
        optimizer.step(lambda x, ys: switching(model, x, ys, True), x, ys)
        assert optimizer.last_step.teleport is not None
    assert all(p.requires_grad for p in model.parameters())


def test_frozen_parameters_are_refused_by_task_gradients_and_no_hook_stays():
    model = Branches()
    x, ys = data(2)
    values = [F.mse_loss(model(x, task), y) for task, y in enumerate(ys)]
    model.trunk.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"shared: expected parameters with requires_grad=True, got 1 without"):
        task_gradients(values, [model.trunk.weight, model.trunk.bias])
    assert not model.trunk.weight._post_accumulate_grad_hooks
    G = task_gradients(values, [model.trunk.weight])
    sum(F.mse_loss(model(x, task), y) for task, y in enumerate(ys)).backward()
    torch.testing.assert_close(G.sum(0), model.trunk.weight.grad.flatten())

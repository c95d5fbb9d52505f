"""Shared parameters whose learning rate is 0 stay where they are in a teleport, too."""

import pytest
import torch

import cost_mtl
from cost_mtl import COST, DenseTeleporter, LoRATeleporter, TeleportSchedule
from tests.nets import closure, conflicting, flat, reference_gradients

TELEPORTERS = [DenseTeleporter(), LoRATeleporter(rank=2)]


def resting(model, rates, **settings):
    """COST whose first layer, second layer and heads have the given learning rates."""
    parts = (model.trunk[0], model.trunk[2], model.heads)
    groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in zip(parts, rates, strict=True)]
    settings = {"trigger": lambda M: True, "schedule": TeleportSchedule(start=0, cooldown=1)} | settings
    return COST(torch.optim.SGD(groups), model, shared=model.trunk, **settings)


@pytest.mark.parametrize("teleporter", TELEPORTERS, ids=["dense", "LoRA"])
@pytest.mark.parametrize("by", ["step", "teleport"])
def test_the_layer_at_rest_stays_and_the_other_moves(teleporter, by):
    model, x, ys = conflicting()
    first, second = (flat(list(model.trunk[k].parameters())) for k in (0, 2))
    optimizer = resting(model, (0.0, 1e-30, 1e-30), teleporter=teleporter)
    if by == "step":
        optimizer.step(closure(model, x, ys))
        report = optimizer.last_step.teleport
    else:
        report = optimizer.teleport(closure(model, x, ys))
    assert report.accepted, report.reason
    assert torch.equal(flat(list(model.trunk[0].parameters())), first)
    assert not torch.equal(flat(list(model.trunk[2].parameters())), second)


@pytest.mark.parametrize("shared", ["given", "found"])
def test_the_step_after_the_move_has_all_shared_gradients(shared):
    """Those of the layer at rest count in Gramian and update as ever, at the new point."""
    model, x, ys = conflicting()
    model.double()
    optimizer = resting(model, (0.0, 1e-30, 1e-30), teleporter=DenseTeleporter())
    if shared == "found":
        optimizer._shared = None
    x, ys = x.double(), [y.double() for y in ys]
    optimizer.step(closure(model, x, ys))
    assert optimizer.last_step.teleport.accepted
    params = list(model.trunk.parameters())
    G = reference_gradients(model, closure(model, x, ys), params)
    torch.testing.assert_close(optimizer.last_step.gramian, G @ G.T, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(flat([p.grad for p in params]), optimizer.last_step.weights @ G, rtol=1e-8, atol=1e-12)
    optimizer.step(closure(model, x, ys))


def test_with_all_shared_layers_at_rest_there_is_no_teleport():
    model, x, ys = conflicting()
    start = flat(list(model.trunk.parameters()))
    optimizer = resting(model, (0.0, torch.tensor(0.0), 0.1), teleporter=DenseTeleporter())
    optimizer.step(closure(model, x, ys))
    assert optimizer.last_step.conflict
    assert optimizer.last_step.teleport is None
    assert optimizer.progress.attempts == 0
    with pytest.raises(ValueError, match="every shared parameter is in a param group with learning rate 0"):
        optimizer.teleport(closure(model, x, ys))
    assert torch.equal(flat(list(model.trunk.parameters())), start)


def test_learning_rate_0_throughout_says_nothing_about_a_layer():
    """As in the first step of a warm-up."""
    model, x, ys = conflicting()
    optimizer = resting(model, (0.0, 0.0, 0.0), teleporter=DenseTeleporter())
    optimizer.step(closure(model, x, ys))
    assert optimizer.last_step.teleport.accepted


def test_a_base_without_learning_rates():
    """A base that has no learning rate at all is asked nothing."""
    model, x, ys = conflicting()

    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        p.sub_(1e-3 * p.grad)

    optimizer = cost_mtl.COST(
        Plain(model.parameters()), model, shared=model.trunk, trigger=lambda M: True, teleporter=DenseTeleporter(),
        schedule=TeleportSchedule(start=0, cooldown=1),
    )  # fmt: skip
    optimizer.step(closure(model, x, ys))
    assert optimizer.last_step.teleport.accepted

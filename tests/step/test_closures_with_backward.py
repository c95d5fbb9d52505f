"""A closure that calls backward by itself (a habit from other loops) leaves no mark on the update."""

import copy

import pytest
import torch

from cost_mtl import COST, Acceptance, DenseTeleporter, EqualWeighting, FairGrad, LoRATeleporter, TeleportSchedule
from tests.nets import data, flat, losses, mlp
from tests.resuming import EASY

REJECTS = Acceptance(tolerance=1e-9)


def run(calls_backward, steps=4, micro=1, **settings):
    model = mlp(3)
    opt = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, trigger=lambda M: True,
               schedule=TeleportSchedule(1, 1), **settings)  # fmt: skip

    def closure(x, ys):
        values = losses(model, x, ys)
        if calls_backward:
            sum(values).backward(retain_graph=True)
        return values

    accepted = []
    for seed in range(steps):
        x, ys = data(3, seed=seed)
        if micro == 1:
            opt.step(closure, x, ys)
        else:
            opt.step([lambda x=x, ys=ys: closure(x, ys)] * micro)
        accepted.append(bool(opt.last_step.teleport and opt.last_step.teleport.accepted))
    grads = [p.grad.clone() for p in model.parameters()]
    return flat(list(model.parameters())), flat(grads), accepted


@pytest.mark.parametrize("weighting", [EqualWeighting(), FairGrad()])
@pytest.mark.parametrize(
    "teleporter",
    [None, LoRATeleporter(acceptance=REJECTS), LoRATeleporter(acceptance=EASY), DenseTeleporter(acceptance=EASY)],
)
def test_steps_with_and_without_teleports(weighting, teleporter):
    clean = run(False, weighting=weighting, teleporter=teleporter)
    noisy = run(True, weighting=weighting, teleporter=teleporter)
    assert clean[2] == noisy[2]
    assert torch.equal(clean[0], noisy[0])
    assert torch.equal(clean[1], noisy[1])
    if teleporter is not None and teleporter.acceptance is EASY:
        assert any(clean[2])


def test_micro_batches():
    clean, noisy = (run(b, micro=2, teleporter=DenseTeleporter(acceptance=EASY)) for b in (False, True))
    assert torch.equal(clean[0], noisy[0])


@pytest.mark.parametrize("acceptance", [REJECTS, EASY])
def test_a_teleport_by_hand_gives_every_grad_back(acceptance):
    model, (x, ys) = mlp(3), data(3)
    opt = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
               teleporter=LoRATeleporter(acceptance=acceptance))  # fmt: skip
    opt.step(lambda: losses(model, x, ys))
    held = [p.grad for p in model.parameters()]
    values = copy.deepcopy(held)

    def closure():
        found = losses(model, x, ys)
        sum(found).backward(retain_graph=True)
        return found

    opt.teleport(closure)
    for p, grad, value in zip(model.parameters(), held, values, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)

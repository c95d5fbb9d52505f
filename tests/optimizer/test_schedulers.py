"""Every learning rate scheduler of torch drives COST as it drives the base. A new one: one row in the table below."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

from tests.optimizer.bases import BASES, build, matrices, net, train, train_plainly

SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, total_iters=2),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.2, total_iters=3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=2),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=5, power=2.0),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.05, step_size_up=2, cycle_momentum="momentum" in o.defaults),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(
        o, max_lr=0.1, total_steps=8, cycle_momentum="momentum" in o.defaults or "betas" in o.defaults
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.1, total_iters=2), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.5, total_iters=2), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "SWALR": lambda o: optim.swa_utils.SWALR(o, swa_lr=0.001, anneal_epochs=3),
}


def test_the_table_names_every_scheduler_of_torch():
    found = {n for n, c in vars(schedulers).items() if isinstance(c, type) and issubclass(c, schedulers.LRScheduler)}
    assert found - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_the_base(name, kind):
    model, plain = net(2, torch.float64), net(2, torch.float64)
    optimizer = build(name, model)
    base = BASES[name]([{"params": matrices(name, part.parameters())} for part in (plain.trunk, plain.heads)])
    seen = {}
    for owner, run in ((optimizer, partial(train, optimizer, model)), (base, partial(train_plainly, base, plain))):
        scheduler, rates = SCHEDULERS[kind](owner), []

        def after(values, owner=owner, scheduler=scheduler, rates=rates):
            scheduler.step(*([float(values.sum())] if kind == "ReduceLROnPlateau" else []))
            rates.append([(float(g["lr"]), g.get("momentum"), g.get("betas")) for g in owner.param_groups])

        run(5, after)
        seen[owner] = rates
    assert seen[optimizer] == seen[base]
    assert len({str(row) for row in seen[base]}) > 1  # the schedule did something
    close = {"rtol": 1e-2, "atol": 1e-3} if name == "Muon" else {"rtol": 1e-8, "atol": 1e-10}  # it works in bfloat16
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, **close)


def test_param_groups_are_one_object_for_everyone():
    model = net()
    optimizer = build("Adam", model)
    scheduler = schedulers.StepLR(optimizer, 1)

    def one():
        return optimizer.param_groups is optimizer.base.param_groups is scheduler.optimizer.param_groups

    assert one()
    optimizer.load_state_dict(optimizer.state_dict())
    assert one()
    extra = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert one()
    assert optimizer.base.param_groups[-1]["params"] == [extra]
    optimizer.param_groups[0]["lr"] = 0.125
    assert optimizer.base.param_groups[0]["lr"] == 0.125
    assert optimizer.state is optimizer.base.state
    assert optimizer.defaults is optimizer.base.defaults


def test_a_scheduler_on_the_base_works_too():
    model = net()
    optimizer = build("SGD", model)
    scheduler = schedulers.StepLR(optimizer.base, 1, 0.1)
    train(optimizer, model, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)

"""What people do around an optimizer without thinking about it."""

import functools
import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cost_mtl import COST, DenseTeleporter, EqualWeighting, LoRATeleporter, TeleportSchedule
from tests.nets import conflicting, data, flat, losses, mlp


def always(M):
    return True


def setup(model=None, base=torch.optim.AdamW, **settings):
    model = mlp(3) if model is None else model
    settings = {
        "shared": model.trunk, "trigger": always, "schedule": TeleportSchedule(start=1, cooldown=2),
        "teleporter": DenseTeleporter(),
    } | settings  # fmt: skip
    return model, COST(base(model.parameters(), lr=0.01), model, **settings)


def train(model, optimizer, steps, start=0):
    dtype = next(model.parameters()).dtype
    for seed in range(start, start + steps):
        x, ys = data(len(model.heads), seed=seed)
        optimizer.step(lambda x, ys: losses(model, x, ys), x.to(dtype), [y.to(dtype) for y in ys])


def parameters(model):
    return flat(list(model.parameters()))


# ------------------------------------------------------------------------------------ around the step


def test_zero_grad_anywhere_in_any_form_changes_nothing():
    (model, optimizer), (plain, reference) = setup(), setup()
    for seed in range(5):
        x, ys = data(3, seed=seed)
        optimizer.zero_grad(set_to_none=bool(seed % 2))

        def closure(x, ys):
            optimizer.zero_grad()
            return losses(model, x, ys)

        optimizer.step(closure, x, ys)
        optimizer.zero_grad(set_to_none=False)
        reference.step(lambda x, ys: losses(plain, x, ys), x, ys)
    assert torch.equal(parameters(model), parameters(plain))


def test_no_grad_is_no_matter_and_inference_mode_is_refused():
    (model, optimizer), (plain, reference) = setup(), setup()
    x, ys = data(3)
    with torch.no_grad():
        optimizer.step(lambda: losses(model, x, ys))
    reference.step(lambda: losses(plain, x, ys))
    assert torch.equal(parameters(model), parameters(plain))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        optimizer.step(lambda: losses(model, x, ys))
    assert torch.equal(parameters(model), parameters(plain))


def test_a_closure_may_be_anything_callable():
    x, ys = data(3)
    batch = {"x": x, "ys": ys}

    class Closure:
        def __init__(self, model):
            self.model = model

        def __call__(self, x, ys):
            return losses(self.model, x, ys)

    class Inside(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.net = model

        def forward(self, x, ys):
            return losses(self.net, x, ys)

    results = []
    for call in (
        lambda o, m: o.step(lambda x, ys: losses(m, x, ys), x, ys),
        lambda o, m: o.step(closure=lambda: losses(m, x, ys)),
        lambda o, m: o.step(functools.partial(losses, m, x, ys)),
        lambda o, m: o.step(functools.partial(losses, m, ys=ys), x),
        lambda o, m: o.step(lambda b: losses(m, **b), batch),
        lambda o, m: o.step(Closure(m), x, ys),
        lambda o, m: o.step(Inside(m), x, ys),
    ):
        model, optimizer = setup()
        call(optimizer, model)
        results.append(parameters(model))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("where", ["shared", "own"])
def test_a_tensor_hook_of_the_users_acts_on_every_tasks_gradient(where):
    (model, optimizer), plain = setup(weighting=EqualWeighting(), teleporter=None, base=torch.optim.SGD), mlp(3)
    base, calls = torch.optim.SGD(plain.parameters(), lr=0.01), []
    for m, seen in ((model, calls), (plain, [])):
        p = m.trunk[0].weight if where == "shared" else m.heads[1].weight
        p.register_hook(lambda grad, seen=seen: (seen.append(1), 0.5 * grad)[1])
    x, ys = data(3)
    optimizer.step(lambda: losses(model, x, ys))
    sum(losses(plain, x, ys)).backward()
    base.step()
    torch.testing.assert_close(parameters(model), parameters(plain))
    assert len(calls) == (3 if where == "shared" else 1)


# ------------------------------------------------------------------------------------ the model changes


@pytest.mark.parametrize("shared", ["given", "found"])
@pytest.mark.parametrize("teleporter", [DenseTeleporter(), LoRATeleporter(rank=2)], ids=["dense", "LoRA"])
def test_layers_frozen_and_thawed_in_the_middle(shared, teleporter):
    settings = {"teleporter": teleporter, "htr": "momentum"} | ({"shared": None} if shared == "found" else {})
    model, optimizer = setup(**settings)
    first = model.trunk[0]
    train(model, optimizer, 4)
    first.requires_grad_(False)
    start, attempts = parameters(first), optimizer.progress.attempts
    train(model, optimizer, 4, start=4)
    assert torch.equal(parameters(first), start)
    assert first.weight.grad is None
    assert optimizer.progress.attempts > attempts
    model.trunk.requires_grad_(False)
    trunk, heads = parameters(model.trunk), parameters(model.heads)
    train(model, optimizer, 2, start=8)
    assert torch.equal(parameters(model.trunk), trunk)
    assert not torch.equal(parameters(model.heads), heads)
    model.trunk.requires_grad_(True)
    train(model, optimizer, 2, start=10)
    assert not torch.equal(parameters(first), start)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("teleporter", [DenseTeleporter(), LoRATeleporter(rank=2)], ids=["dense", "LoRA"])
def test_weights_in_half_precision_through_teleports(dtype, teleporter):
    model, optimizer = setup(mlp(3, dtype=dtype), base=torch.optim.SGD, teleporter=teleporter)
    start = parameters(model)
    train(model, optimizer, 6)
    assert optimizer.progress.attempts >= 2
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {dtype}
    assert bool(torch.isfinite(parameters(model)).all())
    assert not torch.equal(parameters(model), start)


def test_an_average_starts_anew_after_a_teleport():
    """The callback comes when the parameters are at the new point, before the update."""
    model, x, ys = conflicting()
    average, seen = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), []

    def start_anew(report):
        assert report.accepted, report.reason
        average.module.load_state_dict(model.state_dict())
        seen.append(torch.stack(losses(model, x, ys)).detach())

    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk, teleporter=DenseTeleporter(),
        schedule=TeleportSchedule(start=0, cooldown=1), on_teleport=start_anew,
    )  # fmt: skip
    start = parameters(model)
    optimizer.step(lambda: losses(model, x, ys))
    report = optimizer.last_step.teleport
    torch.testing.assert_close(seen[0].double(), report.losses_after, rtol=1e-5, atol=0.0)
    assert not torch.equal(parameters(average.module), start)
    assert not torch.equal(parameters(average.module), parameters(model))


# ------------------------------------------------------------------------------------ more than one


def test_several_in_one_process_know_nothing_of_each_other():
    pairs = [setup(mlp(3, seed=s)) for s in range(2)]
    for step in range(5):
        for model, optimizer in pairs:
            train(model, optimizer, 1, start=step)
    for seed, (model, _) in enumerate(pairs):
        alone, optimizer = setup(mlp(3, seed=seed))
        train(alone, optimizer, 5)
        assert torch.equal(parameters(model), parameters(alone))


def test_one_per_thread():
    pairs = [setup(mlp(3, seed=s), teleporter=None) for s in range(4)]
    threads = [threading.Thread(target=train, args=(*pair, 15)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, (model, optimizer) in enumerate(pairs):
        assert optimizer.progress.step == 15
        alone, reference = setup(mlp(3, seed=seed), teleporter=None)
        train(alone, reference, 15)
        assert torch.equal(parameters(model), parameters(alone))


def tensors():
    return sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects())


def test_nothing_piles_up_and_everything_goes():
    """500 steps with teleports, then the optimizer is let go: without the help of the garbage collector."""
    model, optimizer = setup(schedule=TeleportSchedule(start=5, cooldown=20))
    train(model, optimizer, 50)
    gc.collect()
    before, objects = tensors(), len(gc.get_objects())
    gc.disable()
    try:
        train(model, optimizer, 450, start=50)
        assert optimizer.progress.attempts > 20
        assert tensors() <= before + 5
        assert len(gc.get_objects()) < objects + 2000
        gone = [weakref.ref(optimizer), weakref.ref(optimizer.base), weakref.ref(model)]
        del optimizer, model
        assert [ref() for ref in gone] == [None] * 3
    finally:
        gc.enable()

"""torch.compile of trunk, model and closure; activation checkpointing, memory formats, sparse and other parameters."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cost_mtl
from cost_mtl import COST, DenseTeleporter, LoRATeleporter, TeleportSchedule
from tests.nets import MultiHead, data, flat, losses


class Trunk(nn.Module):
    """With dropout and a normalisation, and saved intermediates that compiled code would like to overwrite."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 32), nn.Linear(32, 8)
        self.norm, self.dropout = nn.LayerNorm(32), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.dropout(self.norm(F.gelu(self.first(x))))))


def net(K=2, dropout=0.2, seed=0):
    torch.manual_seed(seed)
    return MultiHead(Trunk(dropout), 8, K)


def always(M):
    return True


TELEPORTERS = {"none": None, "dense": DenseTeleporter(), "LoRA": LoRATeleporter(rank=2)}


def compiled(model, what, backend, **options):
    """The closure with the trunk, the model, or all of itself compiled."""
    if what == "trunk":
        model.trunk.compile(backend=backend, **options)
        return lambda x, ys: losses(model, x, ys), model
    if what == "model":
        whole = torch.compile(model, backend=backend, **options)
        return lambda x, ys: losses(whole, x, ys), whole
    return torch.compile(lambda x, ys: losses(model, x, ys), backend=backend, **options), model


def train(model, closure, wrapped, *, steps=5, teleporter=None, **settings):
    settings = {"shared": model.trunk, "trigger": always, "schedule": TeleportSchedule(start=1, cooldown=1)} | settings
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.05), wrapped, teleporter=teleporter, **settings)
    torch.manual_seed(3)
    reports = []
    for step in range(steps):
        x, ys = data(len(model.heads), seed=step)
        optimizer.step(closure, x, ys)
        reports.append(optimizer.last_step.teleport)
    return optimizer, reports


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


# ------------------------------------------------------------------------------------ torch.compile


@pytest.mark.parametrize("teleporter", TELEPORTERS)
@pytest.mark.parametrize("what", ["trunk", "model", "closure"])
def test_compiled_code_trains_and_teleports_as_eager_code_does(what, teleporter):
    """The same losses, gradients, moves and random numbers (aot_eager: compiled without a change of the arithmetic)."""
    model, plain = net(), net()
    closure, wrapped = compiled(model, what, "aot_eager", fullgraph=what == "trunk")
    optimizer, reports = train(model, closure, wrapped, teleporter=TELEPORTERS[teleporter])
    reference, expected = train(plain, lambda x, ys: losses(plain, x, ys), plain, teleporter=TELEPORTERS[teleporter])
    torch.testing.assert_close(flat(list(model.parameters())), flat(list(plain.parameters())), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(optimizer.last_step.gramian, reference.last_step.gramian, rtol=1e-4, atol=1e-9)
    accepted = [r is not None and r.accepted for r in reports]
    assert accepted == [r is not None and r.accepted for r in expected]
    assert any(accepted) is (teleporter != "none")


def test_a_teleport_is_visible_to_compiled_code():
    model = net(dropout=0.0)
    closure, wrapped = compiled(model, "trunk", "aot_eager")
    optimizer, _ = train(model, closure, wrapped, steps=2, teleporter=LoRATeleporter(2), trigger=lambda M: False)
    x, ys = data(2, seed=9)
    before = model.trunk(x).detach()
    assert optimizer.teleport(closure, x, ys).accepted
    after = model.trunk(x).detach()
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, model.trunk.forward(x).detach())  # called past the compiled code


def test_inductor_with_teleports():
    model = net()
    closure, wrapped = compiled(model, "trunk", "inductor")
    _, reports = train(model, closure, wrapped, steps=3, teleporter=DenseTeleporter())
    assert any(r is not None and r.accepted for r in reports)
    assert all(r is None or "called again" not in r.reason for r in reports)  # dropout is the same on both sides


def test_code_compiled_and_run_before_cost_was_made(monkeypatch, tmp_path):
    """Its backward pass overwrites what it saved, and must not be run once per task; nor may the kernels that it left
    in the cache on disk. COST has it compiled anew, and every task's gradient is eager code's."""
    from torch._functorch import config as functorch
    from torch.compiler import config as compiler

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    functorch.donated_buffer, compiler.cache_key_tag = True, ""  # as in a process without a COST
    model, plain = net(K=3, dropout=0.0), net(K=3, dropout=0.0)
    closure, wrapped = compiled(model, "model", "inductor")
    x, ys = data(3)
    sum(closure(x, ys)).backward()  # one backward pass, as in a plain loop
    optimizer, _ = train(model, closure, wrapped, steps=2)
    assert functorch.donated_buffer is False
    reference, _ = train(plain, lambda x, ys: losses(plain, x, ys), plain, steps=2)
    torch.testing.assert_close(optimizer.last_step.gramian, reference.last_step.gramian, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(flat(list(model.parameters())), flat(list(plain.parameters())), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["compiled", "arithmetic on a stack"])
def test_the_shared_parameters_are_found_where_every_loss_reaches_everything(form):
    """There, every loss has a gradient for every parameter: zero for the other tasks' heads."""
    model, plain = net(dropout=0.0), net(dropout=0.0)

    def stacked(x, ys):
        return torch.stack(losses(model, x, ys)) * torch.ones(2)

    closure = compiled(model, "closure", "aot_eager")[0] if form == "compiled" else stacked
    optimizer, _ = train(model, closure, model, steps=2, shared=None)
    reference, _ = train(plain, lambda x, ys: losses(plain, x, ys), plain, steps=2, shared=None)
    assert optimizer.progress.shared == reference.progress.shared
    trunk = {id(p) for p in model.trunk.parameters()}
    assert [id(list(model.parameters())[k]) in trunk for k in optimizer.progress.shared] == [True] * len(trunk)
    torch.testing.assert_close(flat(list(model.parameters())), flat(list(plain.parameters())), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("what", ["step", "training step"])
def test_a_compiled_step_is_the_step(what):
    """``torch.compile(optimizer.step)``, or of a function around it: it runs as it is, hooks once, teleports, too."""
    model, plain = net(dropout=0.0), net(dropout=0.0)
    optimizers = [
        COST(torch.optim.AdamW(m.parameters()), m, shared=m.trunk, trigger=always, teleporter=DenseTeleporter(),
             schedule=TeleportSchedule(start=1, cooldown=1))
        for m in (model, plain)
    ]  # fmt: skip
    calls = []
    optimizers[0].register_step_post_hook(lambda *_: calls.append(optimizers[0].progress.step))

    def closure(x, ys):
        return losses(model, x, ys)

    def training_step(x, ys):
        return optimizers[0].step(closure, x, ys)

    if what == "step":
        step = torch.compile(optimizers[0].step, backend="aot_eager")
        run = lambda x, ys: step(closure, x, ys)  # noqa: E731
    else:
        run = torch.compile(training_step, backend="aot_eager")
    for seed in range(4):
        x, ys = data(2, seed=seed)
        torch.testing.assert_close(run(x, ys), optimizers[1].step(lambda x, ys: losses(plain, x, ys), x, ys))
    assert torch.equal(flat(list(model.parameters())), flat(list(plain.parameters())))
    assert calls == [1, 2, 3, 4]
    assert optimizers[0].progress.attempts == optimizers[1].progress.attempts >= 2
    report = torch.compile(lambda: optimizers[0].teleport(closure, *data(2, seed=9)), backend="aot_eager")()
    assert report.closure_calls > 1


def test_many_teleports_do_not_pile_up_compilations():
    model = net(dropout=0.0)
    closure, wrapped = compiled(model, "trunk", "aot_eager")
    torch._dynamo.utils.counters.clear()
    counts = []
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.05), wrapped, shared=model.trunk, trigger=always,
        teleporter=LoRATeleporter(rank=2), schedule=TeleportSchedule(start=0, cooldown=1),
    )  # fmt: skip
    for step in range(12):
        optimizer.step(closure, *data(2, seed=step))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[-1] == counts[3], counts


# ------------------------------------------------------------------------------------ activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self, inner, **options):
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x):
        return checkpoint(self.inner, x, **self.options)


@pytest.mark.parametrize("teleporter", ["none", "dense", "LoRA"])
def test_non_reentrant_checkpointing_is_the_same_training(teleporter):
    model, plain = net(), net()
    trunk = model.trunk
    model.trunk = Checkpointed(trunk, use_reentrant=False)
    train(model, lambda x, ys: losses(model, x, ys), model, teleporter=TELEPORTERS[teleporter])
    train(plain, lambda x, ys: losses(plain, x, ys), plain, teleporter=TELEPORTERS[teleporter])
    torch.testing.assert_close(flat(list(model.parameters())), flat(list(plain.parameters())), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("form", [list, torch.stack, lambda v: dict(zip("ab", v, strict=True))])
@pytest.mark.parametrize("shared", ["given", "found"])
def test_reentrant_checkpointing_is_refused_before_anything_moves(form, shared):
    model = net()
    model.trunk = Checkpointed(model.trunk, use_reentrant=True)
    start = flat(list(model.parameters()))
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk if shared == "given" else None
    )
    x, ys = data(2)
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=r"use_reentrant=False|[Cc]heckpoint"):
        optimizer.step(lambda: form(losses(model, x, ys)))
    assert torch.equal(flat(list(model.parameters())), start)


def test_the_quiet_run():
    """Nothing above may warn in an ordinary compiled run."""
    model = net(dropout=0.0)
    closure, wrapped = compiled(model, "trunk", "aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, closure, wrapped, steps=2, weighting=cost_mtl.CAGrad())

"""torch.compile of trunk, model and closure; activation checkpointing, memory formats, sparse and other parameters."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cost_mtl
from cost_mtl import COST, DenseTeleporter, EqualWeighting, LoRATeleporter, TeleportSchedule
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


# ------------------------------------------------------------------------------------ formats and kinds of parameters


@pytest.mark.parametrize("fused", [False, True])
def test_channels_last(fused):
    def build():
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
        return MultiHead(trunk, 4 * 4 * 4, 2)

    model, plain = build().to(memory_format=torch.channels_last), build()
    for m, last in ((model, True), (plain, False)):
        optimizer = COST(
            torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused), m, shared=m.trunk, teleporter=LoRATeleporter(2),
            trigger=always, schedule=TeleportSchedule(start=1, cooldown=2),
        )  # fmt: skip
        for seed in range(4):
            x, ys = data(2, seed=seed, shape=(3, 8, 8))
            x = x.to(memory_format=torch.channels_last) if last else x
            optimizer.step(lambda x, ys, m=m: losses(m, x, ys), x, ys)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)
    weight = model.trunk[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.grad.stride() == weight.stride()


class Recommender(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 6, sparse=sparse)
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(8, 1) for _ in range(2))

    def forward(self, rows):
        return [head(self.trunk(self.table(rows))) for head in self.heads]


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("shared", ["table and trunk", "trunk"])
@pytest.mark.parametrize("teleporter", ["none", "dense"])
def test_sparse_embeddings_train_as_dense_ones(base, shared, teleporter):
    models = [Recommender(sparse=True), Recommender(sparse=False)]
    for model in models:
        mine = [model.table, model.trunk] if shared == "table and trunk" else model.trunk
        optimizer = COST(
            base(model.parameters(), lr=0.1), model, shared=mine, teleporter=TELEPORTERS[teleporter], trigger=always,
            schedule=TeleportSchedule(start=1, cooldown=2),
        )  # fmt: skip
        for seed in range(4):
            _, ys = data(2, seed=seed)
            rows = torch.randint(9, (16,), generator=torch.Generator().manual_seed(seed))
            optimizer.step(lambda rows, ys, model=model: losses(model, rows, ys), rows, ys)
    torch.testing.assert_close(
        flat(list(models[0].parameters())), flat(list(models[1].parameters())), rtol=1e-4, atol=1e-6
    )


def test_sparse_adam_takes_what_is_not_shared_and_says_so_of_what_is():
    model = Recommender(sparse=True)
    rows, (_, ys) = torch.arange(16) % 9, data(2)
    beside = torch.optim.SparseAdam(model.table.parameters(), lr=0.1)
    dense = [*model.trunk.parameters(), *model.heads.parameters()]
    optimizer = COST(torch.optim.SGD(dense, lr=0.1), model, shared=model.trunk, teleporter=None)
    start = model.table.weight.detach().clone()
    optimizer.step(lambda: losses(model, rows, ys))
    assert model.table.weight.grad.is_sparse
    beside.step()
    assert not torch.equal(model.table.weight[:9], start[:9])
    assert torch.equal(model.table.weight[9:], start[9:])

    start = flat(list(model.parameters()))
    inside = COST(torch.optim.SparseAdam(model.table.parameters()), model, shared=model.table, teleporter=None)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        inside.step(lambda: losses(model, rows, ys))
    assert torch.equal(flat(list(model.parameters())), start)


def test_shared_parameters_outside_of_the_model_and_learned_loss_weights_in_the_base():
    def build():
        torch.manual_seed(0)
        return net(dropout=0.0), nn.Linear(6, 6), nn.Parameter(torch.zeros(2))

    def values(model, outside, logs, x, ys):
        return [v * torch.exp(-s) + s for v, s in zip(losses(model, outside(x), ys), logs, strict=True)]

    (model, outside, logs), plain = build(), build()
    everything = [*model.parameters(), *outside.parameters(), logs]
    optimizer = COST(
        torch.optim.AdamW(everything, lr=0.01), model, shared=[outside, model.trunk], weighting=EqualWeighting(),
        teleporter=None,
    )  # fmt: skip
    theirs = [*plain[0].parameters(), *plain[1].parameters(), plain[2]]
    base = torch.optim.AdamW(theirs, lr=0.01)
    for seed in range(4):
        x, ys = data(2, seed=seed)
        optimizer.step(lambda: values(model, outside, logs, x, ys))  # noqa: B023
        base.zero_grad()
        sum(values(*plain, x, ys)).backward()
        base.step()
    torch.testing.assert_close(flat(everything), flat(theirs), rtol=1e-4, atol=1e-6)
    assert float(logs.detach().abs().min()) > 0


def test_the_quiet_run():
    """Nothing above may warn in an ordinary compiled run."""
    model = net(dropout=0.0)
    closure, wrapped = compiled(model, "trunk", "aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, closure, wrapped, steps=2, weighting=cost_mtl.CAGrad())

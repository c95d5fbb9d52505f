"""Memory formats, sparse embeddings, parameters outside of the model, learned loss weights."""

import warnings

import pytest
import torch
from torch import nn

from cost_mtl import COST, DenseTeleporter, EqualWeighting, LoRATeleporter, TeleportSchedule
from tests.nets import MultiHead, data, flat, losses, mlp


def always(M):
    return True


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
@pytest.mark.parametrize("teleporter", [None, DenseTeleporter()], ids=["none", "dense"])
def test_sparse_embeddings_train_as_dense_ones(base, shared, teleporter):
    # In float64: a teleport magnifies the last digits, in which the two ways of adding up differ.
    models = [Recommender(sparse=True).double(), Recommender(sparse=False).double()]
    for model in models:
        mine = [model.table, model.trunk] if shared == "table and trunk" else model.trunk
        optimizer = COST(
            base(model.parameters(), lr=0.1), model, shared=mine, teleporter=teleporter, trigger=always,
            schedule=TeleportSchedule(start=1, cooldown=2),
        )  # fmt: skip
        for seed in range(4):
            ys = [y.double() for y in data(2, seed=seed)[1]]
            rows = torch.randint(9, (16,), generator=torch.Generator().manual_seed(seed))
            optimizer.step(lambda rows, ys, model=model: losses(model, rows, ys), rows, ys)
    torch.testing.assert_close(
        flat(list(models[0].parameters())), flat(list(models[1].parameters())), rtol=1e-6, atol=1e-8
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
        return mlp(2), nn.Linear(6, 6), nn.Parameter(torch.zeros(2))

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


def test_parameters_in_neither_the_model_nor_the_base_are_said_once():
    """A second optimizer over them would see no gradient, and do nothing without a word."""
    model, logs, frozen = mlp(2), nn.Parameter(torch.zeros(2)), nn.Linear(6, 6).requires_grad_(False)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=None)
    x, ys = data(2)
    x.requires_grad_()  # an input is no parameter

    def closure():
        return [v * torch.exp(-s) + s for v, s in zip(losses(model, frozen(x), ys), logs, strict=True)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(closure)
        optimizer.step(closure)
    (said,) = caught
    assert "reach 1 parameters (shapes [2])" in str(said.message)
    assert said.filename == __file__
    inside = COST(torch.optim.SGD([*model.parameters(), logs], lr=0.1), model, shared=model.trunk, teleporter=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside.step(closure)

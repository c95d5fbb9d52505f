"""Micro-batches: ``step([closure, ...])`` is one update, the big batch's, in the memory of one micro-batch."""

import weakref

import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import COST, DenseTeleporter, TeleportSchedule
from tests.nets import conflicting, data, flat, losses, mlp

PARTS = 4


def setup(**settings):
    model = mlp(3, dtype=torch.float64)
    settings = {"shared": model.trunk, "teleporter": None} | settings
    return model, COST(torch.optim.AdamW(model.parameters(), lr=0.01), model, **settings)


def micro_batches(K=3, n=16, seed=1):
    x, ys = data(K, n, seed=seed)
    x, ys = x.double(), [y.double() for y in ys]
    return [(x[k::PARTS], [y[k::PARTS] for y in ys]) for k in range(PARTS)], (x, ys)


def parts_of(model, parts):
    return [lambda part=part: losses(model, *part) for part in parts]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shared": None},
        {"every": 2},
        {"heads": "weighted"},
        {"max_norm": 0.01},
        {"weighting": cost_mtl.NashMTL()},
        {"weighting": cost_mtl.weighting.GradDrop()},
        {"weighting": cost_mtl.weighting.FAMO()},
    ],
    ids=lambda s: "-".join(map(str, s)) or "default",
)
def test_it_is_the_big_batch_update(settings):
    (model, optimizer), (big, reference) = setup(**settings), setup(**settings)
    for seed in range(3):
        parts, whole = micro_batches(seed=seed)
        a = optimizer.step(parts_of(model, parts))
        b = reference.step(lambda: losses(big, *whole))  # noqa: B023
        torch.testing.assert_close(a, b, rtol=1e-10, atol=0.0)
        torch.testing.assert_close(optimizer.last_step.weights, reference.last_step.weights, rtol=1e-7, atol=0.0)
    torch.testing.assert_close(flat(list(model.parameters())), flat(list(big.parameters())), rtol=1e-8, atol=1e-10)


def test_one_task_in_micro_batches_is_plain_accumulation():
    model, plain = mlp(1, dtype=torch.float64), mlp(1, dtype=torch.float64)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model)
    parts, _ = micro_batches(1)
    optimizer.step(parts_of(model, parts))
    for part in parts:
        (losses(plain, *part)[0] / PARTS).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(flat(list(model.parameters())), flat(list(plain.parameters())), rtol=1e-12, atol=1e-14)


def test_a_tuple_and_one_closure_in_a_list_will_do():
    (model, optimizer), (big, reference) = setup(), setup()
    _, whole = micro_batches()
    optimizer.step(tuple(parts_of(model, [whole])))
    reference.step(lambda: losses(big, *whole))
    assert torch.equal(flat(list(model.parameters())), flat(list(big.parameters())))


def test_each_micro_batch_is_evaluated_once_and_freed_before_the_next():
    model, optimizer = setup()
    parts, _ = micro_batches()
    alive, calls = [], []

    def closure(k):
        assert all(ref() is None for ref in alive), "the graph of an earlier micro-batch is still there"
        calls.append(k)
        hidden = model.trunk(parts[k][0])
        alive.append(weakref.ref(hidden))
        return [(head(hidden) - y).square().mean() for head, y in zip(model.heads, parts[k][1], strict=True)]

    optimizer.step([lambda k=k: closure(k) for k in range(PARTS)])
    assert calls == list(range(PARTS))


def test_memory_stays_one_buffer():
    """Task gradients of every micro-batch are added up in the same [K, m], and ``.grad`` is a row of it."""
    model, optimizer = setup()
    parts, _ = micro_batches()
    places = set()
    for _ in range(3):
        optimizer.step(parts_of(model, parts))
        places.add(optimizer._buffer.data_ptr())
        assert optimizer._buffer.shape == (3, sum(p.numel() for p in model.trunk.parameters()))
    assert len(places) == 1
    storage = optimizer._buffer.untyped_storage().data_ptr()
    assert all(p.grad.untyped_storage().data_ptr() == storage for p in model.trunk.parameters())


def test_a_task_without_labels_in_a_micro_batch_counts_as_zero_there():
    model, optimizer = setup()
    big, reference = setup()
    parts, _ = micro_batches()

    def partly(net, k):
        values = losses(net, *parts[k])
        return [values[0], values[1], values[2] if k == 0 else torch.zeros(())]

    optimizer.step([lambda k=k: partly(model, k) for k in range(PARTS)])
    reference.step(
        lambda: [sum(values) / PARTS for values in zip(*(partly(big, k) for k in range(PARTS)), strict=True)]
    )
    torch.testing.assert_close(flat(list(model.parameters())), flat(list(big.parameters())), rtol=1e-8, atol=1e-10)


def test_sparse_gradients_add_up_and_stay_sparse():
    """The table is not shared: it gets the plain sum over the tasks, averaged over the micro-batches."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(8, 4, sparse=True), "head": nn.Linear(4, 1)})
    table, head = model["table"], model["head"]
    rows = [torch.tensor([0, 1]), torch.tensor([1, 2])]

    def values(r):
        return [table(r).square().sum(), head(table(r)).sum()]

    (want,) = torch.autograd.grad(sum(sum(values(r)) for r in rows) / 2, table.weight)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=1.0), model, shared=head, teleporter=None)
    optimizer.step([lambda r=r: values(r) for r in rows])
    assert table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad.to_dense(), want.to_dense())


def test_a_teleport_uses_all_micro_batches():
    model, x, ys = conflicting()
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk,
        schedule=TeleportSchedule(start=0, cooldown=1), teleporter=DenseTeleporter(),
    )  # fmt: skip
    parts = [(x[k::2], [y[k::2] for y in ys]) for k in range(2)]
    whole = torch.stack(losses(model, x, ys)).detach()
    optimizer.step(parts_of(model, parts))
    report = optimizer.last_step.teleport
    assert report.accepted, report.reason
    torch.testing.assert_close(report.losses_before.float(), whole, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(report.losses_after.float(), whole, rtol=0.011, atol=0.0)


def test_batches_are_handed_to_every_closure():
    model, optimizer = setup()
    _, (x, ys) = micro_batches()
    seen = []

    def closure(k, x, ys):
        seen.append((k, x.shape))
        return losses(model, x[k::PARTS], [y[k::PARTS] for y in ys])

    optimizer.step([lambda x, ys, k=k: closure(k, x, ys) for k in range(PARTS)], x, ys)
    assert seen == [(k, x.shape) for k in range(PARTS)]


@pytest.mark.parametrize("nothing", [[], ()])
def test_no_micro_batch_at_all_is_refused(nothing):
    _, optimizer = setup()
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(nothing)


def test_micro_batches_with_different_tasks_are_refused_before_any_update():
    model, optimizer = setup()
    start = flat(list(model.parameters()))
    parts, _ = micro_batches()
    first, second = parts_of(model, parts[:2])
    with pytest.raises(ValueError, match=r"expected the tasks \['0', '1', '2'\] in every micro-batch"):
        optimizer.step([first, lambda: second()[:2]])
    assert torch.equal(flat(list(model.parameters())), start)


def test_a_nan_in_one_micro_batch_names_its_task():
    model, optimizer = setup()
    start = flat(list(model.parameters()))
    parts, _ = micro_batches()
    parts[2][1][1][:] = float("nan")
    with pytest.raises(FloatingPointError, match=r"task '1' .*"):
        optimizer.step(parts_of(model, parts))
    assert torch.equal(flat(list(model.parameters())), start)

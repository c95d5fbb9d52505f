"""Each process averages its share of the task gradients' columns; the update is the one of all."""

import pytest
import torch

import cost_mtl
from cost_mtl import COST, DenseTeleporter, TeleportSchedule
from cost_mtl.distributed import shares
from tests.distributed.harness import assert_in_step, joined, parameters, share, spawn
from tests.nets import losses, mlp

WIDTH = 7
"""Makes 105 shared parameters: neither two nor four processes can share them evenly."""


def setup(rank, world, kind):
    torch.manual_seed(0)
    model = mlp(3, width=WIDTH, dtype=torch.float64)
    optimizer = COST(
        torch.optim.AdamW(model.parameters(), lr=0.01), model, shared=model.trunk, max_norm=0.5, trigger=lambda M: True,
        teleporter=DenseTeleporter() if kind == "teleports" else None, schedule=TeleportSchedule(start=0, cooldown=1),
        weighting=cost_mtl.weighting.GradDrop() if kind == "GradDrop" else cost_mtl.FairGrad(2.0),
    )  # fmt: skip
    return model, optimizer


def train(rank, world, kind, without):
    if without:

        def refuse(*_, **__):
            raise RuntimeError("ProcessGroupFake does not support reduce_scatter")

        shares._reduce_scatter = refuse
    model, optimizer = setup(rank, world, kind)
    for seed in range(3):
        optimizer.step(lambda x, ys: losses(model, x, ys), *share(rank, joined(seed, world, 3)))
    return [parameters(model), optimizer.last_step.gramian, optimizer.last_step.weights]


@pytest.mark.parametrize(
    ("world", "kind", "without"),
    [(2, "plain", False), (4, "plain", False), (2, "GradDrop", False), (4, "teleports", False), (2, "plain", True)],
)
def test_the_update_is_one_process_s_whatever_the_backend_has(world, kind, without):
    results = spawn(world, train, world, kind, without)
    assert_in_step(results)
    model, optimizer = setup(0, 1, kind)
    for seed in range(3):
        optimizer.step(lambda x, ys: losses(model, x, ys), *joined(seed, world, 3))
    torch.testing.assert_close(results[0][0], parameters(model), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(results[0][1], optimizer.last_step.gramian, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(results[0][2], optimizer.last_step.weights, rtol=1e-6, atol=0.0)


def look_at_the_buffer(rank, world):
    model, optimizer = setup(rank, world, "plain")
    batch = share(rank, joined(0, world, 3))
    own = cost_mtl.task_gradients(losses(model, *batch), model.trunk.parameters())
    optimizer.step(lambda x, ys: losses(model, x, ys), *batch)
    return own, optimizer._buffer


@pytest.mark.parametrize("world", [2, 4])
def test_a_process_has_the_mean_of_its_share_of_the_columns_only(world):
    """All shares together are the whole; outside of its share a process keeps its own gradients (row 0 becomes d)."""
    results = spawn(world, look_at_the_buffer, world)
    mean = torch.stack([own for own, _ in results]).mean(dim=0)
    m = mean.shape[1]
    each = m // world
    for rank, (own, buffer) in enumerate(results):
        mine = slice(rank * each, m if rank == world - 1 else (rank + 1) * each)
        torch.testing.assert_close(buffer[1:, mine], mean[1:, mine])
        others = [k for k in range(world * each) if not mine.start <= k < mine.stop]
        torch.testing.assert_close(buffer[1:, others], own[1:, others])


def fewer_columns_than_processes(rank):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model, weighting=cost_mtl.EqualWeighting(),
        teleporter=None,
    )  # fmt: skip
    optimizer.step(lambda: [(rank + 1.0) * model.weight.sum(), 2.0 * model.weight.sum()])
    return [model.weight.detach().clone()]


def test_fewer_columns_than_processes():
    results = spawn(2, fewer_columns_than_processes)
    assert_in_step(results)
    torch.testing.assert_close(results[0][0], torch.tensor([[1 - 0.1 * 3.5]]))

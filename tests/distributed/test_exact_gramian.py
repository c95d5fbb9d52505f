"""Near a stationary point M is computed again in float64, from shares of the columns and from shards as well."""

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cost_mtl
from tests.distributed.harness import assert_in_step, spawn

ROWS, COLUMNS = 4, 200


def nearly_opposed():
    """Two gradients [2, 800], float32, at an angle of pi - 1e-4: 1 + cos = 5e-9, far below what float32 sums tell."""
    g = np.random.default_rng(3).standard_normal((2, ROWS * COLUMNS))
    return torch.from_numpy(np.stack((g[0], 7 * (1e-4 * g[1] - g[0])))).float()


def step(rank, world, sharded):
    torch.manual_seed(0)
    model, G = torch.nn.Linear(COLUMNS, ROWS, bias=False), nearly_opposed().view(2, ROWS, COLUMNS)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = cost_mtl.COST(base, model, shared=model, weighting=cost_mtl.NashMTL(), teleporter=None)
    optimizer.step(lambda: [(model(torch.eye(COLUMNS)) * g.T).sum() for g in G])
    report = optimizer.last_step
    return [report.weights, report.gramian, report.solver.status]


@pytest.mark.parametrize("sharded", [False, True])
def test_in_two_processes_the_weights_are_those_of_the_exact_gramian(sharded):
    results = spawn(2, step, 2, sharded)
    assert_in_step(results)
    w, M, status = results[0]
    G = nearly_opposed().double()
    torch.testing.assert_close(M, G @ G.T, rtol=1e-12, atol=0)
    assert status == "converged"
    assert (w * (G @ G.T @ w) - 1).abs().max() < 1e-5

"""A combination that does not fit: every process raises, or leaves the step out, and nothing has moved on any."""

import pytest
import torch

from cost_mtl import COST
from tests.distributed.harness import assert_in_step, joined, refused, share, spawn
from tests.distributed.test_sharding import full, sharded
from tests.nets import losses, mlp
from tests.optimizer.bases import everything


def overflowing_in_the_second_step(rank, kind, policy):
    world, calls = 2, []

    def weighting(M):
        calls.append(1)
        return torch.full((2,), 1e45 if len(calls) == 2 else 1.0, dtype=torch.float64)

    model = sharded(world, dtype=torch.float32) if kind == "pieces" else mlp(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, shared=model.trunk,
                     teleporter=None, weighting=weighting, on_nonfinite=policy)  # fmt: skip
    told = []
    for seed in range(3):
        x, ys = share(rank, joined(seed, world, dtype=torch.float32))
        before = everything(model, optimizer) if kind == "whole" else full(model).tolist()
        step = lambda x=x, ys=ys: optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)  # noqa: E731
        if seed == 1 and policy == "raise":
            told.append(refused(step, FloatingPointError))
        else:
            step()
        after = everything(model, optimizer) if kind == "whole" else full(model).tolist()
        assert (before == after) == (seed == 1)
    assert optimizer.progress.skipped == (policy == "skip")
    assert all("does not fit into float32" in message for message in told)
    return [full(model), len(told), optimizer.progress.step]


@pytest.mark.parametrize("kind", ["whole", "pieces"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_all_processes_decide_alike(kind, policy):
    results = spawn(2, overflowing_in_the_second_step, kind, policy)
    assert_in_step(results)
    assert results[0][1:] == [int(policy == "raise"), 2 if policy == "raise" else 3]

"""Ways to set processes up: all of them are the same training, or refused on every process before anything moves."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import cost_mtl
from cost_mtl import COST, DenseTeleporter, TeleportSchedule
from cost_mtl.distributed.consistency import communicates
from tests.distributed.harness import assert_in_step, joined, parameters, refused, share, spawn
from tests.distributed.test_data_parallel import train_a_share
from tests.nets import convnet, losses, mlp

DDP_OPTIONS = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "no buffers": {"broadcast_buffers": False},
}


def train_somehow(rank, how):
    model = mlp(2, seed=rank if how == "seeds differ" else 0, dtype=torch.float64)
    wrapped, settings = model, {}
    if how in DDP_OPTIONS:
        wrapped = DistributedDataParallel(model, **DDP_OPTIONS[how])
    if how == "parts":  # DDP around parts of the model
        model.trunk = DistributedDataParallel(model.trunk)
        model.heads = nn.ModuleList(DistributedDataParallel(head) for head in model.heads)
    if how == "compiled":
        wrapped = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    if how == "given group":
        settings["process_group"] = dist.group.WORLD
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.1), wrapped, shared=model.trunk, teleporter=None, **settings
    )
    for seed in range(2):
        x, ys = share(rank, joined(seed, 2))
        if how == "plain":
            wrapped(x)  # a forward pass for something else leaves DDP's reducer waiting
        optimizer.step(lambda x, ys: losses(wrapped, x, ys), x, ys)
    return [parameters(model)]


@pytest.mark.parametrize("how", [*DDP_OPTIONS, "parts", "compiled", "given group", "seeds differ"])
def test_every_way_to_set_it_up_is_the_same_training(how):
    results = spawn(2, train_somehow, how)
    assert_in_step(results)
    model = mlp(2, dtype=torch.float64)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=None)
    for seed in range(2):
        optimizer.step(lambda x, ys: losses(model, x, ys), *joined(seed, 2))
    torch.testing.assert_close(results[0][0], parameters(model), rtol=1e-8, atol=1e-10)


def share_the_optimizer_out(rank, zero, teleporter):
    model = mlp(2, dtype=torch.float64)
    wrapped = DistributedDataParallel(model)
    if zero:
        base = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        base = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = COST(
        base, wrapped, shared=model.trunk, teleporter=teleporter, trigger=lambda M: True,
        schedule=TeleportSchedule(start=1, cooldown=1),
    )  # fmt: skip
    for seed in range(4):
        optimizer.step(lambda x, ys: losses(wrapped, x, ys), *share(rank, joined(seed, 2)))
    return [parameters(model), optimizer.progress.attempts]


@pytest.mark.parametrize("teleporter", [None, DenseTeleporter()], ids=["none", "dense"])
def test_an_optimizer_that_is_shared_out_over_the_processes(teleporter):
    results = spawn(2, share_the_optimizer_out, True, teleporter)
    assert_in_step(results)
    if teleporter is None:
        assert_in_step([*results, *spawn(2, share_the_optimizer_out, False, None)])
    else:
        assert results[0][1] >= 2


def late_group(rank, start):
    model = mlp(2, seed=rank)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk)
    start()
    optimizer.step(lambda x, ys: losses(model, x, ys), *share(rank, joined(0, 2, dtype=torch.float32)))
    return [parameters(model)]


def test_a_group_that_is_initialised_after_cost_is_made():
    assert_in_step(spawn(2, late_group, init=False))


def train_in_pairs(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = mlp(2)
    mine = pairs[rank // 2]
    message = refused(
        lambda: COST(
            torch.optim.SGD(model.parameters(), lr=0.1), model, process_group=pairs[1 - rank // 2]
        ), TypeError
    )  # fmt: skip
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, process_group=mine)
    optimizer.step(lambda x, ys: losses(model, x, ys), *share(rank, joined(0, 4, dtype=torch.float32)))
    return [parameters(model)], message


def test_a_group_of_ones_own():
    results = spawn(4, train_in_pairs)
    assert_in_step([result for result, _ in results[:2]])
    assert_in_step([result for result, _ in results[2:]])
    assert not torch.equal(results[0][0][0], results[2][0][0])
    assert all("this process belongs to" in message for _, message in results)


def train_alone(rank):
    model = mlp(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, process_group=False)
    if rank == 0:  # the other one makes no step, so anything collective would hang
        optimizer.step(lambda x, ys: losses(model, x, ys), *share(rank, joined(0, 2, dtype=torch.float32)))
    return [parameters(model)]


def test_opting_out():
    results = spawn(2, train_alone)
    assert torch.equal(results[1][0], parameters(mlp(2)))
    assert not torch.equal(results[0][0], results[1][0])


def statistics(rank, wrap, steps):
    model = convnet(dropout=0.0)
    wrapped = DistributedDataParallel(model) if wrap == "DDP" else model
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.0), wrapped, shared=model.trunk, teleporter=None)
    for seed in range(steps):
        x, ys = share(rank, joined(seed, 2, shape=(2, 8, 8), dtype=torch.float32))
        optimizer.step(lambda x, ys: losses(wrapped, x, ys), x, ys)
    return list(model.buffers())


def test_batch_norm_statistics_are_the_first_process_s_as_in_ddp():
    """DDP hands them out before each forward pass, so they differ by the last batch."""
    ddp, plain = spawn(2, statistics, "DDP", 3), spawn(2, statistics, "plain", 3)
    for rank in range(2):
        assert_in_step([ddp[rank], plain[rank]])
    model = convnet(dropout=0.0)
    for seed in range(2):
        model(share(0, joined(seed, 2, shape=(2, 8, 8), dtype=torch.float32))[0])
    for rank in range(2):
        last = copy.deepcopy(model)
        last(share(rank, joined(2, 2, shape=(2, 8, 8), dtype=torch.float32))[0])
        for want, got in zip(last.buffers(), ddp[rank], strict=True):
            torch.testing.assert_close(got, want)
    assert not torch.equal(ddp[0][0], ddp[1][0])


# ------------------------------------------------------------------------------------ refusals


def refusals(rank):
    batch = share(rank, joined(0, 2, dtype=torch.float32))

    def cost(model, wrapped=None, **settings):
        return COST(torch.optim.SGD(model.parameters(), lr=0.1), wrapped or model, teleporter=None, **settings)

    def step(optimizer, closure):
        return lambda: optimizer.step(closure, *batch)

    said = {}
    model = mlp(2)
    ddp = DistributedDataParallel(model)
    start = parameters(model)
    said["opted out"] = refused(lambda: cost(model, ddp, process_group=False), ValueError)
    said["inner"] = refused(step(cost(model), lambda x, ys: losses(ddp, x, ys)), ValueError)
    said["no group"] = refused(lambda: cost(model, process_group=True), TypeError)

    def order(x, ys):
        a, b = losses(ddp, x, ys)
        return {"a": a, "b": b} if rank == 0 else {"b": b, "a": a}

    said["order"] = refused(step(cost(model, ddp), order), ValueError)
    said["number"] = refused(step(cost(model, ddp), lambda x, ys: losses(ddp, x, ys)[: 2 - rank]), ValueError)
    said["no graph"] = refused(
        step(cost(model, ddp), lambda x, ys: [v.detach() for v in losses(ddp, x, ys)]), ValueError
    )
    said["static"] = refused(lambda: cost(model, DistributedDataParallel(model, static_graph=True)), ValueError)
    uneven = DistributedDataParallel(mlp(2))
    with uneven.join():
        said["join"] = refused(step(cost(uneven), lambda x, ys: losses(uneven, x, ys)), RuntimeError)
    other = mlp(2, width=8 + rank)
    said["shapes"] = refused(step(cost(other), lambda x, ys: losses(other, x, ys)), ValueError)
    assert torch.equal(parameters(model), start)
    optimizer = cost(model, ddp)
    step(optimizer, lambda x, ys: losses(ddp, x, ys))()  # and after all of this it works
    return [parameters(model)], said


def test_what_cannot_work_is_said_on_every_process_before_anything_moves():
    results = spawn(2, refusals)
    assert_in_step([result for result, _ in results])
    for _, said in results:
        assert "unsynchronised" in said["opted out"]
        assert "pass the wrapped model" in said["inner"]
        assert "process_group: expected" in said["no group"]
        assert "same tasks in the same order on every process" in said["order"]
        assert "same tasks in the same order on every process" in said["number"]
        assert "got 2 of which none has a graph" in said["no graph"]
        assert "join()" in said["join"]
        assert "static_graph" in said["static"]
        assert "differ in number, shape, dtype" in said["shapes"]


def test_a_group_without_torch_distributed_is_refused():
    model = mlp(2)
    with pytest.raises(TypeError, match="process_group: expected None, False or"):
        COST(torch.optim.SGD(model.parameters(), lr=0.1), model, process_group="world")


def test_sync_batch_norm_is_known_to_communicate():
    """It needs a GPU to run; that its backward passes have to be in step is looked up here."""
    model = convnet()
    assert not communicates(model, list(model.parameters()))
    assert communicates(nn.SyncBatchNorm.convert_sync_batchnorm(model), list(model.parameters()))


def test_more_than_a_bucket(monkeypatch):
    """The same result whatever the size of the buckets."""
    from cost_mtl.distributed import collectives

    results = {}
    for size in (7, 1 << 23):
        monkeypatch.setattr(collectives, "BUCKET", size)
        results[size] = spawn(2, train_a_share, 2, "plain", {})
    assert_in_step([*results[7], *results[1 << 23]])


def test_a_warning_free_run():
    assert spawn(2, quiet) == [True, True]


def quiet(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_a_share(rank, 2, "DDP", {})
    return True


def test_the_conflict_of_the_joined_batch_decides():
    """On either process alone the two gradients get along; their means do not."""
    assert spawn(2, conflicts) == [(False, True), (False, True)]


def conflicts(rank):
    gradients = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[-3.0, 0.5], [-0.5, 0.5]]])[rank]
    model = nn.Linear(2, 1, bias=False)
    alone = cost_mtl.WeakConflict()(gradients @ gradients.T)
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model, schedule=TeleportSchedule(start=0),
        trigger=cost_mtl.WeakConflict(), teleporter=DenseTeleporter(),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step(lambda: [1 + (g * model.weight[0]).sum() for g in gradients])
    torch.testing.assert_close(
        optimizer.last_step.norms.float(), torch.tensor([[-1.0, 0.25], [0.25, 0.25]]).norm(dim=1)
    )
    return alone, optimizer.last_step.conflict

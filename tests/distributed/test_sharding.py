"""FSDP2 (``fully_shard``): each process keeps its pieces of G, and the update is the one process's."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cost_mtl
from cost_mtl import COST
from cost_mtl._torch.dtensor import pieces_group
from tests.distributed.harness import assert_in_step, joined, refused, share, spawn
from tests.nets import flat, losses, mlp

SETTINGS = {
    "default": {},
    "found": {"shared": None},
    "every": {"every": 2},
    "weighted": {"heads": "weighted"},
    "clipped": {"max_norm": 0.05},
    "FAMO": {"weighting": cost_mtl.weighting.FAMO()},
    "one task": {"K": 1},
    "micro-batches": {"parts": 2},
}
BASES = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}


def sharded(world, K=2, dtype=torch.float64, **options):
    model = mlp(K, dtype=dtype)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model.trunk[0], model.trunk[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full(model):
    return flat([p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()])


def train(model, batches, *, K=2, parts=1, base="AdamW", **settings):
    settings = {"shared": model.trunk, "teleporter": None} | settings
    optimizer = COST(BASES[base](model.parameters(), lr=0.01), model, **settings)
    for x, ys in batches:
        closures = [lambda x, ys, k=k: losses(model, x[k::parts], [y[k::parts] for y in ys]) for k in range(parts)]
        optimizer.step(closures[0] if parts == 1 else closures, x, ys)
    return optimizer


def train_sharded(rank, world, settings):
    K = settings.get("K", 2)
    model = sharded(world, K)
    optimizer = train(model, [share(rank, joined(seed, world, K)) for seed in range(4)], **settings)
    report = optimizer.last_step
    return [full(model), report.losses, report.weights, report.gramian if report.gramian is not None else 0.0]


@pytest.mark.parametrize(
    ("world", "base", "name"),
    [*((2, "AdamW", name) for name in SETTINGS), (2, "SGD", "default"), (4, "AdamW", "default")],
)
def test_equal_to_one_process_on_the_joined_batch(world, base, name):
    settings = SETTINGS[name] | {"base": base}
    K = settings.get("K", 2)
    results = spawn(world, train_sharded, world, settings)
    assert_in_step(results)
    model = mlp(K, dtype=torch.float64)
    optimizer = train(model, [joined(seed, world, K) for seed in range(4)], **settings)
    torch.testing.assert_close(results[0][0], flat(list(model.parameters())), rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(results[0][1], optimizer.last_step.losses, rtol=1e-7, atol=0.0)
    torch.testing.assert_close(results[0][2], optimizer.last_step.weights, rtol=1e-6, atol=0.0)
    if optimizer.last_step.gramian is not None:
        torch.testing.assert_close(results[0][3], optimizer.last_step.gramian, rtol=1e-7, atol=1e-12)


def only_its_pieces(rank):
    """G's columns on this process, and the gradients' type."""
    model = sharded(2)
    optimizer = train(model, [share(rank, joined(0, 2))])
    mine = sum(p.to_local().numel() for p in model.trunk.parameters())
    kinds = {(type(p.grad), p.grad.placements, p.grad.shape == p.shape) for p in model.parameters()}
    return optimizer._buffer.shape[1], mine, kinds == {(DTensor, (Shard(0),), True)}


def test_a_process_holds_its_share_of_the_task_gradients_only():
    results = spawn(2, only_its_pieces)
    total = sum(p.numel() for p in mlp(2).trunk.parameters())
    assert all(columns == mine for columns, mine, _ in results)
    assert sum(columns for columns, _, _ in results) == total
    assert all(kinds for _, _, kinds in results)


def nan_in_one_piece(rank, policy):
    model = sharded(2)
    optimizer = train(model, [share(rank, joined(0, 2))], on_nonfinite=policy)
    start = full(model)
    x, ys = share(rank, joined(1, 2))
    if rank == 0:
        ys[1] = ys[1] * float("nan")

    def step():
        optimizer.step(lambda: losses(model, x, ys))

    message = refused(step, FloatingPointError) if policy == "raise" else step()
    assert torch.equal(full(model), start)
    return [message, optimizer.last_step.skipped]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_nan_is_everyones(policy):
    results = spawn(2, nan_in_one_piece, policy)
    assert_in_step(results)
    assert results[0][1] is (policy == "skip")
    assert policy == "skip" or "task '1'" in results[0][0]


def no_teleports(rank):
    model = sharded(2)
    batch = share(rank, joined(0, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = COST(
            torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, trigger=lambda M: True,
            schedule=cost_mtl.TeleportSchedule(start=0),
        )  # fmt: skip
        for _ in range(2):
            optimizer.step(lambda x, ys: losses(model, x, ys), *batch)
    said = [str(w.message) for w in caught if "sharded" in str(w.message)]
    start = full(model)
    message = refused(lambda: optimizer.teleport(lambda x, ys: losses(model, x, ys), *batch), RuntimeError)
    assert torch.equal(full(model), start)
    return said, message, optimizer.last_step.teleport


def test_teleports_are_refused_once_and_training_goes_on():
    for said, message, teleport in spawn(2, no_teleports):
        assert len(said) == 1
        assert "no teleports" in said[0]
        assert message == said[0]
        assert teleport is None


def merge_an_adapter(rank):
    from peft import LoraConfig, inject_adapter_in_model

    model = sharded(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["trunk.0"]), model)
    losses(model, *share(rank, joined(0, 2)))
    return refused(lambda: model.trunk[0].merge(), RuntimeError)


def test_why_there_are_no_teleports():
    """Once PEFT can merge into sharded weights this fails, and the refusal should go."""
    assert all("mixed torch.Tensor and DTensor" in message for message in spawn(2, merge_an_adapter))


def missing_graph(rank):
    model = sharded(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=None)
    x, ys = share(rank, joined(0, 2))

    def closure(times_zero):
        outputs = model(x)
        values = [(out - y).square().mean() for out, y in zip(outputs, ys, strict=True)]
        if rank == 1:
            values[1] = 0 * outputs[1].sum() if times_zero else torch.zeros((), dtype=torch.float64)
        return values

    start = full(model)
    message = refused(lambda: optimizer.step(lambda: closure(False)), ValueError)
    assert torch.equal(full(model), start)
    optimizer.step(lambda: closure(True))
    return [full(model), message.split(", got")[0]]


def test_a_task_without_a_graph_on_one_process_is_refused_with_the_fix():
    results = spawn(2, missing_graph)
    assert_in_step(results)
    assert "every task needs a backward pass on every process" in results[0][1]


def mixed(rank):
    model = mlp(2)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.trunk[0], mesh=mesh)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=None)
    batch = share(rank, joined(0, 2, dtype=torch.float32))
    half = refused(lambda: optimizer.step(lambda x, ys: losses(model, x, ys), *batch), ValueError)
    grid = init_device_mesh("cpu", (1, 2))
    cut_twice = nn.Parameter(distribute_tensor(torch.zeros(4, 4), grid, [Shard(0), Shard(1)]))
    whole = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Replicate()]))
    return (
        half,
        refused(lambda: pieces_group([cut_twice]), ValueError),
        refused(lambda: pieces_group([whole]), ValueError),
    )


def test_other_ways_to_cut_are_refused():
    for half, twice, whole in spawn(2, mixed):
        assert "all parameters to be sharded by fully_shard or none" in half
        assert "along one dimension" in twice
        assert "along one dimension" in whole


def resumed(rank):
    torch.manual_seed(0)
    batches = [share(rank, joined(seed, 2)) for seed in range(4)]
    model = sharded(2)
    optimizer = train(model, batches[:2], weighting=cost_mtl.NashMTL())
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    other = sharded(2)
    other.load_state_dict(weights)
    again = COST(
        torch.optim.AdamW(other.parameters(), lr=0.01), other, shared=other.trunk, weighting=cost_mtl.NashMTL(),
        teleporter=None,
    )  # fmt: skip
    again.load_state_dict(saved)
    for x, ys in batches[2:]:
        optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)
        again.step(lambda x, ys: losses(other, x, ys), x, ys)
    return [full(model), full(other)]


def test_checkpoints_of_sharded_parameters():
    for model, other in spawn(2, resumed):
        assert torch.equal(model, other)


def half_precision(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(2, dtype=torch.float32, mp_policy=policy)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=None)
    for seed in range(2):
        x, ys = share(rank, joined(seed, 2, dtype=torch.float32))
        optimizer.step(lambda x, ys: losses(model, x, [y.bfloat16() for y in ys]), x, ys)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    return [full(model)]


def test_fsdps_own_mixed_precision():
    results = spawn(2, half_precision)
    assert_in_step(results)
    model = mlp(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=None)
    for seed in range(2):
        optimizer.step(lambda x, ys: losses(model, x, ys), *joined(seed, 2, dtype=torch.float32))
    start = flat(list(mlp(2).parameters()))
    moved, want = results[0][0] - start, flat(list(model.parameters())) - start
    assert float((moved - want).norm() / want.norm()) < 0.05

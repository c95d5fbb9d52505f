"""Two and four processes (gloo, CPU): in step to the last bit, and equal to one process on the joined batch."""

import copy

import peft  # noqa: F401  (imported once, before the processes are forked)
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import cost_mtl
from cost_mtl import COST, Acceptance, DenseTeleporter, LoRATeleporter, TeleportSchedule
from tests.distributed.harness import N, assert_in_step, joined, parameters, refused, share, spawn
from tests.nets import conflicting, convnet, losses, mlp

# ------------------------------------------------------------------------------------ equal to one process


SETTINGS = {
    "default": {},
    "found": {"shared": None},
    "every": {"every": 2},
    "weighted": {"heads": "weighted"},
    "clipped": {"max_norm": 0.05},
    "Nash": {"weighting": cost_mtl.NashMTL()},
    "FAMO": {"weighting": cost_mtl.weighting.FAMO()},
    "one task": {"K": 1},
    "micro-batches": {"parts": 2},
    "teleports": {"teleporter": DenseTeleporter()},
}


def steps_of(model, wrapped, batches, *, K=2, parts=1, **settings):
    settings = {"shared": model.trunk, "teleporter": None, "trigger": lambda M: True} | settings
    settings["schedule"] = TeleportSchedule(start=1, cooldown=1)
    optimizer = COST(torch.optim.AdamW(model.parameters(), lr=0.01), wrapped, **settings)
    accepted = 0
    for x, ys in batches:
        closures = [lambda x, ys, k=k: losses(wrapped, x[k::parts], [y[k::parts] for y in ys]) for k in range(parts)]
        values = optimizer.step(closures[0] if parts == 1 else closures, x, ys)
        report = optimizer.last_step.teleport
        accepted += report is not None and report.accepted
    return values, accepted


def train_a_share(rank, world, wrap, settings):
    K = settings.get("K", 2)
    model = mlp(K, dtype=torch.float64)
    wrapped = DistributedDataParallel(model) if wrap == "DDP" else model
    batches = [share(rank, joined(seed, world, K)) for seed in range(4)]
    values, accepted = steps_of(model, wrapped, batches, **settings)
    return [parameters(model), values, accepted, *[p.grad for p in model.parameters()]]


@pytest.mark.parametrize(
    ("world", "wrap", "name"),
    [
        *((2, wrap, name) for wrap in ("DDP", "plain") for name in SETTINGS),
        (4, "DDP", "default"),
        (4, "plain", "teleports"),
    ],
)
def test_equal_to_one_process_on_the_joined_batch(name, world, wrap):
    settings = SETTINGS[name]
    K = settings.get("K", 2)
    results = spawn(world, train_a_share, world, wrap, settings)
    assert_in_step(results)
    model = mlp(K, dtype=torch.float64)
    values, accepted = steps_of(model, model, [joined(seed, world, K) for seed in range(4)], **settings)
    torch.testing.assert_close(results[0][0], parameters(model), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(results[0][1], values, rtol=1e-5, atol=0.0)
    assert results[0][2] == accepted
    assert accepted >= (2 if name == "teleports" else 0)


# ------------------------------------------------------------------------------------ teleports


def train_with_teleports(rank, world, wrap, teleporter, resume):
    torch.manual_seed(rank)  # dropout and initial values differ from process to process
    model = convnet(seed=rank if wrap == "plain" else 0)
    wrapped = DistributedDataParallel(model) if wrap == "DDP" else model

    def make():
        return COST(
            torch.optim.AdamW(model.parameters(), lr=1e-3), wrapped, shared=model.trunk, teleporter=teleporter,
            trigger=lambda M: True, schedule=TeleportSchedule(start=1, cooldown=2), htr="momentum",
        )  # fmt: skip

    optimizer, reports, saved = make(), [], None
    for seed in range(8):
        if seed == 4 and resume:  # every process its own checkpoint, since each remembers its own batches
            optimizer = make()
            optimizer.load_state_dict(saved)
        x, ys = share(rank, joined(seed, world, shape=(2, 8, 8), dtype=torch.float32))
        optimizer.step(lambda x, ys: losses(wrapped, x, ys), x, ys)
        saved = copy.deepcopy(optimizer.state_dict())
        report = optimizer.last_step.teleport
        if report is not None:
            reports += [report.accepted, report.reason, report.drift, report.drift_heldout, report.sigma, report.length]
    return [parameters(model), optimizer.last_step.gramian, *reports], list(model.buffers())


EASY = Acceptance(min_angle=0.005, min_norm=0.005)  # random targets: hardly a move keeps the default promise


@pytest.mark.parametrize(
    "teleporter", [DenseTeleporter(acceptance=EASY), LoRATeleporter(rank=2, acceptance=EASY)], ids=["dense", "LoRA"]
)
@pytest.mark.parametrize(("world", "wrap"), [(2, "DDP"), (2, "plain"), (4, "DDP")])
def test_teleports_take_the_same_decision_and_move_everywhere(teleporter, world, wrap):
    """With remembered batches, batch norm and dropout; and again, resumed in the middle."""
    whole = spawn(world, train_with_teleports, world, wrap, teleporter, False)
    assert_in_step([result for result, _ in whole])
    reports = whole[0][0][2:]
    assert sum(r is True for r in reports[::6]) >= 1
    assert any(isinstance(heldout, float) for heldout in reports[3::6])  # a remembered batch was looked at
    if world == 2:
        resumed = spawn(world, train_with_teleports, world, wrap, teleporter, True)
        for (a, _), (b, _) in zip(whole, resumed, strict=True):
            assert_in_step([a, b])


# ------------------------------------------------------------------------------------ uneven labels and batches


def train_unevenly(rank, wrap, kind):
    """Task 1 has labels on process 0 only; under "nothing", process 1 has none at all."""
    model = mlp(2, dtype=torch.float64)
    wrapped = DistributedDataParallel(model) if wrap == "DDP" else model
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), wrapped, shared=None, teleporter=None)

    def closure(x, ys):
        outputs = wrapped(x)
        values = [(out - y).square().mean() for out, y in zip(outputs, ys, strict=True)]
        if rank == 1 and kind == "constant":
            values[1] = torch.zeros((), dtype=torch.float64)
        if rank == 1 and kind == "times zero":
            values[1] = 0 * outputs[1].sum()
        if rank == 1 and kind == "nothing":
            values = [torch.zeros((), dtype=torch.float64)] * 2
        return dict(zip("ab", values, strict=True))

    for seed in range(3):
        values = optimizer.step(closure, *share(rank, joined(seed, 2)))
    return [parameters(model), values, optimizer.progress.shared]


@pytest.mark.parametrize("wrap", ["DDP", "plain"])
@pytest.mark.parametrize("kind", ["constant", "times zero", "nothing"])
def test_a_process_without_labels_for_a_task(wrap, kind):
    results = spawn(2, train_unevenly, wrap, kind)
    assert_in_step(results)
    model = mlp(2, dtype=torch.float64)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=None)

    def closure(batch):
        first, second = (losses(model, *share(rank, batch)) for rank in range(2))
        second = [0 * second[0] if kind == "nothing" else second[0], 0 * second[1]]
        return [(a + b) / 2 for a, b in zip(first, second, strict=True)]

    for seed in range(3):
        optimizer.step(lambda: closure(joined(seed, 2)))  # noqa: B023
    torch.testing.assert_close(results[0][0], parameters(model), rtol=1e-8, atol=1e-10)
    assert results[0][2] == [0, 1, 2, 3]


def train_on_batches_of_different_size(rank):
    model = mlp(2, dtype=torch.float64)
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.1), DistributedDataParallel(model), shared=model.trunk, teleporter=None
    )
    x, ys = share(rank, joined(0, 2))
    n = N if rank == 0 else 3
    optimizer.step(lambda: losses(optimizer.model, x[:n], [y[:n] for y in ys]))
    return [parameters(model)]


def test_batches_of_different_size_count_alike_as_in_ddp():
    results = spawn(2, train_on_batches_of_different_size)
    assert_in_step(results)
    model = mlp(2, dtype=torch.float64)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=None)

    def part(rank, n):
        x, ys = share(rank, joined(0, 2))
        return losses(model, x[:n], [y[:n] for y in ys])

    optimizer.step(lambda: [(a + b) / 2 for a, b in zip(part(0, N), part(1, 3), strict=True)])
    torch.testing.assert_close(results[0][0], parameters(model), rtol=1e-8, atol=1e-10)


# ------------------------------------------------------------------------------------ NaN, overflow


def fail_on_one(rank, policy, scaled):
    model = mlp(2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    optimizer = COST(
        torch.optim.AdamW(model.parameters(), lr=0.1),
        DistributedDataParallel(model),
        shared=model.trunk,
        on_nonfinite=policy,
        scaler=scaler,
    )
    x, ys = share(rank, joined(0, 2, dtype=torch.float32))
    bad = float("nan") if rank == 1 else 1.0

    def closure():
        values = losses(optimizer.model, x, ys)
        if scaled:  # an overflow of the gradient, which the loss does not show
            values[1].register_hook(lambda grad: grad * bad)
        return [values[0], values[1] * (1.0 if scaled else bad)]

    start = parameters(model)
    message = "" if policy == "skip" or scaled else refused(lambda: optimizer.step(closure), FloatingPointError)
    if not message:
        optimizer.step(closure)
        assert optimizer.last_step.skipped
    assert torch.equal(parameters(model), start)
    optimizer.step(lambda: losses(optimizer.model, x, ys))
    return [parameters(model), message, scaler.get_scale() if scaled else 0.0]


@pytest.mark.parametrize(("policy", "scaled"), [("raise", False), ("skip", False), ("raise", True)])
def test_a_nan_on_one_process_is_everyones(policy, scaled):
    results = spawn(2, fail_on_one, policy, scaled)
    assert_in_step(results)
    assert bool(torch.isfinite(results[0][0]).all())
    assert ("task '1'" in results[0][1]) is (policy == "raise" and not scaled)
    assert results[0][2] == (2.0**9 if scaled else 0.0)


def short_of_memory(rank, call, error):
    """Process 1 runs out of memory in its n-th evaluation inside of a teleport; returns how many there were, too."""
    model, x, ys = conflicting()
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=1e-3), DistributedDataParallel(model), shared=model.trunk,
        teleporter=DenseTeleporter(), trigger=lambda M: True, schedule=TeleportSchedule(start=0, cooldown=1),
    )  # fmt: skip
    calls = []

    def closure():
        calls.append(1)
        values = losses(optimizer.model, x, ys)
        if rank == 1 and len(calls) == 1 + call:
            raise error
        return values

    start = parameters(model.trunk)
    optimizer.step(closure)
    report = optimizer.last_step.teleport
    assert not torch.equal(parameters(model.trunk), start)
    optimizer.step(lambda: losses(optimizer.model, x, ys))
    again = optimizer.last_step.teleport.accepted
    return [parameters(model), report.accepted, "out of memory" in report.reason, again, report.closure_calls]


def test_out_of_memory_on_one_process_ends_everyones_teleport():
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")
    whole = spawn(2, short_of_memory, -1, error)
    assert whole[0][1:3] == [True, False]
    for call in (1, 2, whole[0][4]):  # the last one are the gradients at the new point
        results = spawn(2, short_of_memory, call, error)
        assert_in_step([result[:4] for result in results])
        assert results[0][1:4] == [False, True, True]

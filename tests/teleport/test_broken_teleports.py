"""A teleport that is broken off, by an interrupt, an exception or a lack of memory, leaves no trace."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import COST, DenseTeleporter, LoRATeleporter, TeleportSchedule
from tests.nets import MultiHead, conflicting, flat, losses
from tests.optimizer.bases import everything, finite

NAN, INF = float("nan"), float("inf")


class Snapshot:
    """All that a teleport may touch."""

    def __init__(self, model, optimizer):
        self.state = everything(model, optimizer)
        self.modules = [(n, id(m), type(m), m.training) for n, m in model.named_modules()]
        self.params = [(n, id(p), p.requires_grad, p.data_ptr()) for n, p in model.named_parameters()]
        self.grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        self.streams = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())

    def same_as(self, other):
        grads = all(
            (a is None and b is None) or torch.equal(a, b) for a, b in zip(self.grads, other.grads, strict=True)
        )
        return grads and all(getattr(self, k) == getattr(other, k) for k in ("state", "modules", "params", "streams"))


class Failing:
    """A closure that raises in its n-th call."""

    def __init__(self, model, x, ys, call, error):
        self.model, self.x, self.ys, self.call, self.error, self.calls = model, x, ys, call, error, 0

    def __call__(self, *_):
        self.calls += 1
        random.random(), np.random.rand()
        values = losses(self.model, self.x, self.ys)
        if self.calls == self.call:
            raise self.error
        return values


def teleporting(teleporter, seed=0):
    """A model with a conflict and batch norm, one step before a teleport is due."""
    base_model, x, ys = conflicting(seed=seed)
    model = MultiHead(nn.Sequential(*base_model.trunk, nn.BatchNorm1d(8)), 8, 2)
    model.heads = base_model.heads
    optimizer = COST(
        torch.optim.AdamW(model.parameters(), lr=1e-3), model, shared=model.trunk, teleporter=teleporter,
        trigger=lambda M: True, schedule=TeleportSchedule(start=1, cooldown=1),
    )  # fmt: skip
    optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)
    return model, optimizer, x, ys


TELEPORTERS = [DenseTeleporter(), LoRATeleporter(rank=2)]


@pytest.mark.parametrize("teleporter", TELEPORTERS, ids=["dense", "LoRA"])
@pytest.mark.parametrize("call", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("the closure's own"), torch.OutOfMemoryError("no")])
def test_a_forced_teleport_that_is_broken_off_leaves_no_trace(teleporter, call, error):
    model, optimizer, x, ys = teleporting(teleporter)
    before = Snapshot(model, optimizer)
    closure = Failing(model, x, ys, call, error)
    with pytest.raises(type(error)):
        optimizer.teleport(closure)
    assert closure.calls == call
    assert Snapshot(model, optimizer).same_as(before)
    optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)  # and training goes on
    assert finite(model, optimizer)


@pytest.mark.parametrize("teleporter", TELEPORTERS, ids=["dense", "LoRA"])
@pytest.mark.parametrize("call", [2, 4, 6])
def test_an_interrupt_in_a_step_that_teleports_leaves_the_parameters(teleporter, call):
    model, optimizer, x, ys = teleporting(teleporter)
    before = Snapshot(model, optimizer)
    once = copy.deepcopy(model)
    losses(once, x, ys)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(Failing(model, x, ys, call, KeyboardInterrupt()), x, ys)
    after = Snapshot(model, optimizer)
    assert after.modules == before.modules
    assert after.params == before.params
    assert torch.equal(flat(list(model.parameters())), flat(list(once.parameters())))
    for buffer, counted_once in zip(model.buffers(), once.buffers(), strict=True):
        assert torch.equal(buffer, counted_once)


NO_MEMORY = [
    torch.OutOfMemoryError("no memory left"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError("no memory left"),
]


@pytest.mark.parametrize("teleporter", TELEPORTERS, ids=["dense", "LoRA"])
@pytest.mark.parametrize(("call", "error"), [*((2, e) for e in NO_MEMORY), (3, NO_MEMORY[0]), (5, NO_MEMORY[2])])
def test_out_of_memory_in_a_teleport_gives_the_step_without_one(teleporter, call, error):
    """In whichever of its forms."""
    model, optimizer, x, ys = teleporting(teleporter)
    plain, reference, _, _ = teleporting(None)
    optimizer.step(Failing(model, x, ys, call, error), x, ys)
    reference.step(Failing(plain, x, ys, 0, None), x, ys)
    report = optimizer.last_step.teleport
    assert not report.accepted
    assert f"out of memory: {error}" in report.reason
    assert everything(model, optimizer) == everything(plain, reference)


def test_another_error_in_a_teleport_is_the_users():
    model, optimizer, x, ys = teleporting(DenseTeleporter())
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        optimizer.step(Failing(model, x, ys, 2, RuntimeError("mat1 and mat2 shapes cannot be multiplied")), x, ys)


def test_out_of_memory_in_the_ordinary_evaluation_is_the_users():
    model, optimizer, x, ys = teleporting(DenseTeleporter())
    start = flat(list(model.parameters()))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step(Failing(model, x, ys, 1, torch.OutOfMemoryError("no")), x, ys)
    assert torch.equal(flat(list(model.parameters())), start)


class Wild:
    """A teleporter that goes where the losses are not finite."""

    def __init__(self, size):
        self.size = size

    def propose(self, problem):
        return cost_mtl.Move(torch.full_like(problem.gradients[0], self.size), "none")


@pytest.mark.parametrize("size", [NAN, INF, 1e30])
def test_a_move_to_where_nothing_is_finite_is_rejected(size):
    model, optimizer, x, ys = teleporting(Wild(size))
    before = Snapshot(model, optimizer)
    report = optimizer.teleport(lambda: losses(model, x, ys))
    assert not report.accepted
    assert Snapshot(model, optimizer).same_as(before)


def test_a_callback_that_fails_takes_the_teleport_back():
    """An attempt that ends with an exception, which reaches the user, leaves everything as it was."""
    model, x, ys = conflicting()

    def complain(report):
        raise ValueError("the callback's own")

    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk, teleporter=DenseTeleporter(),
        on_teleport=complain,
    )  # fmt: skip
    start = flat(list(model.parameters()))
    with pytest.raises(ValueError, match="the callback's own"):
        optimizer.teleport(lambda: losses(model, x, ys))
    assert torch.equal(flat(list(model.parameters())), start)
    assert optimizer.progress.attempts == 0

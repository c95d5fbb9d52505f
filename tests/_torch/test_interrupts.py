"""Ctrl-C at any moment: nothing stays behind, and the run goes on as if the step had not been, or had been whole.

The figure that the documentation gives comes from ``COST_INTERRUPTS=500 pytest tests/_torch/test_interrupts.py``.
"""

import copy
import gc
import os
import random
import signal
import sys

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_pre_hooks

import cost_mtl
from cost_mtl._torch import undo
from tests.nets import MultiHead, data, losses
from tests.resuming import EASY, Run, as_bytes

TIMERS = int(os.environ.get("COST_INTERRUPTS", "24"))
BYTECODES = 2 * TIMERS


class Interrupted(KeyboardInterrupt):
    pass


def net(seed=0):
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))
    return MultiHead(trunk, 8, 2)


TELEPORTERS = {
    "dense": lambda: cost_mtl.DenseTeleporter(acceptance=EASY),
    "LoRA": lambda: cost_mtl.LoRATeleporter(rank=2, acceptance=EASY),
}


def make(teleporter, seed=0):
    """Teleports in every second step, heads of their own, HTR that blends the history."""
    return Run(net(seed), shape=(6,), teleporter=TELEPORTERS[teleporter](), htr="momentum",
               schedule=cost_mtl.TeleportSchedule(start=1, cooldown=2))  # fmt: skip


def moving(saved):
    """What a step changes, running statistics and random streams aside, which the closure's call has moved."""
    model = {k: v for k, v in saved["model"].items() if "running" not in k and "tracked" not in k}
    return flattened(as_bytes({"model": model, "optimizer": saved["optimizer"]}))


def flattened(state, name=""):
    """Name -> leaf."""
    if not isinstance(state, dict | list):
        return {name: state}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {k: v for key, item in items for k, v in flattened(item, f"{name}.{key}").items()} or {name: "empty"}


def differing(a, b):
    return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))


def surroundings(run):
    """Everything that is not to be changed for good."""
    modules = [(name, id(m), m.training) for name, m in run.model.named_modules()]
    params = [(id(p), p.requires_grad, p.data_ptr()) for p in run.model.parameters()]
    hooks = [len(p._post_accumulate_grad_hooks or {}) for p in run.model.parameters()]
    hooks += [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in run.model.modules()]
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
    signals = [signal.getsignal(n) for n in undo.SIGNALS]
    return modules, params, hooks, len(_global_forward_pre_hooks), modes, signals, len(undo._local.pending)


def one_step(run, arm=lambda: lambda: None):
    """``arm()`` begins what may interrupt, and returns what ends that: around the step alone."""
    x, ys = data(2, 8, seed=run.step, shape=run.shape)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.step % 3 == 0):
        disarm = arm()
        try:
            run.optimizer.step(lambda x, ys: losses(run.model, x, ys), x, ys)
        finally:
            disarm()


class Watch:
    """A run that is interrupted again and again, and an undisturbed twin beside it."""

    def __init__(self, teleporter):
        self.run, self.twin = make(teleporter), make(teleporter, seed=1)
        for _ in range(2):  # with the closure of the steps to come: earlier batches belong to theirs
            one_step(self.run)
            self.run.step += 1
        self.before = self.whole = 0

    def interrupted_step(self, arm):
        """One step under ``arm()``, which may interrupt it; whether it did. Everything is looked at."""
        run, twin = self.run, self.twin
        saved, around = copy.deepcopy(run.save()), surroundings(run)
        start = moving(saved)
        twin.load(saved)
        one_step(twin)
        end = moving(twin.save())
        torch.set_rng_state(saved["random"])
        grads = [p.grad for p in run.model.parameters()]
        came = None
        try:
            one_step(run, arm)
        except Interrupted as error:
            came = error
        assert surroundings(run) == around
        here = moving(run.save())
        if came is not None and not differing(here, start):
            self.before += 1
            now = [p.grad for p in run.model.parameters()]
            untouched = all(a is b for a, b in zip(now, grads, strict=True))  # it had not begun
            assert untouched or all(grad is None for grad in now)
        else:
            assert differing(here, end) == [], differing(here, start)
            self.whole += came is not None
        self.goes_on_as_a_fresh_run()
        return came is not None

    def goes_on_as_a_fresh_run(self):
        """The next step is that of a fresh run from this state, the interrupted one if it was not done."""
        run, twin = self.run, self.twin
        saved = copy.deepcopy(run.save())
        twin.load(saved)
        for one in (run, twin):
            torch.set_rng_state(saved["random"])
            one_step(one)
            one.step += 1
        assert differing(flattened(as_bytes(run.save())), flattened(as_bytes(twin.save()))) == []


@pytest.mark.parametrize("teleporter", TELEPORTERS)
def test_a_timer_interrupts_a_step_at_random_moments(teleporter):
    watch, chance = Watch(teleporter), random.Random(7)

    def interrupt(number, frame):
        raise Interrupted

    old = signal.signal(signal.SIGALRM, interrupt)
    try:

        def arm():
            signal.setitimer(signal.ITIMER_REAL, 10 ** chance.uniform(-4.3, -1.7))
            return lambda: signal.setitimer(signal.ITIMER_REAL, 0)

        interrupts = tries = 0
        while interrupts < TIMERS // 2:
            interrupts += watch.interrupted_step(arm)
            tries += 1
            assert tries < 20 * TIMERS
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    print(f"{interrupts} interrupts by timer: {watch.before} undone, {watch.whole} after the step was whole")
    assert watch.before


def count_events(run):
    """Calls and bytecodes in one step, as the tracer below sees them."""
    events = []
    sys.settrace(tracer(lambda frame: events.append(1)))
    try:
        one_step(run)
    finally:
        sys.settrace(None)
    return len(events)


def tracer(on_event):
    """Calls ``on_event`` at each function's beginning, and before each bytecode of this package and of contexts."""

    def trace(frame, event, argument):
        on_event(frame)
        name = frame.f_code.co_filename
        frame.f_trace_opcodes = "cost_mtl" in name or name.endswith("contextlib.py")
        frame.f_trace_lines = False
        return trace if frame.f_trace_opcodes else None

    return trace


@pytest.fixture
def handled_interrupt():
    """Ctrl-C has a handler, which is what gets deferred: a process started in the background ignores the signal."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


@pytest.mark.parametrize("teleporter", TELEPORTERS)
def test_an_exception_at_any_bytecode(teleporter, handled_interrupt):
    """Moments that a timer seldom meets: between a context's end and the first line of its ``__exit__``, say."""
    watch, chance = Watch(teleporter), random.Random(8)
    rehearsal = Watch(teleporter).run
    steps = []
    for _ in range(4):
        steps.append(count_events(rehearsal))
        rehearsal.step += 1
    gc.collect()
    interrupts = 0
    for _ in range(BYTECODES // 2):
        target = chance.randrange(max(steps) if chance.random() < 0.5 else min(steps))
        seen = [0]

        def on_event(frame, seen=seen, target=target):
            seen[0] += 1
            # Not where the interrupt would be deferred: a trace function does not ask the handlers.
            if seen[0] >= target and not deferring(frame):
                sys.settrace(None)
                seen[0] = -(10**9)
                raise Interrupted

        def arm(on_event=on_event):
            sys.settrace(tracer(on_event))
            return lambda: sys.settrace(None)

        interrupts += watch.interrupted_step(arm)
    print(f"{interrupts} interrupts by bytecode: {watch.before} undone, {watch.whole} after the step was whole")
    assert interrupts > BYTECODES // 4
    assert watch.before


def deferring(frame):
    """Whether signals wait here: inside of ``with uninterrupted()``."""
    return any(getattr(signal.getsignal(n), "__name__", "") == "_wait" for n in (signal.SIGALRM, signal.SIGINT))

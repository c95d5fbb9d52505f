"""A teleport happens wholly or not at all: what can fail fails while it can be undone, in every process."""

import dataclasses
import sys
from contextlib import suppress

import pytest
import torch

from cost_mtl import COST, DenseTeleporter, LoRATeleporter, TeleportSchedule
from cost_mtl._torch.undo import all_or_nothing, undoing
from cost_mtl.teleport import attempt as transaction
from cost_mtl.teleport import controller
from tests.distributed.harness import assert_in_step, parameters, spawn
from tests.nets import conflicting, flat, losses
from tests.optimizer.bases import everything


def due(model, *, step=0, lr=1e-3, groups=None, **settings):
    """COST whose step number ``step`` makes an attempt, which is accepted."""
    settings = {"teleporter": DenseTeleporter(), "trigger": lambda M: True} | settings
    base = torch.optim.AdamW(groups or model.parameters(), lr=lr)
    return COST(base, model, shared=model.trunk, schedule=TeleportSchedule(start=step, cooldown=1), **settings)


def resting(model):
    """Param groups of which one rests: an accepted move is then put together with the shared parameters that stay."""
    rest = model.trunk[0].bias
    return [{"params": [p for p in model.parameters() if p is not rest]}, {"params": [rest], "lr": 0.0}]


class Once:
    """A function that raises in its n-th call."""

    def __init__(self, function, error, call=1):
        self.function, self.error, self.left = function, error, call

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*args, **kwargs)


def stepped(steps=2, *, groups=False, **settings):
    model, x, ys = conflicting()
    optimizer = due(model, step=1, groups=resting(model) if groups else None, **settings)
    for k in range(steps):
        optimizer.step(lambda x, ys: losses(model, x, ys), x * (1 + 0.02 * k), ys)
    return model, optimizer


LATE = [
    (controller, "sigma_for", 1, False),  # HTR's blend factor
    (controller, "combine", 2, False),
    (transaction, "_report", 1, False),
    (transaction, "TeleportReport", 1, False),
    (controller, "promote", 1, True),
    (controller, "promote", 2, True),
    (controller, "gramian", 1, False),
    (controller, "Problem", 1, False),
    (controller, "forward_state", 1, False),
    (controller, "broken_off", 1, False),
    (controller, "beside", 1, False),
]


@pytest.mark.parametrize(("module", "name", "call", "groups"), LATE, ids=lambda v: getattr(v, "__name__", str(v)))
@pytest.mark.parametrize("error", [MemoryError("none left"), torch.OutOfMemoryError("none left")])
def test_no_memory_at_any_moment_of_an_attempt_gives_the_step_without_one(
    monkeypatch, module, name, call, groups, error
):
    assert stepped(groups=groups)[1].last_step.teleport.accepted
    monkeypatch.setattr(module, name, Once(getattr(module, name), error, call))
    model, optimizer = stepped(groups=groups)
    monkeypatch.undo()
    plain, reference = stepped(groups=groups, teleporter=None)
    report = optimizer.last_step.teleport
    assert "out of memory: none left" in (optimizer.last_step.no_teleport if report is None else report.reason)
    assert report is None or not report.accepted
    assert everything(model, optimizer) == everything(plain, reference)
    assert optimizer.progress.sigma is None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("an error")])
def test_another_error_late_in_an_attempt_comes_out_with_everything_undone(monkeypatch, error):
    model, x, ys = conflicting()
    optimizer = due(model)
    start = flat(list(model.parameters())).clone()
    monkeypatch.setattr(controller, "sigma_for", Once(controller.sigma_for, error))
    with pytest.raises(type(error)):
        optimizer.step(lambda: losses(model, x, ys))
    assert torch.equal(start, flat(list(model.parameters())))
    assert optimizer.progress.sigma is None
    assert optimizer.progress.step == 0


class Interrupted:
    """Raises at the n-th line that is run in the transaction or the controller; counts them."""

    FILES = tuple(m.__file__ for m in (transaction, controller))

    def __init__(self, line):
        self.line, self.seen = line, 0

    def __call__(self, frame, event, arg):
        if frame.f_code.co_filename not in self.FILES:
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.line:
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


def interrupted(line, teleporter):
    model, x, ys = conflicting()
    optimizer = due(model, htr="gradient", teleporter=teleporter)
    parameters_before = flat(list(model.trunk.parameters())).clone()
    modules = [(n, id(m), m.training) for n, m in model.named_modules()]
    flags = [(n, id(p), p.requires_grad, p.data_ptr()) for n, p in model.named_parameters()]
    report = None
    with Interrupted(line) as watch, suppress(KeyboardInterrupt):
        report = optimizer.teleport(lambda: losses(model, x, ys))
    assert [(n, id(m), m.training) for n, m in model.named_modules()] == modules
    assert [(n, id(p), p.requires_grad, p.data_ptr()) for n, p in model.named_parameters()] == flags
    return watch.seen, parameters_before, flat(list(model.trunk.parameters())), optimizer, report


@pytest.mark.parametrize("teleporter", [DenseTeleporter(), LoRATeleporter(rank=2)], ids=["dense", "LoRA"])
def test_an_interrupt_at_any_line_leaves_the_old_point(teleporter):
    """And no blend factor for HTR."""
    lines, start, moved, _, report = interrupted(0, teleporter)
    assert report.accepted
    assert not torch.equal(start, moved)
    for line in range(1, lines + 1):
        _, before, after, optimizer, report = interrupted(line, teleporter)
        assert report is None
        assert torch.equal(before, start)
        assert torch.equal(after, start), line
        assert optimizer.progress.sigma is None, line
    assert lines > 30


def test_an_undo_that_is_broken_off_is_done_to_its_end():
    done = []

    def undo():
        done.append(0)
        if len(done) < 3:
            raise KeyboardInterrupt
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        all_or_nothing(lambda: undoing(undo).__enter__())()
    assert done == [0, 0, 0, 1]


# ------------------------------------------------------------------------------------ the user's callback


def complaining(error):
    got = []

    def callback(report):
        got.append(report)
        raise error

    return got, callback


@pytest.mark.parametrize(
    "error", [MemoryError("mine"), RuntimeError("out of memory"), ValueError("x"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("how", ["step", "teleport"])
def test_a_callback_that_fails_takes_its_teleport_back(error, how):
    """The step, or the call of ``teleport()``, is not done at all, and the coming step is that of a fresh run."""
    model, x, ys = conflicting()
    got, callback = complaining(error)
    optimizer = due(model, on_teleport=callback)
    with pytest.raises(type(error)):
        getattr(optimizer, how)(lambda: losses(model, x, ys))
    (report,) = got
    assert report.accepted
    twin, _, _ = conflicting()
    other = due(twin)
    assert everything(model, optimizer) == everything(twin, other)
    for name in ("step", "attempts", "last_attempt", "sigma"):
        assert getattr(optimizer.progress, name) == getattr(other.progress, name), name
    for m, o in ((model, optimizer), (twin, other)):
        o._controller = dataclasses.replace(o._controller, trigger=None, teleporter=None, on_teleport=None)
        o.step(lambda m=m: losses(m, x, ys))
    assert everything(model, optimizer) == everything(twin, other)


def test_the_callback_gets_the_report_of_an_attempt_that_ran_out_of_memory():
    model, x, ys = conflicting()
    got = []
    optimizer = due(model, on_teleport=got.append)
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("none left")
        return losses(model, x, ys)

    optimizer.step(closure)
    assert got == [optimizer.last_step.teleport]
    assert got[0].closure_calls == 2


def test_a_callback_that_draws_random_numbers_does_not_shift_the_users():
    model, x, ys = conflicting()
    optimizer = due(model, on_teleport=lambda report: torch.rand(3))
    torch.manual_seed(7)
    optimizer.step(lambda: losses(model, x, ys))
    optimizer.teleport(lambda: losses(model, x, ys))
    assert optimizer.last_step.teleport is not None
    drawn = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(drawn, torch.rand(1))


# ------------------------------------------------------------------------------------ two processes


def fail_on_one(rank, where, error):
    model, x, ys = conflicting()

    raising = Once(lambda report: None, error)

    def callback(report):
        if where == "callback" and rank == 1:
            raising(report)

    optimizer = due(model, on_teleport=callback)
    names = {"sigma": (controller, "sigma_for"), "report": (transaction, "_report"),
             "solver": (transaction, "_checked"),
             "problem": (controller, "Problem")}  # fmt: skip
    if rank == 1 and where in names:
        module, name = names[where]
        setattr(module, name, Once(getattr(module, name), error))
    start = parameters(model)
    message = ""
    try:
        optimizer.step(lambda: losses(model, x * (1 + 0.1 * rank), ys))
    except Exception as mine:
        message = str(mine)
    moved = not torch.equal(parameters(model), start)
    first = [parameters(model), moved, bool(message), optimizer.progress.step, optimizer.progress.sigma is None]
    optimizer.step(lambda: losses(model, x * (1 + 0.1 * rank), ys))
    return [*first, parameters(model)], message, optimizer.last_step.teleport


WHERE = ["sigma", "report", "solver", "problem", "callback"]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("error", [MemoryError("none left"), ValueError("an error")], ids=["memory", "another"])
def test_what_fails_in_one_process_fails_in_all(where, error):
    """Both stand at the same point afterwards, and train on in step."""
    results = spawn(2, fail_on_one, where, error)
    assert_in_step([result for result, _, _ in results])
    raised = where == "callback" or isinstance(error, ValueError)
    _, moved, said, step, no_sigma, _ = results[0][0]
    assert said is raised
    assert moved is not raised
    assert step == (0 if raised else 1)
    assert no_sigma
    if raised:
        assert "another process" in results[0][1] or "out of memory" in results[0][1]
        assert results[1][1] == str(error)

"""An earlier batch belongs to the closure that it was given to, and never ends a step that is healthy without it."""

import copy
import gc
import pickle
import re
import warnings
import weakref
from functools import partial

import pytest
import torch

import cost_mtl
from cost_mtl import COST, DenseTeleporter, TeleportSchedule
from cost_mtl.step.memory import fingerprint, without_closures
from cost_mtl.step.state import Progress
from tests.distributed.harness import assert_in_step, parameters, spawn
from tests.nets import conflicting, flat, losses, mlp
from tests.optimizer.bases import everything
from tests.resuming import through_a_file

INF = float("inf")


def due(model, *, step, **settings):
    """COST whose step number ``step`` makes an attempt."""
    settings = {"teleporter": DenseTeleporter(), "trigger": lambda M: True} | settings
    settings.setdefault("schedule", TeleportSchedule(start=step, cooldown=1000))
    return COST(torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk, **settings)


def named(model, x, ys, tasks=(0, 1)):
    values = losses(model, x, ys)
    return {f"task {k}": values[k] for k in tasks}


# ------------------------------------------------------------------------------------ whose batch it is


def test_every_batch_is_evaluated_by_its_own_closure():
    """Two closures of one signature take turns: each sees its own batches alone, in the step that teleports, too."""
    model, x, ys = conflicting()
    optimizer = due(model, step=3)
    seen = []

    def first(x, ys, mark):
        seen.append(("first", mark))
        return losses(model, x, ys)

    def second(x, ys, mark):
        seen.append(("second", mark))
        return [2 * v for v in losses(model, x, ys)]

    for step in range(4):
        closure, mark = (first, "a") if step % 2 else (second, "u")
        optimizer.step(closure, x * (1 + 0.01 * step), ys, mark)
    assert optimizer.last_step.teleport is not None
    assert set(seen) == {("first", "a"), ("second", "u")}
    assert len(seen) > 8


def test_closures_of_different_signatures_in_one_loop():
    model, x, ys = conflicting()
    optimizer = due(model, step=3)
    for step in range(4):
        if step % 2:
            optimizer.step(lambda x: losses(model, x, ys), x)
        else:
            optimizer.step(lambda x, ys: losses(model, x, ys), x + 0.01 * step, ys)
    assert optimizer.last_step.teleport.accepted, optimizer.last_step.teleport.reason


def test_the_last_group_of_micro_batches_may_be_shorter():
    """The documented idiom; the group before is evaluated as it was, with its own number of parts."""
    model, x, ys = conflicting()
    optimizer = due(model, step=2)
    parts = [(x[k::4], [y[k::4] for y in ys]) for k in range(4)]
    for group in (parts, parts, parts[:3]):
        optimizer.step([lambda *b, i=i: losses(model, *b[i]) for i in range(len(group))], *group)
    report = optimizer.last_step.teleport
    assert report is not None
    assert report.drift_heldout is not None or report.drift is not None
    evaluated = optimizer.progress.memory[-2].thunks([cost_mtl.step.closure.Thunk(losses)], ("0", "1"))
    values = torch.stack([torch.stack(thunk()) for thunk in evaluated]).mean(dim=0)
    torch.testing.assert_close(values, torch.stack(losses(model, x, ys)), rtol=1e-5, atol=0.0)


def test_the_loss_of_an_earlier_batch_is_that_of_its_closure():
    """Drift on the held-out batch, measured from outside with the closure that it had been given to."""
    model, x, ys = conflicting()
    optimizer = due(model, step=2)
    scales = (3.0, 1.0, 1.0)

    def offset(model, x, ys, c):
        return [v + c for v in losses(model, x, ys)]

    batches = [(x * (1 + 0.05 * k), ys) for k in range(3)]
    for c, batch in zip(scales[:2], batches, strict=False):
        optimizer.step(partial(offset, model, c=c), *batch)
    before = torch.stack(offset(model, *batches[0], scales[0])).detach().double()
    start = copy.deepcopy(model)
    report = optimizer.teleport(partial(offset, model, c=scales[2]), *batches[2])
    assert report.accepted, report.reason
    after = torch.stack(offset(model, *batches[0], scales[0])).detach().double()
    assert not torch.equal(flat(list(start.parameters())), flat(list(model.parameters())))
    assert report.drift_heldout == pytest.approx(float(((after - before) / before).abs().max()), rel=1e-3)


# ------------------------------------------------------------------------------------ what is left out


def bad_closure(kind, model, x, ys, state):
    """Losses that can't be had again once ``state`` is full."""
    again = bool(state)
    if kind == "raises" and again:
        raise LookupError("that sample is gone")
    values = named(model, x, ys)
    if kind == "not finite" and again:
        values["task 1"] = values["task 1"] * INF
    if kind == "gradient" and again:
        values["task 1"].register_hook(lambda grad: grad * INF)
    if kind == "other tasks now" and again:
        values["task 9"] = values.pop("task 1")
    if kind == "computed before" and again:
        values = state[0]
    state.append(values)
    return values


KINDS = {
    "raises": "it raised LookupError: that sample is gone",
    "not finite": "a loss of it is not finite",
    "gradient": "a gradient of it is not finite",
    "other tasks": r"it has the tasks \['task 0'\], the current one \['task 0', 'task 1'\]",
    "other tasks now": r"it has the tasks \['task 0', 'task 9'\], the current one",
    "computed before": "computed before it was called",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("teleporter", [DenseTeleporter(), cost_mtl.LoRATeleporter(rank=2)], ids=["dense", "LoRA"])
def test_a_batch_that_cannot_be_evaluated_is_left_out_with_one_warning(kind, teleporter):
    """The step is then that of an optimizer which had never seen it."""

    def run(memory):
        model, x, ys = conflicting()
        optimizer = due(model, step=1, memory=memory, teleporter=teleporter,
                        schedule=TeleportSchedule(start=1, cooldown=1))  # fmt: skip
        state = []
        if kind == "other tasks":
            optimizer.step(lambda x, ys: named(model, x, ys, tasks=(0,)), x, ys)
        else:
            optimizer.step(lambda x, ys: bad_closure(kind, model, x, ys, state), x, ys)
        reports = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.progress.memory[1:] = []
                optimizer.step(lambda x, ys: named(model, x, ys), x * 1.01, ys)
                reports.append(optimizer.last_step.teleport)
        said = [w for w in caught if "earlier batch" in str(w.message)]
        assert [w.filename for w in said] == [__file__] * len(said)
        return model, optimizer, reports, [str(w.message) for w in said]

    model, optimizer, reports, said = run(4)
    plain, reference, wanted, nothing = run(0)
    assert nothing == []
    assert len(said) == 1
    assert re.search(KINDS[kind], said[0])
    assert [r.accepted for r in reports] == [r.accepted for r in wanted]
    assert torch.equal(flat(list(model.parameters())), flat(list(plain.parameters())))
    assert optimizer.progress.attempts == reference.progress.attempts == 2


def test_tasks_that_are_absent_from_some_batches():
    """The batches with the current tasks are used, the others are not."""
    model = mlp(3)
    _, x, ys = conflicting(3)
    optimizer = due(model, step=3)
    called = []

    def closure(x, ys, tasks):
        called.append(tasks)
        return named(model, x, ys, tasks)

    for tasks in ((0, 1, 2), (1, 2), (0, 1)):
        optimizer.step(closure, x, ys, tasks)
    with pytest.warns(UserWarning, match="an earlier batch: it has the tasks"):
        optimizer.step(closure, x, ys, (0, 1, 2))
    assert optimizer.last_step.teleport is not None
    assert set(called[3:]) == {(0, 1, 2)}
    assert len(called) > 6


def test_tasks_are_compared_by_name_and_put_in_order():
    def run(order):
        model, x, ys = conflicting()
        optimizer = due(model, step=2)
        for k, tasks in enumerate((order, order, (0, 1))):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step(lambda x, ys, tasks=tasks: named(model, x, ys, tasks), x * (1 + 0.02 * k), ys)
        return optimizer.last_step.teleport

    same, turned = run((0, 1)), run((1, 0))
    assert same.accepted == turned.accepted is True
    assert turned.drift == pytest.approx(same.drift, rel=0.2)
    assert turned.drift_heldout == pytest.approx(same.drift_heldout, rel=0.2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_in_an_earlier_batch_is_no_reason_to_leave_it_out(error):
    model, x, ys = conflicting()
    optimizer = due(model, step=1)
    calls = []

    def closure(x, ys, mark):
        calls.append(mark)
        if calls.count("early") > 1:
            raise error
        return losses(model, x, ys)

    optimizer.step(closure, x, ys, "early")
    before = everything(model, optimizer)
    with pytest.raises(type(error)):
        optimizer.step(closure, x, ys, "late")
    assert everything(model, optimizer) == before


def test_no_memory_for_an_earlier_batch_ends_the_attempt_not_the_step():
    model, x, ys = conflicting()
    optimizer = due(model, step=1)
    calls = []

    def closure(x, ys, mark):
        calls.append(mark)
        if calls.count("early") > 1:
            raise torch.OutOfMemoryError("no memory left")
        return losses(model, x, ys)

    optimizer.step(closure, x, ys, "early")
    optimizer.step(closure, x, ys, "late")
    assert "out of memory: no memory left" in optimizer.last_step.teleport.reason
    assert optimizer.progress.step == 2


def test_a_closure_that_returns_other_tasks_when_called_again_is_refused_once():
    model, x, ys = conflicting()
    optimizer = due(model, step=0, schedule=TeleportSchedule(start=0, cooldown=1))
    calls = []

    def closure(x, ys):
        calls.append(1)
        return named(model, x, ys) if len(calls) == 1 else {"other": named(model, x, ys)["task 0"]}

    start = flat(list(model.parameters())).clone()
    with pytest.warns(UserWarning, match=r"expected the same tasks when it is called again, \['task 0', 'task 1'\]"):
        optimizer.step(closure, x, ys)
    assert optimizer.progress.step == 1
    assert not torch.equal(start, flat(list(model.parameters())))


def fail_on_one(rank, kind):
    """An earlier batch is lost to process 1 alone."""
    model, x, ys = conflicting()
    optimizer = due(model, step=2)
    calls = []

    def closure(x, ys, mark):
        calls.append(mark)
        if kind == "raises" and rank == 1 and mark == 1 and calls.count(1) > 1:
            raise LookupError("that sample is gone")
        return losses(model, x, ys)

    for mark in range(3):
        if kind == "forgotten" and rank == 1 and mark == 2:
            optimizer.progress.memory = optimizer.progress.memory[1:]
        optimizer.step(closure, x * (1 + 0.1 * rank + 0.02 * mark), ys, mark)
    report = optimizer.last_step.teleport
    return [parameters(model), report.accepted, report.drift, report.drift_heldout, optimizer.progress.attempts]


@pytest.mark.parametrize("kind", ["raises", "forgotten"])
def test_what_one_process_leaves_out_all_do(kind):
    results = spawn(2, fail_on_one, kind)
    assert_in_step(results)
    assert results[0][4] == 1


# ------------------------------------------------------------------------------------ saved, copied, resumed


def teleporting_once(model, optimizer, x, ys):
    """One step that teleports, with the closure that all of these tests use."""
    optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)
    return optimizer.last_step.teleport


def test_a_resume_uses_the_remembered_batches_with_the_same_closure():
    def make():
        model, x, ys = conflicting()
        return model, due(model, step=3), x, ys

    model, optimizer, x, ys = make()
    for k in range(3):
        teleporting_once(model, optimizer, x * (1 + 0.02 * k), ys)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    report = teleporting_once(model, optimizer, x, ys)
    other, resumed, _, _ = make()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = teleporting_once(other, resumed, x, ys)
    assert report.drift_heldout is not None
    assert (again.drift, again.drift_heldout) == (report.drift, report.drift_heldout)
    assert torch.equal(flat(list(model.parameters())), flat(list(other.parameters())))


@pytest.mark.parametrize("how", ["another closure", "an earlier release", "caught another number", "look alike"])
def test_a_resume_leaves_out_batches_whose_closure_it_cannot_tell(how):
    model, x, ys = conflicting()
    optimizer = due(model, step=2)
    twin = copy.deepcopy(model)

    def made(c):
        return lambda x, ys: [c * v for v in losses(model, x, ys)]

    def alike(unused):
        return lambda x, ys: (unused, losses(model, x, ys))[1]

    for which in (model, twin):
        optimizer.step(alike(which) if how == "look alike" else made(1.0), x, ys)
    state = through_a_file(optimizer.state_dict())
    if how == "an earlier release":
        del state["cost"]["memory_of"]
    optimizer.load_state_dict(state)
    assert len(optimizer.progress.memory) == 2

    def another(x, ys):
        return losses(model, x, ys)

    current = {
        "another closure": another,
        "an earlier release": made(1.0),
        "caught another number": made(2.0),
        "look alike": alike(model),
    }[how]
    with pytest.warns(UserWarning, match="an earlier batch: it came from a checkpoint"):
        optimizer.step(current, x, ys)
    assert optimizer.last_step.teleport.drift_heldout is None


@pytest.mark.parametrize("how", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_does_not_reach_back_to_the_model_it_was_made_from(how):
    model, x, ys = conflicting()
    optimizer = due(model, step=2, trigger=cost_mtl.DominatedConflict())
    for k in range(2):
        teleporting_once(model, optimizer, x * (1 + 0.02 * k), ys)
    other, copied = how((model, optimizer))
    assert [m.closures for m in copied.progress.memory] == [None, None]
    assert [m.closures is None for m in optimizer.progress.memory] == [False, False]
    model.register_forward_hook(lambda *_: pytest.fail("the model that was copied is evaluated"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert teleporting_once(other, copied, x, ys).drift is not None


def test_the_memory_is_bounded_and_lets_go_of_old_closures():
    model, x, ys = conflicting()
    optimizer = due(model, step=10**6)
    kept = []
    for k in range(9):
        closure = partial(losses, model)
        kept.append(weakref.ref(closure))
        optimizer.step(closure, x + k, ys)
        del closure
    gc.collect()
    assert [ref() is not None for ref in kept] == [False] * 5 + [True] * 4


def test_a_saved_memory_is_plain_and_reads_back():
    model, x, ys = conflicting()
    optimizer = due(model, step=10**6)
    teleporting_once(model, optimizer, x, ys)
    packed = through_a_file(optimizer.progress.pack("FAMO"))
    back = Progress.unpack(packed, "FAMO")
    (mine,), (theirs,) = without_closures(optimizer.progress.memory), back.memory
    assert (theirs.names, theirs.fingerprints) == (mine.names, mine.fingerprints) == (("0", "1"), mine.fingerprints)
    assert torch.equal(theirs.batch[0], x)
    packed["memory_of"].append(packed["memory_of"][0])
    with pytest.raises(ValueError, match=r"memory_of.*: expected a list of 1"):
        Progress.unpack(packed, "FAMO")


class Task:
    def losses(self, x):
        return x

    def other(self, x):
        return x


def test_fingerprints_tell_closures_apart_that_differ_in_code_or_in_what_they_caught():
    def made(c, f=None):
        return lambda x: [c * x, f]

    same = fingerprint(made(1))
    assert fingerprint(made(1)) == same
    different = [
        made(2), made("1"), made(1, losses), made(1, flat), lambda x: [x], lambda x: [x + 1], partial(made(1), 3),
        Task().losses, Task().other, Task,
    ]  # fmt: skip
    marks = [same, *map(fingerprint, different)]
    assert len(set(marks)) == len(marks)
    assert fingerprint(Task().losses) == fingerprint(Task().losses)

"""What stays of a step that failed between unscaling and updating, or while autocast's depth was looked up."""

import copy
import sys

import pytest
import torch

import cost_mtl
from cost_mtl._torch import autocast
from tests.nets import MultiHead, data, losses


class FailedError(Exception):
    pass


def training(seed=0):
    torch.manual_seed(seed)
    model = MultiHead(torch.nn.Linear(6, 8), 8, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    base = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = cost_mtl.COST(base, model, scaler=scaler, on_nonfinite="skip", teleporter=None)
    return model, scaler, optimizer


def one_step(model, optimizer, factor=1.0):
    x, ys = data(2, 8, seed=1, shape=(6,))
    optimizer.step(lambda: [loss * factor for loss in losses(model, x, ys)])


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_step_hook_that_fails_does_not_stop_the_scaler_for_good(when):
    model, scaler, optimizer = training()
    other, _, fresh = training(seed=1)
    one_step(model, optimizer)
    register = getattr(optimizer.base, f"register_step_{when}_hook")

    def fail(*_):
        raise FailedError

    hook = register(fail)
    before = scaler.state_dict()
    with pytest.raises(FailedError):
        one_step(model, optimizer)
    assert scaler.state_dict() == before
    hook.remove()

    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    fresh.scaler.load_state_dict(scaler.state_dict())
    for m, o in ((model, optimizer), (other, fresh)):
        one_step(m, o)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert fresh.scaler.state_dict() == scaler.state_dict()


def test_nor_does_a_skipped_step_that_is_interrupted(monkeypatch):
    model, scaler, optimizer = training()
    one_step(model, optimizer)
    unscale = scaler.unscale_

    def interrupted(base):
        unscale(base)
        raise FailedError

    monkeypatch.setattr(scaler, "unscale_", interrupted)
    with pytest.raises(FailedError):
        one_step(model, optimizer, factor=1e37)  # finite until it is scaled
    monkeypatch.undo()
    assert scaler.get_scale() == 1024.0
    one_step(model, optimizer)
    assert not optimizer.last_step.skipped


def test_an_interrupt_at_any_bytecode_leaves_the_depth_of_autocast():
    """One that stays keeps autocast's cache of weights for good: they would be evaluated as they once were."""

    def interrupted_at(n):
        seen = [0]

        def trace(frame, event, argument):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                seen[0] += 1
                if seen[0] > n:
                    raise FailedError
            return trace

        sys.settrace(trace)
        try:
            autocast._autocast_depth()
        except FailedError:
            return True
        finally:
            sys.settrace(None)
        return False

    n = 0
    while interrupted_at(n):
        torch.autocast_increment_nesting()
        assert torch.autocast_decrement_nesting() == 0
        n += 1
    assert n > 5

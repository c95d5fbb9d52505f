"""What goes wrong leaves the model as it was: NaN and inf, a lack of memory, an interrupt, an exception anywhere."""

import warnings

import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import COST, TeleportSchedule
from tests.nets import MultiHead, convnet, data, losses, mlp
from tests.optimizer.bases import everything, finite

NAN, INF = float("nan"), float("inf")


class BadGradient(torch.autograd.Function):
    """The identity with a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, ctx.value), None


def in_the_loss(model, x, ys, task, value):
    values = losses(model, x, ys)
    values[task] = values[task] * value
    return values


def in_the_shared_gradient(model, x, ys, task, value):
    values = losses(model, x, ys)
    values[task] = (model.heads[task](BadGradient.apply(model.trunk(x), value)) - ys[task]).square().mean()
    return values


def in_the_own_gradient(model, x, ys, task, value):
    """Losses and G are finite; only the head's own gradient is not."""
    values = losses(model, x, ys)
    head = model.heads[task]
    out = nn.functional.linear(model.trunk(x), head.weight.detach(), BadGradient.apply(head.bias, value))
    values[task] = (out - ys[task]).square().mean()
    return values


def in_the_data(model, x, ys, task, value):
    """Everything is lost: all tasks."""
    return losses(model, x * value, ys)


PLACES = [in_the_loss, in_the_shared_gradient, in_the_own_gradient, in_the_data]


def trained(policy, steps=2, K=3, **settings):
    model = mlp(K)
    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = COST(base, model, on_nonfinite=policy, **{"shared": model.trunk} | settings)
    for seed in range(steps):
        x, ys = data(K, seed=seed)
        optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)
    return model, optimizer


# ------------------------------------------------------------------------------------ NaN and inf


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"every": 3}, {"shared": None}, {"heads": "weighted"}],
    ids=["default", "every", "found", "weighted"],
)
def test_raise_names_the_task_and_changes_nothing(where, value, settings):
    model, optimizer = trained("raise", **settings)
    before, step = everything(model, optimizer), optimizer.progress.step
    x, ys = data(3, seed=9)
    with pytest.raises(FloatingPointError, match=r"task '0'" if where is in_the_data else r"task '1'"):
        optimizer.step(lambda x, ys: where(model, x, ys, 1, value), x, ys)
    assert everything(model, optimizer) == before
    assert optimizer.progress.step == step
    assert all(p.grad is None for p in model.parameters())  # nothing for another optimizer to take
    optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)
    assert everything(model, optimizer) != before
    assert finite(model, optimizer)


@pytest.mark.parametrize("where", PLACES)
def test_skip_leaves_the_step_out_and_counts_it(where):
    model, optimizer = trained("skip")
    before = everything(model, optimizer)
    x, ys = data(3, seed=9)
    for count in (1, 2):
        values = optimizer.step(lambda x, ys: where(model, x, ys, 1, NAN), x, ys)
        assert values.shape == (3,)
        assert everything(model, optimizer) == before
        report = optimizer.last_step
        assert report.skipped
        assert report.skipped_total == count
        assert report.names == ("0", "1", "2")
        assert bool(torch.isnan(report.weights).all())
        assert all(p.grad is None for p in model.parameters())
    optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)
    assert not optimizer.last_step.skipped
    assert optimizer.last_step.skipped_total == 2
    assert optimizer.progress.step == 5
    assert everything(model, optimizer) != before
    assert finite(model, optimizer)


def test_a_skipped_batch_is_the_same_as_none():
    """State, memory and running statistics: the run goes on as if the bad batch had not been there."""

    def run(bad):
        torch.manual_seed(0)
        model = convnet(dropout=0.0)
        optimizer = COST(
            torch.optim.AdamW(model.parameters(), lr=0.01), model, shared=model.trunk, on_nonfinite="skip",
            weighting=cost_mtl.weighting.FAMO(), trigger=lambda M: False, schedule=TeleportSchedule(start=0),
        )  # fmt: skip
        for seed in range(4):
            x, ys = data(2, seed=seed, shape=(2, 8, 8))
            if bad and seed == 2:
                optimizer.step(lambda x, ys: losses(model, x * NAN, ys), x, ys)
            optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)
        return everything(model, optimizer), len(optimizer.progress.memory), finite(model, optimizer)

    assert run(bad=True) == run(bad=False)


def test_one_task_alone_is_looked_at_too():
    model, optimizer = trained("raise", K=1)
    before = everything(model, optimizer)
    x, ys = data(1, seed=9)
    with pytest.raises(FloatingPointError, match="task '0'"):
        optimizer.step(lambda x, ys: in_the_own_gradient(model, x, ys, 0, NAN), x, ys)
    assert everything(model, optimizer) == before


def test_a_schedule_goes_on_over_a_skipped_step_without_a_warning():
    model, optimizer = trained("skip", steps=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x, ys = data(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(lambda: losses(model, x * NAN, ys))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.005


def test_gradients_beyond_the_range_of_their_squares_are_not_called_infinite():
    """||g||^2 overflows float32 at ||g|| = 1e19."""
    model = mlp(3)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=1e-25), model, shared=model.trunk)
    x, ys = data(3)
    optimizer.step(lambda: [1e25 * v for v in losses(model, x, ys)])
    assert finite(model, optimizer)
    assert float(optimizer.last_step.norms.min()) > 1e19


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda M: torch.full((3,), NAN), Exception),
        (lambda M: torch.ones(2), Exception),
        (lambda M: 1 / 0, ZeroDivisionError),
    ],
)
def test_a_weighting_that_fails_stops_the_step_before_anything_moves(answer, error):
    model, optimizer = trained("raise", steps=0, weighting=answer)
    before = everything(model, optimizer)
    x, ys = data(3)
    with pytest.raises(error):
        optimizer.step(lambda: losses(model, x, ys))
    assert everything(model, optimizer) == before


class Stateful:
    """A weighting of the kind that COST asks without an adapter in between."""

    def initial_state(self, num_tasks):
        return {"calls": 0}

    def weigh(self, inputs, state):
        return cost_mtl.base.Weighed(torch.full((3,), INF), {"calls": state["calls"] + 1})


def test_a_stateful_weighting_that_fails_stops_the_step_before_anything_moves():
    model, optimizer = trained("skip", steps=0, weighting=Stateful())
    before = everything(model, optimizer)
    x, ys = data(3)
    with pytest.raises(ValueError, match="weighting: Stateful returned weights that are not finite"):
        optimizer.step(lambda: losses(model, x, ys))
    assert everything(model, optimizer) == before
    assert optimizer.progress.weighting == {}  # as before the step


@pytest.mark.parametrize("value", [NAN, INF])
def test_losses_that_are_not_finite_after_the_update_do_not_stay_in_famo(value):
    """The losses that it observes are looked at by nobody else."""
    model, optimizer = trained("raise", weighting=cost_mtl.weighting.FAMO())
    x, ys = data(3, seed=9)
    calls = []

    def closure():
        calls.append(1)
        return in_the_loss(model, x, ys, 1, value if len(calls) == 2 else 1.0)

    optimizer.step(closure)
    assert calls == [1, 1]
    optimizer.step(lambda: losses(model, x, ys))
    assert finite(model, optimizer)
    assert bool(torch.isfinite(optimizer.last_step.weights).all())
    assert len(set(optimizer.last_step.weights.tolist())) == 3


# ------------------------------------------------------------------------------------ what can't work


def test_hooks_that_update_during_the_backward_pass_are_refused():
    """Optimizers in the backward pass would step K times, with one task's gradient each."""
    model, optimizer = trained("raise", steps=0)
    calls = []
    model.trunk[0].weight.register_post_accumulate_grad_hook(calls.append)
    x, ys = data(3)
    with pytest.raises(RuntimeError, match="register_post_accumulate_grad_hook"):
        optimizer.step(lambda: losses(model, x, ys))
    assert calls == []


@pytest.mark.parametrize("every", [1, 2])
def test_a_closure_that_calls_backward_itself_is_told_not_to(every):
    """A habit from torch.optim's closures."""
    model, optimizer = trained("raise", steps=1, every=every)
    before = everything(model, optimizer)
    x, ys = data(3)

    def closure():
        optimizer.zero_grad()
        values = losses(model, x, ys)
        sum(values).backward()
        return values

    with pytest.raises(RuntimeError, match=r"Does it call backward\(\) itself"):
        optimizer.step(closure)
    assert everything(model, optimizer) == before
    optimizer.step(lambda: losses(model, x, ys))


@pytest.mark.parametrize("shared", ["given", "found"])
def test_complex_parameters_cannot_be_shared(shared):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

        def forward(self, x):
            return (x.to(torch.complex64) @ self.weight).real

    model = MultiHead(Spectral(), 6, 2)
    start = model.trunk.weight.detach().clone()
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk if shared == "given" else None
    )
    x, ys = data(2)
    with pytest.raises(TypeError, match="complex"):
        optimizer.step(lambda: losses(model, x, ys))
    assert torch.equal(model.trunk.weight, start)

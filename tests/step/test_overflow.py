"""Finite losses and gradients whose combination may not be: what fits is written, what does not moves nothing."""

import copy
import math

import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import COST, EqualWeighting, FairGrad, combine, gramian
from cost_mtl.base import Weighed
from cost_mtl.gradients.reductions import dot, norm
from cost_mtl.step.write_grads import clip_
from tests.nets import data, losses, mlp
from tests.optimizer.bases import everything


class Linear(nn.Module):
    """Losses that are linear in a shared vector and in an own one of each task, so that gradients are given numbers."""

    def __init__(self, shared, own=None, dtype=torch.float32):
        super().__init__()
        self.slopes = [torch.tensor(s, dtype=dtype) for s in shared]
        self.own_slopes = None if own is None else [torch.tensor(s, dtype=dtype) for s in own]
        self.shared = nn.Parameter(torch.zeros(len(shared[0]), dtype=dtype))
        self.beside = nn.Parameter(torch.zeros(len(shared[0]), dtype=dtype))

    def losses(self, factor=1.0):
        values = [(self.shared * s * factor).sum() for s in self.slopes]
        if self.own_slopes is not None:
            values = [v + (self.beside * s * factor).sum() for v, s in zip(values, self.own_slopes, strict=True)]
        return values


def make(model, lr=1.0, **settings):
    settings = {"shared": model.shared, "weighting": EqualWeighting(), "teleporter": None} | settings
    base = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return COST(base, model, **settings)


def weighing(*weights):
    return lambda M: torch.tensor(weights, dtype=torch.float64)


# ------------------------------------------------------------------------------------ what fits is reached


@pytest.mark.parametrize("m", [5, 20000])
@pytest.mark.parametrize("where", ["new", "first row"])
def test_combine_reaches_what_fits_whatever_the_weights(m, where):
    g = torch.Generator().manual_seed(0)
    exponents = torch.tensor([1e-30, 1.0, 1e25, 3e-38])
    G = torch.randn(4, m, generator=g) * exponents[:, None]
    w = torch.tensor([6e39, -2.0, 1e-41, 1e38], dtype=torch.float64)
    want = w @ G.double()
    for weights in (w, w.clone()):
        copied = G.clone()
        got = combine(copied, weights, out=copied[0] if where == "first row" else None)
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)


def test_two_huge_terms_that_cancel():
    G = torch.tensor([[3e38, 1.0], [3e38, 1.0], [-3e38, 0.5]])
    torch.testing.assert_close(combine(G, torch.ones(3), wide=True), torch.tensor([3e38, 2.5]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("small", [1e-30, 1e-36, 1e-20])
@pytest.mark.parametrize("every", [1, 2])
def test_a_task_with_a_tiny_gradient_trains_with_all_defaults(small, every):
    """FairGrad's weight of such a task is beyond float32: the update is that of float64 all the same."""
    model = mlp(2)
    exact = copy.deepcopy(model).double()
    x, ys = data(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk, every=every,
                     weighting=FairGrad(2.0))  # fmt: skip
    for _ in range(3):
        exact.load_state_dict(model.state_dict())
        values = losses(exact, x.double(), [y.double() for y in ys])
        params = list(exact.trunk.parameters())
        rows = [torch.autograd.grad(v, params, retain_graph=True) for v in values]
        G = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        G[1] *= small
        scaled = G / G.norm(dim=1, keepdim=True)
        optimizer.step(lambda: [v * f for v, f in zip(losses(model, x, ys), (1.0, small), strict=True)])
        w = optimizer.last_step.weights.double()
        d = torch.cat([p.grad.flatten() for p in model.trunk.parameters()]).double()
        want = (w * G.norm(dim=1)) @ scaled
        assert math.isfinite(float(d.norm()))
        torch.testing.assert_close(d, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_weighted_heads_of_a_task_with_a_tiny_gradient():
    model = Linear([[1.0, 0.0], [0.0, 1e-30]], own=[[1.0, 2.0], [1e-30, 1e-30]])
    optimizer = make(model, weighting=weighing(1.0, 6e39), heads="weighted", lr=1e-12)
    optimizer.step(model.losses)
    torch.testing.assert_close(model.shared.grad, torch.tensor([1.0, 6e9]))
    torch.testing.assert_close(model.beside.grad, torch.tensor([6e9, 6e9]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_in_half_precision_whose_parts_do_not_fit(dtype):
    """The partial sum is beyond the range, the sum is not."""
    top = 4e4 if dtype == torch.float16 else 3e38
    rows = [[top, 1.0], [top, 1.0], [-top, 1.0]]
    model = Linear(rows, own=rows, dtype=dtype)
    optimizer = make(model, lr=1e-30)
    optimizer.step(model.losses)
    want = torch.tensor([top, 3.0], dtype=dtype)
    assert torch.equal(model.shared.grad, want)
    assert torch.equal(model.beside.grad, want)


def test_an_update_that_does_not_fit_is_clipped_to_one_that_does():
    model = Linear([[1.0, 0.0], [0.0, 3.0]])
    optimizer = make(model, weighting=weighing(4e60, 4e60), max_norm=0.5)
    optimizer.step(model.losses)
    want = torch.tensor([0.5, 1.5]) / math.sqrt(10)
    torch.testing.assert_close(model.shared.grad, want, rtol=1e-6, atol=0)


# ------------------------------------------------------------------------------------ what does not moves nothing


class Counting:
    """A weighting with a memory that shows whether it has advanced; its answer after ``after`` calls is ``last``."""

    def __init__(self, last, after=2, in_place=False):
        self.last, self.after, self.in_place = last, after, in_place

    def initial_state(self, num_tasks):
        return {"calls": 0, "sum": torch.zeros(num_tasks)}

    def weigh(self, inputs, state):
        if self.in_place:
            state["calls"] += 1
            state["sum"] += 1
        else:
            state = {"calls": state["calls"] + 1, "sum": state["sum"] + 1}
        good = state["calls"] <= self.after
        weights = torch.ones(len(inputs.losses), dtype=torch.float64) * (1.0 if good else self.last)
        return Weighed(weights, state)


def overflow_of_weights():
    return Linear([[1.0, 2.0], [3.0, -1.0]], own=[[1.0, 1.0], [1.0, 1.0]]), {"weighting": Counting(1e39)}, {}


def overflow_of_weighted_heads():
    model = Linear([[1e-30, 2e-30], [3e-30, -1e-30]], own=[[1e5, 1.0], [1.0, 1.0]])
    return model, {"weighting": Counting(1e36), "heads": "weighted"}, {}


def overflow_of_half_shared():
    return Linear([[4e4, 0.0], [4e4, 1.0]], dtype=torch.float16), {}, {"first": 0.1}


def overflow_of_half_own():
    model = Linear([[1.0, 0.0], [0.0, 1.0]], own=[[4e4, 0.0], [4e4, 1.0]], dtype=torch.float16)
    return model, {}, {"first": 0.1}


def overflow_of_bfloat():
    return Linear([[3e38, 0.0], [3e38, 1.0]], dtype=torch.bfloat16), {}, {"first": 1e-30}


def overflow_of_micro_batches():
    return Linear([[4e4, 0.0], [4e4, 1.0]], dtype=torch.float16), {}, {"first": 0.1, "micro": 2}


PLACES = [overflow_of_weights, overflow_of_weighted_heads, overflow_of_half_shared, overflow_of_half_own,
          overflow_of_bfloat, overflow_of_micro_batches]  # fmt: skip


def call(optimizer, model, factor=1.0, micro=1):
    closure = lambda: model.losses(factor)  # noqa: E731
    return optimizer.step(closure if micro == 1 else [closure] * micro)


def snapshot(model, optimizer):
    return everything(model, optimizer), repr(optimizer.state_dict()["cost"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_what_does_not_fit_moves_nothing(place, every, policy):
    model, settings, how = place()
    if every > 1 and not isinstance(settings.get("weighting"), Counting):
        settings["weighting"] = EqualWeighting()
    optimizer = make(model, lr=1e-30, every=every, on_nonfinite=policy, **settings)
    first, micro = how.get("first", 1.0), how.get("micro", 1)
    healthy = 2 if every == 1 else 6
    for _ in range(healthy):
        call(optimizer, model, first, micro)
    before, cost = snapshot(model, optimizer)
    if policy == "raise":
        with pytest.raises(
            FloatingPointError, match=r"combined gradient of (shared|beside).* does not fit into \w+ .*task '0'"
        ):
            call(optimizer, model, 1.0, micro)
        assert snapshot(model, optimizer) == (before, cost)
    else:
        values = call(optimizer, model, 1.0, micro)
        assert values.shape == (2,)
        report = optimizer.last_step
        assert report.skipped
        assert report.skipped_total == 1
        assert everything(model, optimizer) == before
        saved = optimizer.state_dict()["cost"]
        assert saved["step"] == healthy + 1
        assert repr(saved | {"step": healthy, "skipped": 0}) == cost
    assert all(p.grad is None for p in model.parameters())
    if isinstance(optimizer.weighting, Counting):
        optimizer.weighting.after = 10**6
    call(optimizer, model, first, micro)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_teleport_of_the_same_step_is_taken_back():
    """The weights are found at the new point; where they do not fit, the model stands at the old one again."""
    accepted = []
    x, ys = data(2)

    def after_one_step(last):
        model = mlp(2)
        optimizer = COST(
            torch.optim.Adam(model.parameters(), lr=0.01), model, shared=model.trunk, weighting=Counting(last, after=1),
            trigger=lambda M: True, schedule=cost_mtl.TeleportSchedule(start=1, cooldown=1), htr="reset",
            teleporter=cost_mtl.DenseTeleporter(acceptance=cost_mtl.Acceptance(min_angle=0.0, min_norm=0.0)),
            on_teleport=lambda report: accepted.append(report.accepted),
        )  # fmt: skip
        optimizer.step(lambda: losses(model, x, ys))
        return model, optimizer

    model, optimizer = after_one_step(1.0)
    optimizer.step(lambda: losses(model, x, ys))
    twin, other = after_one_step(1e39)
    before = snapshot(twin, other)
    with pytest.raises(FloatingPointError, match="does not fit into float32"):
        other.step(lambda: losses(twin, x, ys))
    assert snapshot(twin, other) == before
    assert accepted == [True, True]
    other.weighting.last = 1.0
    other.step(lambda: losses(twin, x, ys))
    assert everything(twin, other) == everything(model, optimizer)


class Direction:
    def __init__(self, value):
        self.value = value

    def initial_state(self, num_tasks):
        return {"calls": 0}

    def weigh(self, inputs, state):
        d = torch.full_like(inputs.gradients[0], self.value)
        return Weighed(torch.ones(2), {"calls": state["calls"] + 1}, direction=d)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_direction_of_the_weightings_own_is_looked_at(value):
    model = Linear([[1.0, 2.0], [3.0, -1.0]])
    optimizer = make(model, weighting=Direction(value))
    before = snapshot(model, optimizer)
    with pytest.raises(FloatingPointError, match="combined gradient of shared"):
        optimizer.step(model.losses)
    assert snapshot(model, optimizer) == before


def test_graddrop_of_gradients_whose_sum_overflows():
    model = Linear([[3e38, 1.0], [3e38, 1.0]])
    optimizer = make(model, weighting=cost_mtl.weighting.GradDrop())
    with pytest.raises(FloatingPointError, match="combined gradient of shared"):
        optimizer.step(model.losses)


def test_gradients_of_the_weightings_parameters_are_looked_at():
    model = Linear([[1.0, 2.0], [3.0, -1.0]])
    weighting = cost_mtl.weighting.Uncertainty(2)
    with torch.no_grad():
        weighting.log_variances[0] = -80.0  # exp(80) = 5e34
    base = torch.optim.SGD([*model.parameters(), *weighting.parameters()], lr=1e-30)
    optimizer = COST(base, model, shared=model.shared, weighting=weighting, teleporter=None)
    before = snapshot(model, optimizer)
    with pytest.raises(FloatingPointError, match=r"combined gradient of a parameter of shape \[2\] outside the model"):
        optimizer.step(lambda: [v + 1e5 for v in model.losses()])
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_bad_weights_are_the_weightings_fault_and_move_nothing(bad, policy):
    model = Linear([[1.0, 2.0], [3.0, -1.0]])
    optimizer = make(model, weighting=Counting(bad), on_nonfinite=policy)
    for _ in range(2):
        optimizer.step(model.losses)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="weighting: Counting returned weights that are not finite"):
        optimizer.step(model.losses)
    assert snapshot(model, optimizer) == before


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_weighting_that_changes_its_state_in_place_has_not_advanced_either(policy):
    model = Linear([[1.0, 2.0], [3.0, -1.0]])
    optimizer = make(model, weighting=Counting(1e39, in_place=True), on_nonfinite=policy)
    for _ in range(2):
        optimizer.step(model.losses)
    if policy == "raise":
        with pytest.raises(FloatingPointError):
            optimizer.step(model.losses)
    else:
        optimizer.step(model.losses)
    state = optimizer.state_dict()["cost"]["weighting"]
    assert state["calls"] == 2
    assert state["sum"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("scale", [2.0**10, 2.0**100])
def test_a_loss_scaler_sees_the_overflow_lowers_its_factor_and_skips(scale):
    """Gradients are finite, and so is their sum: times the loss scale it is not."""
    model = Linear([[1.0, 2.0], [3.0, -1.0]])
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = make(model, weighting=Counting(1e36), scaler=scaler, lr=1e-36)
    for _ in range(2):
        optimizer.step(model.losses)
    before = everything(model, optimizer)
    optimizer.step(model.losses)
    assert optimizer.last_step.skipped
    assert scaler.get_scale() == scale / 2
    assert everything(model, optimizer) == before
    assert optimizer.progress.weighting["calls"] == 2


# ------------------------------------------------------------------------------------ norms


LENGTHS = [10_000_000, 65537, 3]


@pytest.mark.parametrize("size", [1.0, 1e20, 1e-25])
@pytest.mark.parametrize("m", LENGTHS)
def test_clipping_is_exact_whatever_the_length_and_the_size(m, size):
    g = torch.Generator().manual_seed(0)
    d = (torch.rand(m, generator=g) + 0.5) * size
    limit = size if size < 1 else 1.0
    direction = d.double() / d.double().square().sum().sqrt()
    clip_(d, limit, exact=size != 1.0)
    assert float(d.double().square().sum().sqrt()) == pytest.approx(limit, rel=1e-6)
    torch.testing.assert_close(d.double() / limit, direction, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e20, 1e-25])
def test_a_step_clips_to_the_norm(size):
    """2 M entries, and sizes whose squares float32 does not have; ``max_norm`` of COST, and of the weighting."""
    m = 2_000_000
    rows = (torch.rand(2, m, generator=torch.Generator().manual_seed(0)) + 0.5) * size
    limit = min(1.0, size)
    for settings in ({"max_norm": limit}, {"weighting": cost_mtl.CAGrad(max_norm=limit)}):
        model = Linear([[0.0], [0.0]])
        model.slopes = list(rows)
        model.shared = nn.Parameter(torch.zeros(m))
        optimizer = make(model, lr=1e-30, **settings)
        optimizer.step(model.losses)
        assert float(model.shared.grad.double().square().sum().sqrt()) == pytest.approx(limit, rel=2e-6)


@pytest.mark.parametrize("m", [10_000_001, 65536, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_norms_and_inner_products_of_long_vectors(m, dtype):
    g = torch.Generator().manual_seed(1)
    a, b = ((torch.rand(m, generator=g) + 0.5).to(dtype) for _ in range(2))
    want = float(a.double().square().sum().sqrt())
    assert float(norm(a)) == pytest.approx(want, rel=1e-6)
    assert float(norm([a[:1], a[1:]])) == pytest.approx(want, rel=1e-6)
    assert float(norm([a[:1], a[1:].double()])) == pytest.approx(want, rel=1e-6)
    if dtype != torch.float16:
        assert float(dot(a, b)) == pytest.approx(float((a.double() * b.double()).sum()), rel=1e-6)


def test_norms_of_nothing_and_of_complex_numbers():
    assert float(norm([])) == 0.0
    assert float(norm(torch.zeros(0))) == 0.0
    assert float(norm(torch.tensor([3 + 4j]))) == 5.0
    assert float(norm(torch.full((70000,), 1e25), exact=True)) == pytest.approx(1e25 * math.sqrt(70000), rel=1e-6)


def test_the_gramian_is_the_oracle_of_the_norms():
    x = torch.randn(1, 300_000, generator=torch.Generator().manual_seed(0))
    assert float(norm(x[0])) ** 2 == pytest.approx(float(gramian(x, dtype=torch.float64)), rel=1e-6)

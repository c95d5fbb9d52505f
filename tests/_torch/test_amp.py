"""Mixed precision: autocast inside or around the closure, loss scaling inside of ``step``."""

import warnings

import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import COST, DenseTeleporter, EqualWeighting, LoRATeleporter, TeleportSchedule
from tests.nets import conflicting, data, flat, losses, mlp

SCALE = 65536.0
TINY = 2.0**-20  # losses so small that their gradients leave float16's range


def gradients_scaler(**settings):
    return torch.amp.GradScaler("cpu", **({"init_scale": SCALE} | settings))


def half_losses(model, x, ys, factor=1.0, dtype=torch.float16):
    with torch.autocast("cpu", dtype=dtype):
        outputs = model(x)
    return [factor * (out.float() - y).square().mean() for out, y in zip(outputs, ys, strict=True)]


def run(*, scaler=None, half=True, factor=2.0**-6, steps=3, base=torch.optim.AdamW, **settings):
    model = mlp(2)
    settings = {"shared": model.trunk, "teleporter": None, "weighting": cost_mtl.CAGrad()} | settings
    optimizer = COST(base(model.parameters(), lr=0.01), model, scaler=scaler, **settings)
    for seed in range(steps):
        x, ys = data(2, seed=seed)
        optimizer.step(
            lambda x, ys: half_losses(model, x, ys, factor) if half else [factor * v for v in losses(model, x, ys)],
            x,
            ys,
        )
    return model, optimizer


def moved(model):
    return flat(list(model.parameters())) - flat(list(mlp(2).parameters()))


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("settings", [{}, {"every": 2}, {"max_norm": 0.1}, {"heads": "weighted"}])
@pytest.mark.parametrize("fused", [False, True])
def test_the_update_is_the_one_without_scaling(settings, fused):
    def base(params, lr):
        return torch.optim.SGD(params, lr, momentum=0.9, fused=fused)

    scaled, optimizer = run(scaler=gradients_scaler(), base=base, **settings)
    plain, _ = run(base=base, **settings)
    full, _ = run(half=False, base=base, **settings)
    assert relative(moved(scaled), moved(plain)) < 1e-3
    assert relative(moved(scaled), moved(full)) < 5e-3  # float16 itself
    assert optimizer.last_step.skipped_total == 0
    assert optimizer.scaler.get_scale() == SCALE


@pytest.mark.parametrize("every", [1, 3])
def test_scaling_saves_gradients_that_float16_loses(every):
    """G, the heads' gradients and, between two solves, the combined gradient: all of them are scaled."""

    def gradients(**settings):
        model, _ = run(factor=TINY, base=torch.optim.SGD, every=every, steps=2, **settings)
        return [p.grad for p in model.parameters()]

    truth, scaled, lost = gradients(half=False), gradients(scaler=gradients_scaler()), gradients()
    assert max(relative(a, b) for a, b in zip(scaled, truth, strict=True)) < 5e-3
    assert max(relative(a, b) for a, b in zip(lost, truth, strict=True)) > 0.5


def test_a_teleport_sees_unscaled_gradients_that_were_not_lost():
    """Inner evaluations and the gradients at the new point are scaled as the step's own are."""
    model, x, ys = conflicting()
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=1e-30), model, shared=model.trunk, scaler=gradients_scaler(),
        schedule=TeleportSchedule(start=0, cooldown=1), teleporter=DenseTeleporter(objective="norm"),
    )  # fmt: skip

    def norms():
        G = cost_mtl.task_gradients([TINY * v for v in losses(model, x, ys)], model.trunk.parameters())
        return G.double().norm(dim=1)

    before = norms()
    optimizer.step(lambda x, ys: half_losses(model, x, ys, TINY), x, ys)
    report = optimizer.last_step.teleport
    assert report.accepted, report.reason
    after = norms()
    torch.testing.assert_close(report.norms_before, before, rtol=0.01, atol=0.0)
    torch.testing.assert_close(report.norms_after, after, rtol=0.01, atol=0.0)
    torch.testing.assert_close(optimizer.last_step.norms, after, rtol=0.01, atol=0.0)
    assert float((after / before - 1).abs().max()) > 0.02  # they changed


class Probe:
    """A teleporter that only looks: at the gradients by task, and by group of tasks."""

    def propose(self, problem):
        self.by_task = problem.evaluate_gradients(0)[1]
        self.by_group = problem.evaluate_gradients(0, tasks=[[0], [0, 1]])[1]
        return cost_mtl.Move(torch.zeros_like(problem.gradients[0]), "none")


def test_a_teleporter_sees_scaled_gradients_in_every_form():
    model, x, ys = conflicting()
    probe = Probe()
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, scaler=gradients_scaler(),
        teleporter=probe,
    )  # fmt: skip
    optimizer.teleport(lambda: half_losses(model, x, ys, TINY))
    truth = cost_mtl.task_gradients([TINY * v for v in losses(model, x, ys)], model.trunk.parameters())
    assert relative(probe.by_task, truth) < 5e-3
    assert relative(probe.by_group, torch.stack([truth[0], truth.sum(dim=0)])) < 5e-3


@pytest.mark.parametrize("heads", ["own", "weighted"])
def test_large_weights_between_two_solves_do_not_overflow(heads):
    """The weights of small gradients are in the hundreds, and times the scale they would leave float16's range."""
    settings = {"every": 3, "weighting": cost_mtl.FairGrad(2.0), "heads": heads, "base": torch.optim.SGD, "steps": 3}
    scaled, optimizer = run(factor=2.0**-10, scaler=gradients_scaler(), **settings)
    full, _ = run(factor=2.0**-10, half=False, **settings)
    assert float(optimizer.last_step.weights.max()) * SCALE * 2.0**-10 > 65504
    assert optimizer.last_step.skipped_total == 0
    assert optimizer.scaler.get_scale() == SCALE
    assert relative(moved(scaled), moved(full)) < 5e-3


# ------------------------------------------------------------------------------------ overflow


@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_lowers_the_scale(policy, fused):
    model = mlp(2)
    base = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = gradients_scaler(init_scale=2.0**40)
    optimizer = COST(base, model, shared=model.trunk, scaler=scaler, on_nonfinite=policy)
    calls = []
    base.register_step_post_hook(lambda *_: calls.append(1))
    start = flat(list(model.parameters()))
    x, ys = data(2)
    scales = [scaler.get_scale()]
    while optimizer.last_step is None or optimizer.last_step.skipped:
        assert torch.equal(flat(list(model.parameters())), start)
        assert calls == []
        optimizer.step(lambda x, ys: half_losses(model, x, ys), x, ys)
        scales.append(scaler.get_scale())
        assert len(scales) < 40
    skipped = optimizer.last_step.skipped_total
    assert skipped == len(scales) - 2 >= 1
    assert scales[:-1] == [2.0 ** (40 - k) for k in range(skipped + 1)]
    assert calls == [1]
    assert not torch.equal(flat(list(model.parameters())), start)
    assert all(bool(torch.isfinite(v).all()) for s in base.state.values() for v in s.values())
    assert optimizer.progress.step == skipped + 1


def test_the_scale_grows_again():
    _, optimizer = run(scaler=gradients_scaler(init_scale=4.0, growth_interval=2), steps=4)
    assert optimizer.scaler.get_scale() == 16.0


def test_a_loss_that_is_not_finite_is_no_overflow():
    """Lowering the scale does not help against a NaN in the data."""
    model = mlp(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, scaler=gradients_scaler())
    x, ys = data(2)
    ys[1] = ys[1] * float("nan")
    with pytest.raises(FloatingPointError, match="task '1'"):
        optimizer.step(lambda: half_losses(model, x, ys))
    assert optimizer.scaler.get_scale() == SCALE


# ------------------------------------------------------------------------------------ the scaler outside


@pytest.mark.parametrize("finite", [True, False])
def test_a_disabled_scaler_is_no_scaler(finite):
    """Also where a gradient is not finite: the policy decides, and nothing reaches the parameters."""
    model = mlp(2)
    start = flat(list(model.parameters()))
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, on_nonfinite="skip",
        scaler=torch.amp.GradScaler("cpu", enabled=False),
    )  # fmt: skip
    x, ys = data(2)
    optimizer.step(lambda: losses(model, x, ys) if finite else [v.sub(v.detach()).sqrt() for v in losses(model, x, ys)])
    assert bool(torch.isfinite(flat(list(model.parameters()))).all())
    assert torch.equal(flat(list(model.parameters())), start) is not finite
    assert optimizer.last_step.skipped is not finite


def test_a_disabled_scaler_outside_passes_the_closure_through():
    model, twin = mlp(2), mlp(2)
    x, ys = data(2)
    optimizers = [COST(torch.optim.SGD(m.parameters(), lr=0.1), m, shared=m.trunk) for m in (model, twin)]
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    values = scaler.step(optimizers[0], lambda: losses(model, x, ys))
    torch.testing.assert_close(values, optimizers[1].step(lambda: losses(twin, x, ys)), rtol=0, atol=0)
    assert torch.equal(flat(list(model.parameters())), flat(list(twin.parameters())))


@pytest.mark.parametrize("call", [lambda s, o, c: s.step(o, c), lambda s, o, c: (s.unscale_(o), s.step(o, c))])
def test_an_enabled_scaler_outside_is_refused_with_the_fix_and_does_no_harm(call):
    model = mlp(2)
    x, ys = data(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk)
    start = flat(list(model.parameters()))
    scaler = gradients_scaler()
    scaler.scale(sum(losses(model, x, ys))).backward()
    with pytest.raises(RuntimeError, match=r"COST\(scaler=scaler\)"):
        call(scaler, optimizer, lambda: losses(model, x, ys))
    assert torch.equal(flat(list(model.parameters())), start)
    optimizer.step(lambda: losses(model, x, ys))  # the refusal leaves nothing behind
    assert not torch.equal(flat(list(model.parameters())), start)


def test_what_the_scaler_can_not_do_is_said_when_cost_is_made():
    model = mlp(2)
    with pytest.raises(TypeError, match=r"scaler: expected a torch\.amp\.GradScaler or None, got float"):
        COST(torch.optim.SGD(model.parameters(), lr=0.1), model, scaler=65536.0)
    model.half()
    with pytest.raises(ValueError, match="float16 parameters"):
        COST(torch.optim.SGD(model.parameters(), lr=0.1), model, scaler=gradients_scaler())


def test_hooks_of_the_base_see_unscaled_gradients():
    for fused in (False, True):
        model, plain = mlp(2), mlp(2)
        seen = []
        for m, scaler in ((model, gradients_scaler()), (plain, None)):
            base = torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused)
            base.register_step_pre_hook(lambda *_, m=m, seen=seen: seen.append(flat([p.grad for p in m.parameters()])))
            optimizer = COST(base, m, shared=m.trunk, scaler=scaler, weighting=EqualWeighting())
            x, ys = data(2)
            optimizer.step(lambda m=m, x=x, ys=ys: losses(m, x, ys))
        torch.testing.assert_close(*seen, rtol=1e-6, atol=0.0)


# ------------------------------------------------------------------------------------ autocast


@pytest.mark.parametrize("teleporter", [DenseTeleporter(), LoRATeleporter(rank=2)])
@pytest.mark.parametrize("where", ["around the step", "in the closure"])
def test_bfloat16_autocast(teleporter, where):
    """Weights stay float32, the Gramian is not rounded to bfloat16, and a teleport keeps every loss."""
    model, x, ys = conflicting()
    optimizer = COST(
        torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk, teleporter=teleporter,
        schedule=TeleportSchedule(start=0, cooldown=1),
    )  # fmt: skip
    before = torch.stack(half_losses(model, x, ys, dtype=torch.bfloat16)).detach().double()
    if where == "around the step":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step(lambda: losses(model, x, ys))
    else:
        optimizer.step(lambda: half_losses(model, x, ys, dtype=torch.bfloat16))
    report = optimizer.last_step.teleport
    assert report is not None
    assert report.accepted, report.reason
    torch.testing.assert_close(report.losses_before, before, rtol=1e-3, atol=0.0)
    torch.testing.assert_close(report.losses_after, before, rtol=0.015, atol=0.0)
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    G = cost_mtl.task_gradients(losses(model, x, ys), model.trunk.parameters())
    assert relative(optimizer.last_step.norms.float(), G.norm(dim=1)) < 0.05


def test_the_gramian_under_autocast_is_exact():
    """G G^T under autocast would be a bfloat16 product, 0.2 % off."""
    G = torch.randn(3, 1000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        M, d = cost_mtl.gramian(G), cost_mtl.combine(G, torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(M.double(), G.double() @ G.double().T, rtol=1e-6, atol=1e-3)
    torch.testing.assert_close(d.double(), torch.tensor([1.0, 2.0, 3.0]).double() @ G.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_in_half_precision_keep_their_dtype(dtype):
    model = mlp(2).to(dtype)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk)
    x, ys = data(2)
    for _ in range(2):
        optimizer.step(
            lambda: [(out.float() - y).square().mean() for out, y in zip(model(x.to(dtype)), ys, strict=True)]
        )
    assert {p.grad.dtype for p in model.parameters()} == {p.dtype for p in model.parameters()} == {dtype}
    assert optimizer.last_step.gramian.dtype == torch.float64


def test_scaling_with_sparse_gradients_and_with_learned_weights():
    """What the scaler has to multiply again is not always dense, and not always the model's."""

    def train(scaler):
        torch.manual_seed(0)
        table, model = nn.Embedding(10, 6, sparse=True), mlp(2)  # outside shared on purpose
        model.table = table
        weighting = cost_mtl.weighting.Uncertainty(2)
        base = torch.optim.SGD([*model.parameters(), *weighting.parameters()], lr=0.1)
        optimizer = COST(base, model, shared=model.trunk, weighting=weighting, scaler=scaler, teleporter=None)
        _, ys = data(2)
        rows = torch.arange(16) % 7
        for _ in range(2):
            optimizer.step(lambda: losses(model, table(rows), ys))
        return flat([*model.parameters(), *weighting.parameters()])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="shared: several tasks reach 1 parameters outside of it")
        torch.testing.assert_close(train(gradients_scaler()), train(None), rtol=1e-5, atol=1e-6)

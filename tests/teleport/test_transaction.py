"""A teleport is a transaction: verified, or undone to the bit."""

import copy
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, LoRATeleporter, Move, TeleportSchedule
from tests.nets import MultiHead, conflicting, convnet, data, losses, mlp

ALWAYS = TeleportSchedule(start=0, cooldown=1)


class Everything:
    """All that a teleport must leave as it was."""

    def __init__(self, model):
        self.model = model
        self.values = {k: v.detach().clone() for k, v in model.state_dict().items()}
        self.meta = self.now()
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        self.streams = self.draws()
        torch.manual_seed(3), np.random.seed(3), random.seed(3)

    def draws(self):
        return torch.rand(1).item(), np.random.rand(), random.random()

    def now(self):
        m = self.model
        return {
            "keys": list(m.state_dict()),
            "params": [(n, id(p), p.data_ptr(), p.stride(), p.requires_grad, p.dtype) for n, p in m.named_parameters()],
            "grads": [(n, None if p.grad is None else id(p.grad)) for n, p in m.named_parameters()],
            "modules": [(n, id(c), type(c), c.training, sorted(vars(c))) for n, c in m.named_modules()],
            "hooks": [(n, len(c._forward_hooks), len(c._backward_hooks)) for n, c in m.named_modules()],
        }

    def check(self, *, moved):
        assert self.now() == self.meta
        buffers = [n for n, _ in self.model.named_buffers()]
        changed = [k for k, v in self.model.state_dict().items() if not torch.equal(v, self.values[k])]
        assert not set(changed) & set(buffers)
        if not moved:
            assert not changed
        else:
            assert changed
            assert all(k.startswith("trunk") for k in changed)
        assert self.streams == self.draws()


def bf16_convnet():
    model = convnet().to(torch.bfloat16)
    x, ys = data(2, shape=(2, 8, 8))
    x, ys = x.bfloat16(), [y.bfloat16() for y in ys]
    return model, x, ys


def f32_convnet():
    model = convnet()
    return model, *data(2, shape=(2, 8, 8))


@pytest.mark.parametrize("build", [f32_convnet, bf16_convnet])
@pytest.mark.parametrize("teleporter", [LoRATeleporter(), DenseTeleporter()])
@pytest.mark.parametrize("accept", [True, False])
def test_identity_of_everything(build, teleporter, accept):
    model, x, ys = build()
    least = -1.0 if accept else 1e6
    rule = Acceptance(tolerance=0.5, min_angle=least, min_norm=least)
    teleporter = type(teleporter)(acceptance=rule)
    model.trunk[5].eval()  # a frozen batch norm keeps its mode
    model.trunk[0].bias.requires_grad_(False)
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk, teleporter=teleporter)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.ones_like(p)
    seen = Everything(model)
    report = opt.teleport(lambda: losses(model, x, ys))
    assert report.accepted == accept, report.reason
    seen.check(moved=accept)


def test_an_accepted_move_keeps_its_tolerance_as_an_outsider_measures_it():
    for seed in range(4):
        model, x, ys = conflicting(seed=seed)
        opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk)
        before = torch.stack(losses(model, x, ys)).detach()
        report = opt.teleport(lambda model=model, x=x, ys=ys: losses(model, x, ys))
        after = torch.stack(losses(model, x, ys)).detach()
        assert report.accepted, report.reason
        change = ((after - before).abs() / before).max()
        assert change <= 0.01
        assert report.drift == pytest.approx(float(change), rel=1e-2, abs=1e-6)
        torch.testing.assert_close(report.losses_after.float(), after, rtol=1e-5, atol=1e-7)
        G = cost_mtl.task_gradients(losses(model, x, ys), model.trunk.parameters())
        cos = torch.cosine_similarity(G, G.mean(dim=0, keepdim=True))
        torch.testing.assert_close(report.cosines_after.float(), cos, rtol=1e-4, atol=1e-5)
        assert float(cos.min()) > float(report.cosines_before.min()) + 0.02


class Raising:
    def __init__(self, error):
        self.error = error

    def propose(self, problem):
        for p in problem.params:
            with torch.no_grad():
                p.add_(1.0)
            p.requires_grad_(False)
        problem.model.left_over = 1
        problem.model.train(not problem.model.training)
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("half-way"), KeyboardInterrupt()])
def test_an_exception_in_the_teleporter_undoes_everything(error):
    model, x, ys = f32_convnet()
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk, teleporter=Raising(error))
    seen = Everything(model)
    with pytest.raises(type(error)):
        opt.teleport(lambda: losses(model, x, ys))
    seen.check(moved=False)


@pytest.mark.parametrize("fail_at", range(2, 8))
def test_an_exception_in_the_closure_undoes_everything(fail_at):
    model, x, ys = f32_convnet()
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == fail_at:
            raise RuntimeError("the loader is gone")
        return losses(model, x, ys)

    opt = cost_mtl.COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk)
    seen = Everything(model)
    with pytest.raises(RuntimeError, match="the loader is gone"):
        opt.teleport(closure)
    seen.check(moved=False)


class Fixed:
    """Proposes a given move."""

    def __init__(self, delta, objective="none", **kwargs):
        self.delta, self.objective, self.kwargs = delta, objective, kwargs

    def propose(self, problem):
        return Move(self.delta * torch.ones(sum(p.numel() for p in problem.params)), self.objective, **self.kwargs)


@pytest.mark.parametrize(
    ("teleporter", "reason"),
    [
        (Fixed(float("nan")), "not finite"),
        (Fixed(0.0), "no move"),
        (Fixed(10.0), "drifted"),
        (Fixed(1e-6, "conflict"), "angle to the mean gradient"),
        (Fixed(1e-6, "norm"), "norms changed"),
    ],
)
def test_rejections_say_why_and_change_nothing(teleporter, reason):
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=teleporter)
    seen = Everything(model)
    report = opt.teleport(lambda: losses(model, x, ys))
    assert not report.accepted
    assert reason in report.reason
    seen.check(moved=False)


def test_a_second_move_is_asked_for_at_theta():
    model, x, ys = conflicting()
    seen = []

    class Twice(Fixed):
        def propose(self, problem):
            seen.append([p.detach().clone() for p in problem.params])
            return Move(1e-4 * torch.ones(sum(p.numel() for p in problem.params)), "norm")

        def objectives_in_turn(self, problem):
            return "norm", "none"

        def propose_for(self, objective, problem, rejected):
            assert (objective, rejected.objective) == ("none", "norm")
            seen.append([p.detach().clone() for p in problem.params])
            return Move(1e-5 * torch.ones(sum(p.numel() for p in problem.params)), "none")

    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=Twice(0))
    report = opt.teleport(lambda: losses(model, x, ys))
    assert report.accepted
    assert report.objective == "none"
    assert len(seen) == 2
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    moved = [(p.detach() - a) for p, a in zip(model.trunk.parameters(), seen[0], strict=True)]
    torch.testing.assert_close(torch.cat([m.flatten() for m in moved]), torch.full((sum(m.numel() for m in moved),), 1e-5), rtol=1e-2, atol=1e-7)  # noqa: E501  # fmt: skip


def test_a_placebo_is_accepted_on_drift_alone():
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, teleporter=Fixed(1e-5), shared=model.trunk)
    assert opt.teleport(lambda: losses(model, x, ys)).accepted


def test_held_out_drift_decides_too():
    """A move that keeps the current batch exactly and ruins every other one is rejected."""
    model = mlp(2)
    x, ys = data(2)
    x[:, 5] = 0.0  # the current batch does not see this input
    far, _ = data(2, seed=9)
    far_ys = [out.detach() + 0.1 for out in model(far)]  # losses that a small change of the outputs multiplies

    class Hidden:
        def propose(self, problem):
            delta = torch.zeros(sum(p.numel() for p in problem.params))
            delta[: 8 * 6].view(8, 6)[:, 5] = 5.0
            return Move(delta, "none")

    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk, teleporter=Hidden(),
                        trigger=lambda M: False)  # fmt: skip
    opt.step(losses, model, far, far_ys)
    report = opt.teleport(losses, model, x, ys)
    assert not report.accepted
    assert report.drift == 0.0
    assert report.drift_heldout > 0.05


def test_a_closure_that_draws_its_own_batch_is_told_apart():
    model, x, ys = conflicting()
    g = torch.Generator().manual_seed(0)

    def closure():
        k = torch.randint(len(x), (4,), generator=g)
        return losses(model, x[k], [y[k] for y in ys])

    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk, schedule=ALWAYS,
                        trigger=lambda M: True)  # fmt: skip
    with pytest.raises(cost_mtl.UnrepeatableClosureError, match="closure"):
        opt.teleport(closure)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            before = model.trunk[0].weight.detach().clone()
            opt.step(closure)
            assert not torch.equal(before, model.trunk[0].weight)
    assert sum("closure" in str(w.message) for w in seen) == 1


def test_losses_computed_before_the_step_are_told_apart():
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk, schedule=ALWAYS,
                        trigger=lambda M: True)  # fmt: skip
    ready = losses(model, x, ys)
    with pytest.warns(UserWarning, match="computed before"):
        opt.step(lambda: ready)
    assert opt.progress.step == 1
    again = losses(model, x, ys)
    with pytest.raises(cost_mtl.UnrepeatableClosureError, match="computed before"):
        opt.teleport(lambda: again)


def test_after_a_rejection_the_gradients_are_reused():
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, schedule=ALWAYS,
                        teleporter=Fixed(10.0))  # fmt: skip
    twin = copy.deepcopy(model)
    plain = cost_mtl.COST(torch.optim.SGD(twin.parameters(), lr=0.1), twin, shared=twin.trunk, teleporter=None)
    opt.step(lambda: losses(model, x, ys))
    plain.step(lambda: losses(twin, x, ys))
    assert opt.last_step.teleport is not None
    assert not opt.last_step.teleport.accepted
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_step_goes_on_from_the_new_point():
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk, schedule=ALWAYS,
                        weighting=lambda M: torch.tensor([1.0, 2.0]))  # fmt: skip
    opt.step(lambda: losses(model, x, ys))
    assert opt.last_step.teleport.accepted
    G = cost_mtl.task_gradients(losses(model, x, ys), model.trunk.parameters())
    got = torch.cat([p.grad.flatten() for p in model.trunk.parameters()])
    torch.testing.assert_close(got, G[0] + 2 * G[1], rtol=1e-4, atol=1e-6)
    for i, head in enumerate(model.heads):
        want = torch.autograd.grad(losses(model, x, ys)[i], head.weight)[0]
        torch.testing.assert_close(head.weight.grad, want, rtol=1e-4, atol=1e-6)


def test_batch_norm_counts_a_teleporting_step_once():
    model, x, ys = f32_convnet()
    twin = copy.deepcopy(model)
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk, schedule=ALWAYS,
                        trigger=lambda M: True)  # fmt: skip
    torch.manual_seed(5)
    opt.step(lambda: losses(model, x, ys))
    assert opt.last_step.teleport is not None
    torch.manual_seed(5)
    losses(twin, x, ys)
    for (name, a), b in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert torch.equal(a, b), name


def test_same_seed_same_move_other_seed_other_move():
    def run(seed):
        model, x, ys = conflicting()
        opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk, seed=seed)
        opt.teleport(lambda: losses(model, x, ys))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_attempts_cooldown_and_limit_are_counted():
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk, trigger=lambda M: True,
                        teleporter=Fixed(10.0), schedule=TeleportSchedule(start=2, cooldown=3, limit=2))  # fmt: skip
    tried = []
    for step in range(12):
        opt.step(lambda: losses(model, x, ys))
        if opt.last_step.teleport is not None:
            tried.append(step)
        else:
            assert opt.last_step.conflict is None
    assert tried == [2, 5]


def test_confirm_asks_a_second_batch():
    model, x, ys = conflicting()
    agreeing = [ys[0], ys[0]]
    seen = []

    def trigger(M):
        seen.append(1)
        return bool((M.sum(dim=1) < 0).any())

    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk, trigger=trigger,
                        teleporter=Fixed(10.0), schedule=TeleportSchedule(0, 1))  # fmt: skip
    with torch.no_grad():
        model.heads[1].load_state_dict(model.heads[0].state_dict())
    opt.step(losses, model, x, agreeing)
    opt.step(losses, model, x, [ys[0] * 0 + 1, ys[0] * 0 - 5])
    assert opt.last_step.conflict
    assert opt.last_step.teleport is None
    assert opt.progress.attempts == 0
    assert opt.progress.last_asked == 1
    opt.step(losses, model, x, [ys[0] * 0 + 1, ys[0] * 0 - 5])
    assert opt.last_step.teleport is not None


@pytest.mark.parametrize("teleporter", [cost_mtl.LoRATeleporter(rank=3), cost_mtl.DenseTeleporter()])
def test_a_confirmed_conflict_gives_the_move_of_an_unconfirmed_one_for_no_more_evaluations(teleporter):
    def run(confirm):
        model, x, ys = conflicting()
        opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk,
                            teleporter=teleporter, schedule=TeleportSchedule(2, 1, confirm=confirm))  # fmt: skip
        for scale in (1.0, 0.9, 1.1):
            opt.step(losses, model, x * scale, ys)
        report = opt.last_step.teleport
        assert report.accepted
        return torch.cat([p.detach().flatten() for p in model.parameters()]), report.closure_calls

    (first, calls), (second, as_many) = run(True), run(False)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
    assert calls <= as_many


def test_no_adaptable_layer():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))

        def forward(self, x):
            return x * self.w

    model = MultiHead(Scale(), 6, 2)
    x, ys = data(2)
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=1e-2), model, shared=model.trunk, schedule=ALWAYS,
                        trigger=lambda M: True)  # fmt: skip
    with pytest.warns(UserWarning, match="Scale"):
        opt.step(lambda: losses(model, x, ys))
    with pytest.raises(cost_mtl.NoAdaptableLayerError, match="Scale"):
        opt.teleport(lambda: losses(model, x, ys))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: losses(model, x, ys))
    dense = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=1e-2), model, teleporter=DenseTeleporter())
    assert dense.teleport(lambda: losses(model, x, ys)).accepted


def test_the_callback_gets_every_report():
    model, x, ys = conflicting()
    got = []
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, on_teleport=got.append)
    report = opt.teleport(lambda: losses(model, x, ys))
    assert got == [report]
    assert report.sigma is not None


@pytest.mark.parametrize("least", [{"min_angle": 1e6, "min_norm": -1e6}, {"min_angle": -1e6, "min_norm": 1e6}])
def test_the_report_names_the_objective_that_improved(least):
    model, x, ys = conflicting()
    teleporter = Fixed(1e-6, "conflict", either=True, acceptance=Acceptance(**least))
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=teleporter)
    report = opt.teleport(lambda: losses(model, x, ys))
    assert report.accepted
    assert report.objective == ("norm" if least["min_angle"] > 0 else "conflict")
    assert f"{report.objective} objective improved" in report.reason

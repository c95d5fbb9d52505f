"""The paper's optimisation of a teleport: its steps against a slow twin, and its place inside the transaction."""

import pytest
import torch

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, DifferenceTeleporter, LoRATeleporter, Penalty
from cost_mtl.teleport.coordinates.dense import DenseCoordinates
from cost_mtl.teleport.objectives.base import in_loss_units
from cost_mtl.teleport.paper import descend, invariance_gradient
from cost_mtl.teleport.settings import named
from tests.nets import conflicting, losses
from tests.teleport.test_slopes import K, Reference, balance
from tests.teleport.test_transaction import Everything, f32_convnet


@pytest.mark.parametrize("invariance", ["each", "mean"])
def test_its_steps_are_adam_on_invariance_minus_gamma_times_the_objective(invariance):
    """Exact gradient norms, five steps, against the objective written out and differentiated as a whole."""
    reference = Reference()
    problem = reference.problem()
    coordinates = DenseCoordinates(problem)
    theta = coordinates.theta.clone()
    settings = Penalty(gamma=0.3, lr=1e-2, steps=5)
    rule = Acceptance(invariance=invariance)
    got = descend(problem, coordinates, named("norm-exact"), rule, settings)

    start = reference.losses(theta).detach()
    delta = torch.zeros_like(theta).requires_grad_()
    adam = torch.optim.Adam([delta], lr=1e-2)
    for _ in range(5):
        now = reference.losses(theta + delta)
        if invariance == "each":
            kept = ((now - start).abs() / start.abs()).mean()
        else:
            kept = (now.mean() - start.mean()).abs() / start.abs().mean()
        G = [torch.autograd.grad(loss, delta, create_graph=True)[0] for loss in now]
        R = balance(torch.stack(G).detach())
        objective = sum(R[i] * G[i].norm().log() for i in range(K))
        adam.zero_grad()
        (kept - 0.3 * objective).backward()
        adam.step()
    assert got.inner_steps == 5
    torch.testing.assert_close(got.delta, delta.detach(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("relative", [False, True])
def test_gradient_of_the_invariance_term(relative):
    reference = Reference()
    theta = torch.cat([p.detach().flatten() for p in reference.problem().params])
    start = reference.losses(theta).detach() + torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    point = theta.clone().requires_grad_()
    now = reference.losses(point)
    L_t = ((now - start).abs() / (start if relative else 1.0)).mean()
    (want,) = torch.autograd.grad(L_t, point)
    got = invariance_gradient(start, now.detach(), reference.task_gradients(theta), "each", relative=relative)
    torch.testing.assert_close(got, want)


def test_loss_units_decide_whether_the_invariance_term_is_relative():
    assert {name: in_loss_units(named(name)) for name in ("sphere", "sharpness", "norm", "conflict-exact")} == {
        "sphere": True, "sharpness": True, "norm": False, "conflict-exact": False,
    }  # fmt: skip


LOOSE = Acceptance(tolerance=0.5, tolerance_heldout=0.5, min_angle=-1.0, min_norm=-1.0)
STRICT = Acceptance(tolerance=1e-9)


@pytest.mark.parametrize("objective", ["auto", "sharpness", "norm-exact", "conflict"])
@pytest.mark.parametrize("make", [LoRATeleporter, DenseTeleporter])
def test_a_rejected_one_changes_not_one_bit(make, objective):
    model, x, ys = f32_convnet()
    teleporter = make(objective=objective, solver=Penalty(steps=3, lr=1e-2), acceptance=STRICT)
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk, teleporter=teleporter)
    seen = Everything(model)
    report = opt.teleport(lambda: losses(model, x, ys))
    assert not report.accepted
    assert "drifted" in report.reason
    assert report.inner_steps == 3
    seen.check(moved=False)


@pytest.mark.parametrize("make", [LoRATeleporter, DenseTeleporter])
def test_an_accepted_one_leaves_no_trace_but_the_move(make):
    model, x, ys = f32_convnet()
    teleporter = make(objective="norm-exact", solver=Penalty(steps=5), acceptance=LOOSE)
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters()), model, shared=model.trunk, teleporter=teleporter)
    seen = Everything(model)
    report = opt.teleport(lambda: losses(model, x, ys))
    assert report.accepted, report.reason
    assert report.length > 0
    seen.check(moved=True)


def test_it_uses_the_batches_in_turn():
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=1e-3), model, shared=model.trunk,
                        trigger=lambda M: False,
                        teleporter=DenseTeleporter("norm", Penalty(steps=4), LOOSE))  # fmt: skip
    seen = []

    def watched(m, x, ys):
        seen.append(float(x[0, 0]))
        return losses(m, x, ys)

    for shift in (0.0, 0.1):
        opt.step(watched, model, x + shift, ys)
    seen.clear()
    opt.teleport(watched, model, x + 0.2, ys)
    first = float(x[0, 0])
    assert {round(v - first, 3) for v in seen} == {0.2, 0.1, 0.0}  # two in use, one held out


def test_differences_can_be_its_coordinates():
    model, x, ys = conflicting()
    teleporter = DifferenceTeleporter(every=1, objective="norm", solver=Penalty(steps=3), acceptance=LOOSE)
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=1e-2), model, shared=model.trunk,
                        trigger=lambda M: False, teleporter=teleporter)  # fmt: skip
    for _ in range(3):
        opt.step(lambda: losses(model, x, ys))
    assert opt.teleport(lambda: losses(model, x, ys)).inner_steps == 3


@pytest.mark.parametrize("wrong", [{"lr": 0.0}, {"epsilon": -1.0}, {"gamma": -0.1}, {"steps": 0}, {"steps": 2.5},
                                   {"constraints": -1}])  # fmt: skip
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Penalty(**wrong)

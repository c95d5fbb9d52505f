"""Coordinates of block-wise differences, and the teleporter that moves along them."""

import copy
import io

import pytest
import torch

import cost_mtl
from cost_mtl import Acceptance, DifferenceTeleporter, TeleportSchedule
from cost_mtl.teleport.coordinates.difference import DifferenceCoordinates
from tests.nets import conflicting, losses
from tests.teleport.test_adapters import problem_of


def space_at_theta():
    model, x, ys = conflicting()
    problem = problem_of(model, x, ys)
    problem.iterates = [torch.randn(problem.layout.numel) for _ in range(2)]
    return problem, DifferenceCoordinates(problem)


def test_gradients_are_those_of_the_losses_in_the_coefficients():
    problem, coordinates = space_at_theta()
    _, J = coordinates.gradients(0)
    step = 1e-3
    for n in (0, 3, J.shape[1] - 1):
        values = []
        for sign in (1, -1):
            phi = torch.zeros(J.shape[1])
            phi[n] = sign * step
            coordinates.place(phi)
            values.append(problem.evaluate(0))
        torch.testing.assert_close((values[0] - values[1]) / (2 * step), J[:, n].double(), rtol=2e-2, atol=1e-3)
    coordinates.place(torch.zeros(J.shape[1]))
    assert coordinates.length() == 0.0


def test_a_move_stays_in_the_span_of_the_differences():
    problem, coordinates = space_at_theta()
    phi = torch.randn(coordinates.gradients(0)[1].shape[1])
    coordinates.place(phi)
    delta = coordinates.delta()
    start = 0
    for p in problem.params:
        block = slice(start, start + p.numel())
        basis = torch.stack([(coordinates.theta - h)[block] for h in problem.iterates], dim=1)
        fit = basis @ torch.linalg.lstsq(basis, delta[block, None]).solution
        torch.testing.assert_close(fit[:, 0], delta[block], rtol=1e-3, atol=1e-4)
        start = block.stop


def run(steps, *, resume_at=None):
    model, x, ys = conflicting()
    rule = Acceptance(min_angle=1e-3, min_norm=1e-3)
    make = lambda m: cost_mtl.COST(  # noqa: E731
        torch.optim.SGD(m.parameters(), lr=0.02), m, shared=m.trunk, schedule=TeleportSchedule(8, 4),
        trigger=lambda M: True, teleporter=DifferenceTeleporter(directions=3, every=2, acceptance=rule),
    )  # fmt: skip
    opt = make(model)
    reports = []
    for step in range(steps):
        if step == resume_at:
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            model = copy.deepcopy(model)
            opt = make(model)
            model.load_state_dict(saved["model"])
            opt.load_state_dict(saved["opt"])
        opt.step(lambda model=model: losses(model, x, ys))
        if opt.last_step.teleport is not None:
            reports.append(opt.last_step.teleport)
    return model, reports


def test_it_moves_and_resumes_bit_for_bit():
    model, reports = run(20)
    assert any(r.accepted for r in reports), [r.reason for r in reports]
    assert all(r.drift <= 0.01 for r in reports if r.accepted)
    again, _ = run(20, resume_at=9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_without_an_earlier_iterate_it_says_so():
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                        teleporter=DifferenceTeleporter())  # fmt: skip
    report = opt.teleport(lambda: losses(model, x, ys))
    assert not report.accepted
    assert "earlier iterate" in report.reason


@pytest.mark.parametrize(("kwargs", "word"), [({"directions": 0}, "directions"), ({"every": 1.5}, "every"),
                                              ({"objective": "best"}, "objective")])  # fmt: skip
def test_wrong_settings_are_named(kwargs, word):
    with pytest.raises(ValueError, match=word):
        DifferenceTeleporter(**kwargs)

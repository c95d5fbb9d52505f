"""What a teleport keeps: every loss, or the mean loss alone."""

import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, DifferenceTeleporter, LoRATeleporter
from cost_mtl.teleport.invariance import relative_change


class Plane(nn.Module):
    """Two parameters, two quadratic losses: as many losses as parameters, so that no direction keeps both."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))

    def losses(self):
        a, b = self.theta
        return [(a - 3) ** 2 + 0.3 * (b + 1) ** 2, (a + 3) ** 2 + 0.3 * (b + 4) ** 2]


def teleport(**settings):
    model = Plane()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, teleporter=DenseTeleporter(**settings))
    before = torch.stack(model.losses()).detach()
    report = opt.teleport(model.losses)
    return model, report, before, torch.stack(model.losses()).detach()


def test_two_losses_and_two_parameters_leave_no_direction_that_keeps_both():
    model, report, before, after = teleport()
    assert not report.accepted
    assert torch.equal(before, after)
    assert model.theta.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("objective", ["auto", "conflict", "norm"])
def test_the_mean_loss_alone_can_be_kept(objective):
    _, report, before, after = teleport(invariance="mean", objective=objective)
    assert report.accepted, report.reason
    change = float((after.mean() - before.mean()).abs() / before.abs().mean())
    assert change <= 0.01
    assert report.drift == pytest.approx(change, abs=1e-9)
    assert float(((after - before).abs() / before).max()) > 0.01  # the single losses were traded
    assert "mean loss" in report.reason


def test_a_move_that_changes_the_mean_loss_is_rejected_as_such():
    class Away:
        def propose(self, problem):
            return cost_mtl.Move(torch.tensor([1.0, 1.0]), "none", acceptance=Acceptance(invariance="mean"))

    model = Plane()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, teleporter=Away())
    report = opt.teleport(model.losses)
    assert not report.accepted
    assert "the mean loss drifted" in report.reason
    assert model.theta.tolist() == [1.0, 2.0]


def test_relative_change_of_the_mean():
    before, after = torch.tensor([2.0, -4.0]), torch.tensor([3.0, -5.0])
    assert relative_change(before, after) == 0.5
    assert relative_change(before, after, "mean") == 0.0
    assert relative_change(before, before + 0.3, "mean") == pytest.approx(0.1)
    assert relative_change(torch.zeros(2), torch.ones(2), "mean") == float("inf")
    assert relative_change(before, torch.tensor([float("nan"), 1.0]), "mean") == float("inf")


@pytest.mark.parametrize("make", [LoRATeleporter, DenseTeleporter, DifferenceTeleporter])
def test_settings_are_shorthands_for_the_acceptance(make):
    teleporter = make(invariance="mean", tolerance=0.02, acceptance=Acceptance(tolerance_heldout=0.3))
    assert teleporter.acceptance == Acceptance(tolerance=0.02, tolerance_heldout=0.3, invariance="mean")
    assert make().acceptance == Acceptance()
    for wrong in ({"invariance": "all"}, {"tolerance": -1}, {"objective": "best"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            make(**wrong)
    with pytest.raises(TypeError, match="solver"):
        make(solver=cost_mtl.LevelSet)
    with pytest.raises(TypeError, match="acceptance"):
        make(acceptance=0.01)
    with pytest.raises(ValueError, match="invariance"):
        Acceptance(invariance="sum")

"""Gradients whose squares leave float64, and weights without end on gradients that are zero."""

import pytest
import torch
from torch import nn

import cost_mtl

WEIGHTINGS = [
    cost_mtl.FairGrad(),
    cost_mtl.NashMTL(),
    cost_mtl.CAGrad(),
    cost_mtl.MGDA(),
    cost_mtl.IMTLG(),
    cost_mtl.PCGrad(),
    cost_mtl.EqualWeighting(),
]


def two_tasks(dtype, scales, **settings):
    torch.manual_seed(0)
    theta = nn.Parameter(torch.randn(4, dtype=dtype))
    model = nn.ParameterList([theta])
    away = torch.randn(2, 4, dtype=dtype)
    base = torch.optim.SGD([theta], lr=0.1)
    optimizer = cost_mtl.COST(base, model, shared=[theta], teleporter=None, **settings)
    return theta, optimizer, lambda: {f"task {k}": s * (theta * away[k]).sum().abs() for k, s in enumerate(scales)}


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda w: type(w).__name__)
@pytest.mark.parametrize("scales", [(1e160, 1.0), (1e300, 1e300)])
def test_a_gradient_whose_square_is_no_number_is_one_that_is_not_finite(weighting, scales):
    theta, optimizer, closure = two_tasks(torch.float64, scales, weighting=weighting, on_nonfinite="skip")
    before = theta.detach().clone()
    optimizer.step(closure)
    assert optimizer.last_step.skipped
    assert torch.equal(theta, before)

    theta, optimizer, closure = two_tasks(torch.float64, scales, weighting=weighting)
    with pytest.raises(FloatingPointError, match="task 0"):
        optimizer.step(closure)
    assert torch.equal(theta, before)


@pytest.mark.filterwarnings("ignore:weighting. the combined gradient")
def test_the_longest_gradient_below_that_is_weighed():
    theta, optimizer, closure = two_tasks(torch.float64, (1e150, 1.0), weighting=cost_mtl.MGDA())
    optimizer.step(closure)
    assert not optimizer.last_step.skipped
    assert torch.isfinite(theta).all()


def test_a_zero_gradient_under_an_endless_weight_is_clipped_to_zero():
    """A loss of 1e-40 has the weight 1e40, beyond float32; its gradient has underflowed."""
    theta, optimizer, _ = two_tasks(torch.float32, (1, 1), weighting=cost_mtl.ScaleInvariant(), max_norm=1.0)
    before = theta.detach().clone()
    optimizer.step(lambda: [1e-40 + 0 * theta.sum(), 1e-40 + 0 * theta.square().sum()])
    assert torch.equal(theta, before)
    assert not optimizer.last_step.skipped

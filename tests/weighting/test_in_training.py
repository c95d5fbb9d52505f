"""The weightings that learn, remember or look again, inside COST."""

import warnings

import pytest
import torch

import cost_mtl
from cost_mtl.weighting import DWA, FAMO, Uncertainty


def test_uncertainty_is_learnt_beside_the_model():
    model = torch.nn.ModuleDict({"trunk": torch.nn.Linear(3, 2, bias=False), "head": torch.nn.Linear(2, 1)})
    weighting = Uncertainty(2)
    base = torch.optim.SGD([*model.parameters(), *weighting.parameters()], lr=0.1)
    optimizer = cost_mtl.COST(base, model, shared=model["trunk"], weighting=weighting, teleporter=None)
    x = torch.ones(4, 3)

    def losses():
        out = model["head"](model["trunk"](x))
        return [(out - 5).square().mean(), out.abs().mean() * 0 + out.square().mean() * 1e-3]

    before = [loss.item() for loss in losses()]
    optimizer.step(losses)
    # One step of gradient descent on exp(-s) L / 2 + s / 2 from s = 0.
    expected = [-0.1 * (1 - loss) / 2 for loss in before]
    torch.testing.assert_close(weighting.log_variances.detach(), torch.tensor(expected), rtol=1e-4, atol=1e-6)


def learnt_beside(make_base, weighting):
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"trunk": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 1)})
    optimizer = cost_mtl.COST(make_base(model), model, shared=model, weighting=weighting, teleporter=None)
    x = torch.ones(4, 3)

    def losses():
        out = model["head"](model["trunk"](x))
        return [(out - 5).square().mean(), (out + 1).square().mean()]

    return optimizer, losses


def test_parameters_of_a_weighting_that_nothing_steps_are_said_once():
    weighting = Uncertainty(2)
    optimizer, losses = learnt_beside(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), weighting)
    with pytest.warns(UserWarning, match=r"weighting: 1 parameters of its own .* no param group") as caught:
        optimizer.step(losses)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(losses)
    assert weighting.log_variances.tolist() == [0.0, 0.0]
    assert weighting.log_variances.grad is not None  # for whichever optimizer the user has for them


def test_another_number_of_losses_is_said_where_the_step_was_called():
    optimizer, losses = learnt_beside(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), DWA(1))
    optimizer.step(losses)
    with pytest.warns(UserWarning, match="3 losses instead of 2; the weighting starts again") as caught:
        optimizer.step(lambda: [*losses(), losses()[0]])
    assert [warning.filename for warning in caught] == [__file__]


def test_parameters_of_a_weighting_may_join_the_base_optimizer_late():
    weighting = Uncertainty(2)
    optimizer, losses = learnt_beside(lambda model: torch.optim.SGD(model.parameters(), lr=0.1), weighting)
    optimizer.add_param_group({"params": weighting.parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(losses)
    assert (weighting.log_variances != 0).all()


def test_famo_gets_the_losses_after_the_update():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"trunk": torch.nn.Linear(3, 2), "a": torch.nn.Linear(2, 1), "b": torch.nn.Linear(2, 1)}
    )
    optimizer = cost_mtl.COST(
        torch.optim.SGD(model.parameters(), lr=0.05), model, shared=model["trunk"], weighting=FAMO(), teleporter=None
    )
    x, calls = torch.randn(8, 3), []

    def losses():
        calls.append(1)
        z = model["trunk"](x)
        return [(model["a"](z) - 1).square().mean(), (model["b"](z) + 1).square().mean()]

    for _ in range(3):
        optimizer.step(losses)
    assert len(calls) == 6
    assert optimizer.last_step.weights.sum() == pytest.approx(1)


def test_losses_that_differentiate_inside_can_be_observed():
    # An energy and its forces: the closure needs gradients enabled in every call, the one after the update too.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.05), model, weighting=FAMO(), teleporter=None)
    seen = []

    def losses():
        x = torch.ones(8, 3, requires_grad=True)
        energy = model(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        seen.append([energy.detach().mean().item(), [p.grad for p in model.parameters()]])
        return [(energy - 1).square().mean(), (forces - 1).square().mean()]

    optimizer.step(losses)
    grads = [p.grad for p in model.parameters()]
    assert len(seen) == 2
    assert seen[0][0] != seen[1][0]  # after the update
    assert all(a is b for a, b in zip(seen[1][1], grads, strict=True))  # and without a backward pass of its own


def test_famo_between_solves_and_where_nothing_is_shared():
    # `observe` belongs to `weigh`: steps that reuse weights, or have none, call the closure once.
    torch.manual_seed(0)
    shared, apart = torch.nn.Linear(3, 2), torch.nn.ModuleList([torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)])
    x, calls = torch.randn(8, 3), []

    def losses(first, second):
        calls.append(1)
        return [(first(x) - 1).square().mean(), (second(x) + 1).square().mean()]

    for model, pair, expected in ((shared, (shared, shared), [1, 0, 0, 1, 0, 0, 1]), (apart, apart, [0] * 7)):
        base = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = cost_mtl.COST(base, model, weighting=FAMO(), teleporter=None, every=3)
        observed = []
        for _ in range(7):
            calls.clear()
            optimizer.step(losses, *pair)
            observed.append(len(calls) - 1)
        assert observed == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weightings_get_a_gramian_in_float64_whatever_the_model(dtype):
    torch.manual_seed(0)
    model, x, seen = torch.nn.Linear(3, 2).to(dtype), torch.randn(8, 3, dtype=dtype), []

    def weighting(gramian):
        seen.append(gramian.dtype)
        return torch.ones(len(gramian))

    optimizer = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, weighting=weighting, teleporter=None)
    optimizer.step(lambda: [model(x).square().mean(), (model(x) - 1).square().mean()])
    assert seen == [torch.float64]

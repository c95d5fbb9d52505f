"""The weightings that need losses, whole gradients or a memory, against the papers' formulas done the long way."""

import copy
import io
import math
import pickle
import random

import numpy as np
import pytest
import torch

from cost_mtl.base import ObservingWeighting, StatefulWeighting, WeightingInputs
from cost_mtl.weighting import DWA, FAMO, RLW, GradDrop, PCGrad, ScaleInvariant, Uncertainty
from cost_mtl.weighting.graddrop import drop_signs
from cost_mtl.weighting.pcgrad import project_conflicts

STATEFUL = {
    "rlw": RLW(), "dwa": DWA(steps_per_epoch=3), "graddrop": GradDrop(), "pcgrad": PCGrad(), "famo": FAMO(),
    "si": ScaleInvariant(), "uncertainty": Uncertainty(4),
}  # fmt: skip
every = pytest.mark.parametrize("weighting", STATEFUL.values(), ids=STATEFUL)


def inputs(step=0, losses=None, G=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    if G is None:
        G = torch.randn(4, 50, generator=generator)
    if losses is None:
        losses = torch.rand(len(G), generator=generator) + 0.1
    return WeightingInputs((G.double() @ G.double().T).to(dtype), losses, G, step)


def run(weighting, steps, state=None, start=0):
    state = weighting.initial_state(4) if state is None else state
    weights = []
    for step in range(start, start + steps):
        weighed = weighting.weigh(inputs(step), state)
        state = weighed.state
        if isinstance(weighting, ObservingWeighting):
            state = weighting.observe(inputs(step).losses * 0.9**step, state)
        weights.append(weighed.weights)
    return torch.stack(weights), state


@every
def test_contract(weighting):
    assert isinstance(weighting, StatefulWeighting)
    given = inputs(dtype=torch.float64)
    before = copy.deepcopy(given)
    weighed = weighting.weigh(given, weighting.initial_state(4))
    assert (weighed.weights.shape, weighed.weights.dtype) == ((4,), torch.float64)
    assert torch.isfinite(weighed.weights).all()
    assert not weighed.weights.requires_grad
    for name in ("gramian", "losses", "gradients"):
        assert torch.equal(getattr(given, name), getattr(before, name))


@every
def test_a_saved_state_goes_on_bit_for_bit(weighting):
    whole, _ = run(weighting, 8)
    _, state = run(weighting, 5)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    rest, _ = run(pickle.loads(pickle.dumps(weighting)), 3, torch.load(file, weights_only=True), start=5)
    assert torch.equal(rest, whole[5:])


@every
def test_a_state_handed_in_is_left_as_it_was(weighting):
    _, state = run(weighting, 4)
    before = copy.deepcopy(state)
    run(weighting, 2, state, start=4)
    assert str(state) == str(before)


@every
def test_no_global_random_stream_is_touched(weighting):
    def streams():
        return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    before = streams()
    run(weighting, 3)
    assert streams() == before


@pytest.mark.parametrize("make", [RLW, GradDrop, PCGrad])
def test_draws_are_keyed_on_seed_and_step(make):
    def draw(seed, step):
        # The same tasks in every step: three that all conflict, so that the order matters.
        G = torch.tensor([[1.0, 0, 0.3], [-0.6, 1, 0], [-0.5, -0.7, 1]])
        weighed = make(seed=seed).weigh(inputs(step, G=G.repeat(1, 20)), {})
        return weighed.weights if weighed.direction is None else weighed.direction

    assert torch.equal(draw(0, 3), draw(0, 3))
    assert len({tuple(draw(0, step).tolist()) for step in range(12)}) > 3
    assert len({tuple(draw(seed, 3).tolist()) for seed in range(12)}) > 3


@every
def test_the_default_device_does_not_matter(weighting):
    given = inputs()
    expected = weighting.weigh(given, weighting.initial_state(4)).weights
    with torch.device("meta"):
        weighed = weighting.weigh(given, weighting.initial_state(4)).weights
    assert torch.equal(weighed, expected)


def test_rlw_is_a_softmax_of_normal_numbers():
    weights = torch.stack([RLW().weigh(inputs(step), {}).weights for step in range(2000)]).double()
    torch.testing.assert_close(weights.sum(1), torch.ones(2000, dtype=torch.float64), rtol=1e-6, atol=0)
    # Differences of the logarithms are differences of two standard normal numbers: mean 0, variance 2.
    gaps = weights[:, 0].log() - weights[:, 1].log()
    assert abs(float(gaps.mean())) < 4 * math.sqrt(2 / 2000)
    assert abs(float(gaps.var()) - 2) < 4 * 2 * math.sqrt(2 / 2000)


def test_rlw_dirichlet_is_uniform_on_the_simplex():
    weighting = RLW("dirichlet", scale="sum")
    weights = torch.stack([weighting.weigh(inputs(step), {}).weights for step in range(2000)]).double() / 4
    # Dirichlet(1, 1, 1, 1): means 1/4, variances (1/4)(3/4)/5.
    torch.testing.assert_close(weights.mean(0), torch.full((4,), 0.25, dtype=torch.float64), atol=0.018, rtol=0)
    torch.testing.assert_close(weights.var(0), torch.full((4,), 0.0375, dtype=torch.float64), atol=0.006, rtol=0)


def test_dwa_follows_the_ratio_of_the_last_two_epochs():
    weighting, state = DWA(steps_per_epoch=2, temperature=0.5), None
    epochs = torch.tensor([[[1.0, 4.0], [3.0, 2.0]], [[1.0, 1.0], [2.0, 2.0]], [[5.0, 7.0], [9.0, 9.0]]])
    weights = []
    for step, losses in enumerate(epochs.reshape(6, 2)):
        state = weighting.initial_state(2) if state is None else state
        weighed = weighting.weigh(inputs(step, losses, torch.eye(2)), state)
        state = weighed.state
        weights.append(weighed.weights)
    means = epochs.mean(1)
    expected = 2 * torch.softmax(means[1] / means[0] / 0.5, 0)
    assert torch.equal(torch.stack(weights[:4]), torch.ones(4, 2))
    torch.testing.assert_close(weights[4], expected)
    torch.testing.assert_close(weights[5], expected)


def test_dwa_with_a_task_that_had_no_labels():
    weighting, state = DWA(steps_per_epoch=1), DWA(steps_per_epoch=1).initial_state(2)
    for step in range(4):
        weighed = weighting.weigh(inputs(step, torch.tensor([1.0, 0.0]), torch.eye(2)), state)
        state = weighed.state
    torch.testing.assert_close(weighed.weights, torch.ones(2))


def test_scale_invariant_is_the_gradient_of_the_sum_of_logarithms():
    losses = torch.tensor([0.5, 2.0, 1e-6], requires_grad=True)
    losses.log().sum().backward()
    weighed = ScaleInvariant().weigh(inputs(0, losses, torch.eye(3)), {})
    torch.testing.assert_close(weighed.weights, losses.grad)
    assert ScaleInvariant().weigh(inputs(0, torch.tensor([0.0, 1.0]), torch.eye(2)), {}).weights.tolist() == [0, 1]
    with pytest.raises(ValueError, match="got -2 for task '1'"):
        ScaleInvariant().weigh(inputs(0, torch.tensor([1.0, -2.0]), torch.eye(2)), {})


def test_uncertainty_gradients_are_those_of_kendalls_objective():
    weighting = Uncertainty(3, log_variance=-0.5)
    with torch.no_grad():
        weighting.log_variances.copy_(torch.tensor([-0.5, 0.3, 2.0]))
    losses = torch.tensor([0.7, 3.0, 1e-3], requires_grad=True)
    s = weighting.log_variances.detach().clone().requires_grad_()
    (torch.exp(-s) * losses / 2 + s / 2).sum().backward()
    weighed = weighting.weigh(inputs(0, losses, torch.eye(3)), {})
    torch.testing.assert_close(weighed.weights, losses.grad)
    ((parameter, gradient),) = weighed.parameter_grads
    assert parameter is weighting.log_variances
    torch.testing.assert_close(gradient, s.grad)
    assert parameter.grad is None  # writing it is COST's business
    with pytest.raises(ValueError, match="num_tasks: expected the number of losses, 2, got 3"):
        weighting.weigh(inputs(0, torch.ones(2), torch.eye(2)), {})


def test_graddrop_keeps_one_sign_per_element():
    G = torch.tensor([[1.0, -2.0, 3.0, 0.0, 1.0], [-4.0, -1.0, 1.0, 0.0, -1.0]])
    purity = torch.tensor([0.2, 0.0, 1.0, 0.5, 0.5])  # (1 + sum / sum of sizes) / 2
    below, above = (purity - 0.01).clamp(min=0), (purity + 0.01).clamp(max=0.999)
    torch.testing.assert_close(drop_signs(G, below), torch.tensor([1.0, -3.0, 4.0, 0.0, 1.0]))
    torch.testing.assert_close(drop_signs(G, above), torch.tensor([-4.0, -3.0, 4.0, 0.0, -1.0]))
    leaked = torch.tensor([1.0 - 0.25 * 4, -3.0, 4.0, 0.0, 1.0 - 0.25])
    torch.testing.assert_close(drop_signs(G, below, leak=0.25), leaked)


def test_graddrop_keeps_a_sign_as_often_as_its_purity_says():
    G = torch.tensor([[3.0], [-1.0]]).repeat(1, 20_000)
    direction = GradDrop(seed=1).weigh(inputs(0, G=G), {}).direction
    share = float((direction > 0).double().mean())  # (1 + 2 / 4) / 2 = 3/4
    assert abs(share - 0.75) < 4 * math.sqrt(0.75 * 0.25 / 20_000)
    assert set(direction.unique().tolist()) == {-1.0, 3.0}


def test_graddrop_of_half_precision_gradients():
    G = torch.randn(3, 1000).bfloat16()
    direction = GradDrop().weigh(inputs(0, G=G), {}).direction
    assert (direction.dtype, direction.shape) == (torch.bfloat16, (1000,))


@pytest.mark.parametrize("K", [2, 3, 7])
def test_pcgrad_is_the_surgery_on_the_vectors_themselves(K):
    G = torch.randn(K, K + 1, dtype=torch.float64)
    orders = torch.stack([torch.randperm(K) for _ in range(K)])
    expected = torch.zeros_like(G)
    for i, order in enumerate(orders.tolist()):
        g = G[i].clone()
        for j in order:
            if j != i and g @ G[j] < 0:
                g -= (g @ G[j]) / (G[j] @ G[j]) * G[j]
        expected[i] = g
    torch.testing.assert_close(project_conflicts(G @ G.T, orders) @ G, expected, rtol=1e-9, atol=1e-12)


def test_pcgrad_of_two_tasks_in_closed_form():
    g, h = torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])
    G = torch.stack([g, h])
    w = PCGrad().weigh(inputs(0, G=G), {}).weights
    # g - (g.h / h.h) h + h - (g.h / g.g) g
    torch.testing.assert_close(w @ G, g + 0.5 * h + h + g)
    torch.testing.assert_close(PCGrad(scale="mean").weigh(inputs(0, G=G), {}).weights, w / 2)
    agreeing = PCGrad().weigh(inputs(0, G=torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])), {}).weights
    assert torch.equal(agreeing, torch.ones(3))


def test_famo_is_its_loss_and_adam_on_the_logits():
    weighting = FAMO(lr=0.05, weight_decay=0.01, min_losses=(0.1, 0.0, 0.2))
    bounds = torch.tensor(weighting.min_losses, dtype=torch.float64)
    xi = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    adam = torch.optim.Adam([xi], lr=0.05, weight_decay=0.01)
    state = weighting.initial_state(3)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        before = (torch.rand(3, generator=generator, dtype=torch.float64) + 0.5).requires_grad_()
        after = before.detach() * torch.tensor([0.9, 0.99, 1.1])
        # Algorithm 2: the loss is sum_i c z_i log(L_i - b_i) with c such that the weights sum to 1.
        z, gap = torch.softmax(xi.detach(), 0), before - bounds + 1e-8
        c = 1 / (z / gap.detach()).sum()
        (c * z * gap.log()).sum().backward()
        weighed = weighting.weigh(inputs(step, before, torch.eye(3), torch.float64), state)
        torch.testing.assert_close(weighed.weights, before.grad, rtol=1e-9, atol=1e-12)
        logits = torch.tensor([weighed.state["tasks"][name]["logit"] for name in "012"], dtype=torch.float64)
        torch.testing.assert_close(logits, xi.detach(), rtol=1e-9, atol=1e-12)
        fallen = gap.detach().log() - (after - bounds + 1e-8).log()
        adam.zero_grad()
        xi.grad = torch.autograd.grad(torch.softmax(xi, 0), xi, grad_outputs=fallen)[0]
        adam.step()
        state = weighting.observe(after, weighed.state)


def test_famo_refuses_what_it_cannot_take_the_logarithm_of():
    with pytest.raises(ValueError, match="got -1 for task '0'"):
        FAMO().weigh(inputs(0, torch.tensor([-1.0, 1.0]), torch.eye(2)), FAMO().initial_state(2))
    with pytest.raises(ValueError, match=r"min_losses: expected one for each of the 2 tasks .* got 3"):
        FAMO(min_losses=(0.0, 0.0, 0.0)).weigh(inputs(0, torch.ones(2), torch.eye(2)), FAMO().initial_state(2))
    weighed = FAMO().weigh(inputs(0, torch.ones(2), torch.eye(2)), FAMO().initial_state(2))
    state = FAMO().observe(torch.tensor([1.0, -0.5]), weighed.state)
    with pytest.raises(ValueError, match=r"after the last update, got -0.5 for task '1'"):
        FAMO().weigh(inputs(1, torch.ones(2), torch.eye(2)), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DWA(steps_per_epoch=0),
        lambda: DWA(steps_per_epoch=1, temperature=0.0),
        lambda: GradDrop(leak=1.5),
        lambda: FAMO(lr=-1.0),
        lambda: FAMO(epsilon=0.0),
        lambda: RLW("uniform"),
        lambda: RLW(scale="raw"),
        lambda: PCGrad(scale="raw"),
        lambda: Uncertainty(0),
    ],
)
def test_settings_out_of_range(make):
    with pytest.raises(ValueError, match=r"^\w+: expected .* got"):
        make()

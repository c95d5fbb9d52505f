"""HTR against its definition: the published update with sigma * beta, computed from scratch."""

import pytest
import torch
from torch import nn, optim

from cost_mtl.history import reuse_trajectory_, rollback_, second_moment_root, sigma_for

BETA1, BETA2, LR, EPS = 0.9, 0.99, 1e-2, 1e-8


def trained(build, steps=7, *, seed=0):
    """A parameter with some history, and the gradient of the coming step."""
    torch.manual_seed(seed)
    p = nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    base = build([p])
    for _ in range(steps):
        p.grad = torch.randn_like(p)
        base.step()
    p.grad = torch.randn_like(p)
    return p, base


@pytest.mark.parametrize("sigma", [0.0, 0.3, 0.9])
def test_adam_both_moments_is_the_published_update(sigma):
    p, base = trained(lambda ps: optim.Adam(ps, lr=LR, betas=(BETA1, BETA2), eps=EPS))
    state, y, start = base.state[p], p.grad.clone(), p.detach().clone()
    t = float(state["step"])
    # The corrected averages, updated once with sigma * beta and brought back to the mass of step t + 1.
    m_hat = state["exp_avg"] / (1 - BETA1**t)
    s_hat = state["exp_avg_sq"] / (1 - BETA2**t)

    def update(x_hat, beta, value):
        blended = sigma * x_hat + (1 - sigma) * value
        raw = beta * blended * (1 - beta**t) + (1 - beta) * value
        return raw / (1 - beta ** (t + 1))

    want = start - LR * update(m_hat, BETA1, y) / (update(s_hat, BETA2, y * y).sqrt() + EPS)
    reuse_trajectory_(base, [p], sigma, moments="both")
    base.step()
    torch.testing.assert_close(p.detach(), want, rtol=1e-12, atol=1e-14)


def test_rmsprop_average_without_correction_is_the_published_update():
    alpha, sigma = 0.95, 0.4
    p, base = trained(lambda ps: optim.RMSprop(ps, lr=LR, alpha=alpha, eps=EPS))
    y, start = p.grad.clone(), p.detach().clone()
    s = sigma * alpha * base.state[p]["square_avg"] + (1 - sigma * alpha) * y * y
    reuse_trajectory_(base, [p], sigma, moments="both")
    base.step()
    torch.testing.assert_close(p.detach(), start - LR * y / (s.sqrt() + EPS), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_momentum_buffer_is_scaled(nesterov):
    mu, sigma = 0.9, 0.25
    p, base = trained(lambda ps: optim.SGD(ps, lr=LR, momentum=mu, nesterov=nesterov))
    y, start = p.grad.clone(), p.detach().clone()
    buffer = sigma * mu * base.state[p]["momentum_buffer"] + y
    reuse_trajectory_(base, [p], sigma)
    base.step()
    direction = y + mu * buffer if nesterov else buffer
    torch.testing.assert_close(p.detach(), start - LR * direction, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "SGD", "Muon"])
def test_sigma_zero_makes_the_first_moment_forget(name):
    builders = {"SGD": lambda ps: optim.SGD(ps, lr=LR, momentum=0.9), "Muon": lambda ps: optim.Muon(ps, lr=LR)}
    build = builders.get(name, lambda ps: getattr(optim, name)(ps, lr=LR))
    key = "momentum_buffer" if name in builders else "exp_avg"
    moments = []
    for seed in (0, 1):  # two different histories, the same coming gradient
        p, base = trained(build, steps=6, seed=seed)
        p.grad = torch.arange(6, dtype=torch.float64).view(3, 2)
        with torch.no_grad():
            p.fill_(1.0)
        reuse_trajectory_(base, [p], 0.0)
        base.step()
        moments.append(base.state[p][key])
    torch.testing.assert_close(moments[0], moments[1], rtol=1e-12, atol=1e-14)


def test_adam_reset_late_in_training_does_not_shrink_the_next_update():
    p, base = trained(lambda ps: optim.Adam(ps, lr=LR), steps=300)
    with torch.no_grad():
        base.state[p]["exp_avg_sq"].fill_(1.0)
    p.grad = torch.ones_like(p)
    reuse_trajectory_(base, [p], 0.0, moments="both")
    before = p.detach().clone()
    base.step()
    torch.testing.assert_close(before - p.detach(), torch.full_like(p, LR), rtol=1e-6, atol=0)


ALL = {
    "SGD": lambda ps: optim.SGD(ps, lr=LR, momentum=0.9),
    "SGD plain": lambda ps: optim.SGD(ps, lr=LR),
    "Adam": lambda ps: optim.Adam(ps, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda ps: optim.AdamW(ps),
    "NAdam": lambda ps: optim.NAdam(ps),
    "RAdam": lambda ps: optim.RAdam(ps),
    "Adamax": lambda ps: optim.Adamax(ps),
    "RMSprop": lambda ps: optim.RMSprop(ps, centered=True, momentum=0.5),
    "Adagrad": lambda ps: optim.Adagrad(ps),
    "Adadelta": lambda ps: optim.Adadelta(ps),
    "ASGD": lambda ps: optim.ASGD(ps),
    "Rprop": lambda ps: optim.Rprop(ps),
    "Adafactor": lambda ps: optim.Adafactor(ps),
    "Muon": lambda ps: optim.Muon(ps),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("moments", ["first", "both"])
def test_every_optimizer_stays_sane(name, moments):
    p, base = trained(ALL[name])
    other = nn.Parameter(torch.randn(2))
    layout = {k: getattr(v, "shape", None) for k, v in base.state[p].items()}
    clock = base.state[p].get("step")
    clock = None if clock is None else float(clock)
    reuse_trajectory_(base, [p, other], 0.3, moments=moments)
    assert {k: getattr(v, "shape", None) for k, v in base.state[p].items()} == layout
    assert clock is None or float(base.state[p]["step"]) == clock
    assert other not in base.state
    p.grad = p.grad * 100  # a centred variance must not have become negative
    base.step()
    assert torch.isfinite(p).all()


@pytest.mark.parametrize("name", ALL)
def test_sigma_one_changes_nothing(name):
    p, base = trained(ALL[name])
    before = {k: v.clone() for k, v in base.state[p].items() if torch.is_tensor(v)}
    reuse_trajectory_(base, [p], 1.0, moments="both")
    rollback_(base, [p], 1.0)
    assert all(torch.equal(v, base.state[p][k]) for k, v in before.items())


@pytest.mark.parametrize("sigma", [0.0, 0.2, 0.8])
def test_rollback_weighs_history_by_sigma_beta(sigma):
    p, base = trained(lambda ps: optim.Adam(ps, lr=LR, betas=(BETA1, BETA2)), steps=200)
    state, y = base.state[p], p.grad.clone()
    t = float(state["step"])
    history, squares = state["exp_avg"] / (1 - BETA1**t), state["exp_avg_sq"] / (1 - BETA2**t)
    rollback_(base, [p], sigma)
    back = float(state["step"])
    if sigma > 0:
        torch.testing.assert_close(state["exp_avg_sq"] / (1 - BETA2**back), squares, rtol=1e-5, atol=0)
    base.step()
    corrected = state["exp_avg"] / (1 - BETA1 ** float(state["step"]))
    want = sigma * BETA1 * history + (1 - sigma * BETA1) * y
    torch.testing.assert_close(corrected, want, rtol=1e-5, atol=1e-7)


def test_coupled_decay_and_maximize_are_part_of_what_is_blended():
    for kwargs in ({"weight_decay": 0.5}, {"maximize": True}):
        p, base = trained(lambda ps, kw=kwargs: optim.Adam(ps, lr=LR, **kw))
        y = p.grad + 0.5 * p.detach() if "weight_decay" in kwargs else -p.grad
        reuse_trajectory_(base, [p], 0.0)
        base.step()
        state = base.state[p]
        torch.testing.assert_close(state["exp_avg"] / (1 - 0.9 ** float(state["step"])), y, rtol=1e-10, atol=1e-12)


def test_sigmas():
    before, after = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    delta, direction = torch.tensor([0.0, 2.0]), torch.tensor([0.0, -1.0])
    args = {"before": before, "after": after, "delta": delta, "direction": direction}
    assert sigma_for("gradient", **args) == pytest.approx(0.5**0.5)
    assert sigma_for("rollback", **args) == pytest.approx(0.5**0.5)
    assert sigma_for("paper", **args) == 0.0
    assert sigma_for("momentum", **args) == 1.0
    assert sigma_for("keep", **args) == 1.0
    assert sigma_for("reset", **args) == 0.0
    assert sigma_for("paper", **{**args, "direction": None}) == 1.0


@pytest.mark.parametrize("sigma", [-0.1, 1.1, float("nan")])
def test_sigma_outside_its_range_is_refused(sigma):
    p, base = trained(ALL["Adam"])
    with pytest.raises(ValueError, match="sigma"):
        reuse_trajectory_(base, [p], sigma)


def test_second_moment_root():
    p, base = trained(ALL["AdamW"])
    torch.testing.assert_close(second_moment_root(base, [p])[0], base.state[p]["exp_avg_sq"].sqrt())
    assert second_moment_root(trained(ALL["SGD"])[1], [p]) is None
    fresh = optim.Adam([p])
    assert second_moment_root(fresh, [p]) is None

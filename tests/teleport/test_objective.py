"""Objectives against automatic differentiation, and the projections against linear algebra."""

import pytest
import torch

from cost_mtl.teleport.invariance import relative_change
from cost_mtl.teleport.objectives import standard_objectives
from cost_mtl.teleport.objectives.conflict import MARGIN, Conflict, near_worst, worst_task
from cost_mtl.teleport.objectives.gradient_functions import group_rows
from cost_mtl.teleport.objectives.norm import Norm, balance
from cost_mtl.teleport.solvers.projection import project_out, restore_step


def gradients(K=4, m=9, *, seed=0):
    G = torch.randn(K, m, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return G * torch.logspace(-1, 1, K, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("seed", range(5))
def test_conflict_coefficients_are_the_derivative_of_the_smallest_cosines(seed):
    G = gradients(seed=seed).requires_grad_()
    M = (G @ G.T).detach()
    phi = (near_worst(M) * torch.cosine_similarity(G, G.mean(dim=0, keepdim=True))).sum()
    (want,) = torch.autograd.grad(phi, G)
    torch.testing.assert_close(Conflict().coefficients(M) @ G.detach(), want, rtol=1e-9, atol=1e-12)


def test_near_worst_is_the_worst_alone_unless_others_are_close():
    alone = torch.tensor([[1.0, -0.5, 0.0], [-0.5, 4.0, 0.0], [0.0, 0.0, 4.0]], dtype=torch.float64)
    assert near_worst(alone).tolist() == [1.0, 0.0, 0.0]
    close = gradients(2)[[0, 1, 0]] * torch.tensor([[1.0], [1.0], [1.01]], dtype=torch.float64)
    p = near_worst(close @ close.T)
    assert float(p.sum()) == pytest.approx(1.0)
    assert int((p > 0).sum()) in (1, 2)


def test_norm_coefficients_are_the_derivative_of_the_balanced_log_norms():
    G = gradients().requires_grad_()
    M = (G @ G.T).detach()
    phi = (balance(M) * G.norm(dim=1).log()).sum()
    (want,) = torch.autograd.grad(phi, G)
    torch.testing.assert_close(Norm().coefficients(M) @ G.detach(), want, rtol=1e-9, atol=1e-12)


def test_balance_is_the_papers():
    lengths = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    R = balance(torch.diag(lengths**2))
    torch.testing.assert_close(R, 3 * (1 - lengths / 8))


def test_tasks_without_gradient_take_no_part():
    G = gradients()
    G[1] = 0
    M = G @ G.T
    assert worst_task(M) != 1
    assert torch.isfinite(Norm().coefficients(M)).all()
    assert Norm().coefficients(M)[1, 1] == 0
    assert Norm().gain(M, 4 * M) == pytest.approx(1.0)


def test_one_evaluation_serves_all_tasks_but_the_worst():
    M = gradients(K=6) @ gradients(K=6).T
    worst = int((near_worst(M) > 0).sum())
    groups = group_rows(Conflict().coefficients(M))
    assert sorted(len(tasks) for _, tasks in groups) == [1] * worst + [6 - worst]
    assert len(group_rows(Norm().coefficients(M))) == 6


def test_gain():
    before = torch.tensor([[1.0, -0.5], [-0.5, 4.0]], dtype=torch.float64)
    after = torch.tensor([[1.0, 0.5], [0.5, 4.0]], dtype=torch.float64)
    angle = lambda M: torch.acos(M[0].sum() / (M[0, 0].sqrt() * M.sum().sqrt()))  # noqa: E731
    assert Conflict().gain(before, after) == pytest.approx(float(angle(before) - angle(after)))
    assert Norm().gain(before, before * 1.21) == pytest.approx(0.1)


@pytest.mark.parametrize("metric", [None, torch.linspace(0.1, 5, 9, dtype=torch.float64)])
def test_projection_keeps_every_loss_and_is_the_nearest_in_the_metric(metric):
    J, u = gradients(3), torch.randn(9, dtype=torch.float64)
    s = project_out(J, u, metric)
    torch.testing.assert_close(J @ s, torch.zeros(3, dtype=torch.float64), atol=1e-10, rtol=0)
    # Optimality: u - P^-1 s is in the span of the rows of J.
    rest = u - (s if metric is None else s / metric)
    on_rows = J.T @ torch.linalg.lstsq(J.T, rest[:, None]).solution[:, 0]
    torch.testing.assert_close(rest, on_rows, atol=1e-10, rtol=0)


def test_projection_with_equal_tasks():
    J = gradients(2)[[0, 1, 0]]
    s = project_out(J, torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(J @ s, torch.zeros(3, dtype=torch.float64), atol=1e-9, rtol=0)
    assert s.norm() > 0


def test_restoring_step_undoes_the_residual():
    J, r = gradients(3), torch.tensor([0.3, -2.0, 0.1], dtype=torch.float64)
    for metric in (None, torch.linspace(0.1, 5, 9, dtype=torch.float64)):
        torch.testing.assert_close(J @ restore_step(J, r, None, metric), -r, rtol=1e-9, atol=0)


def test_relative_change():
    one = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    assert relative_change(one, torch.tensor([1.1, -2.0, 0.0], dtype=torch.float64)) == pytest.approx(0.1)
    assert relative_change(one, torch.tensor([1.0, -2.0, 1e-9], dtype=torch.float64)) == float("inf")
    assert relative_change(one, torch.tensor([1.0, float("nan"), 0.0], dtype=torch.float64)) == float("inf")


def test_order_of_objectives():
    opposite = torch.tensor([[1.0, -3.0], [-3.0, 9.0]], dtype=torch.float64)
    oblique = torch.tensor([[1.0, -1.0], [-1.0, 9.0]], dtype=torch.float64)
    assert standard_objectives(opposite) == (Norm(), Conflict())
    assert standard_objectives(oblique) == (Conflict(), Norm())
    assert standard_objectives(oblique[:1, :1]) == (Norm(),)


def test_what_is_wanted_resolves_the_conflict():
    oblique = torch.tensor([[1.0, -1.5], [-1.5, 9.0]], dtype=torch.float64)
    c = -0.5 / 7**0.5
    assert Conflict().wanted(oblique) == pytest.approx(MARGIN - c)

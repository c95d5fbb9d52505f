"""MGDA and IMTL-G: optimal against every support, against closed forms, and projections that really are equal."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import optimize

from cost_mtl.weighting import IMTLG, MGDA, FairGrad
from tests.weighting.cases import SOLVABLE, gradients, gramian, random_gradients
from tests.weighting.reference import equal_projections_reference, min_norm_reference


def shortest_norm(G):
    """Least norm over the convex hull, by trying every support: on each, the least-norm point of its affine hull."""
    norms = []
    for size in range(1, len(G) + 1):
        for support in itertools.combinations(range(len(G)), size):
            rows = G[list(support)]
            base, edges = rows[0], (rows[1:] - rows[0]).T
            steps = np.linalg.lstsq(edges, -base, rcond=None)[0] if size > 1 else np.zeros(0)
            if (steps >= 0).all() and steps.sum() <= 1:
                norms.append(np.linalg.norm(base + edges @ steps))
    return min(norms)


@pytest.mark.parametrize("family", [name for name in SOLVABLE if "1e±6" not in name])
@pytest.mark.parametrize("K", [2, 3, 6])
def test_as_short_as_the_best_support(K, family):
    G = gradients(K)[family]
    w = MGDA()(gramian(G)).numpy()
    assert (w >= 0).all()
    assert np.isclose(w.sum(), 1, rtol=1e-12)
    # The norm is computed from the gradients themselves, which for spread scales has rounding errors of its own.
    assert np.linalg.norm(w @ G) <= shortest_norm(G) * (1 + 1e-8)


@pytest.mark.parametrize("seed", range(20))
def test_norms_spread_over_a_thousand(seed):
    random = np.random.default_rng(seed)
    G = random.standard_normal((5, 7)) * 10 ** random.uniform(-1.5, 1.5, (5, 1))
    w = MGDA()(gramian(G)).numpy()
    assert np.linalg.norm(w @ G) <= shortest_norm(G) * (1 + 1e-8)


@pytest.mark.parametrize("K", [11, 40, 100])
def test_the_certificate_with_many_tasks(K):
    # min_i g_i^T g <= ||g||^2 for every g in the hull, with equality at the shortest only.
    for family in ("well-conditioned", "conflicting", "rank-deficient", "duplicated", "norms 1e+8"):
        G = gradients(K)[family]
        g = MGDA()(gramian(G)).numpy() @ G
        assert (G @ g).min() >= (g @ g) * (1 - 1e-8)


def test_two_tasks_in_closed_form():
    for G in (np.array([[3.0, 0.0], [0.0, 1.0]]), np.array([[1.0, 0.0], [5.0, 0.1]]), np.array([[1.0, 1], [-2, 1]])):
        difference = G[0] - G[1]
        share = np.clip(-(G[1] @ difference) / (difference @ difference), 0, 1)
        np.testing.assert_allclose(MGDA()(gramian(G)).numpy(), [share, 1 - share], atol=1e-12)


def test_at_a_stationary_point_the_norm_is_zero():
    G = gradients(11)["Pareto-stationary"]
    solution = MGDA().solve(gramian(G))
    assert solution.report.status == "stationary"
    assert np.linalg.norm(solution.weights.numpy() @ G) < 1e-7 * np.linalg.norm(G)


@pytest.mark.parametrize("length", [1e-3, 1.0, 1e3, 1e5])
def test_three_that_cancel_beside_a_gradient_of_another_length(length):
    triangle = length * np.array([[1.0, 0, 0], [-0.5, 0.75**0.5, 0], [-0.5, -(0.75**0.5), 0]]) * [[1.0], [3.0], [0.3]]
    G = np.vstack([triangle, [[0.3, -0.4, 1.0]]])
    expected = np.array([3.0, 1.0, 10.0, 0.0]) / 14
    for weighting in (MGDA(), FairGrad(math.inf)):
        solution = weighting.solve(gramian(G))
        w = solution.weights.numpy()
        assert solution.report.status == "stationary"
        np.testing.assert_allclose(w / w.sum(), expected, atol=2e-5)  # a ridge of 1e-15 times the spread squared


@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "rank-deficient", "duplicated", "spread 1e±6"])
def test_agrees_with_a_conic_solver(family):
    G = gradients(6)[family]
    ours = MGDA()(gramian(G)).numpy() @ G
    conic = min_norm_reference(G @ G.T) @ G
    assert np.linalg.norm(ours) <= np.linalg.norm(conic) * (1 + 1e-8)
    np.testing.assert_allclose(ours, conic, atol=1e-3 * np.linalg.norm(conic))


@pytest.mark.parametrize("K", [2, 3, 11])
@pytest.mark.parametrize("family", [name for name in SOLVABLE if name != "rank-deficient"])
def test_imtl_projections_are_equal(family, K):
    G = gradients(K)[family]
    w = IMTLG()(gramian(G)).numpy()
    projections = G @ (w @ G) / np.linalg.norm(G, axis=1)
    assert np.isclose(w.sum(), 1)
    np.testing.assert_allclose(projections, projections[0], rtol=1e-8)


def test_imtl_agrees_with_a_pseudo_inverse_on_duplicates():
    M = gramian(gradients(6)["duplicated"])
    reference = torch.from_numpy(equal_projections_reference(M.numpy()))
    torch.testing.assert_close(IMTLG()(M), reference, rtol=1e-6, atol=1e-9)


def test_imtl_says_when_no_direction_has_equal_projections():
    solution = IMTLG().solve(gramian(np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])))
    assert solution.report.status == "stationary"
    assert torch.isfinite(solution.weights).all()
    assert 1 - 1e-12 <= float(solution.weights.abs().sum()) < 1e10


NO_CONFLICT = np.array([[1.1, 46.8, -5.7], [1.8, 6.9, 1.9], [22.8, 17.6, 44.3]])
"""Cosines 0.90, 0.24 and 0.63, and yet the weights of equal projections have a negative sum."""


@pytest.mark.parametrize("settings", [{}, {"scale": "mean"}, {"scale": "sum"}, {"scale": "tasks"}, {"max_norm": 0.1}])
def test_imtl_lowers_every_loss_whatever_the_sign_of_the_sum(settings):
    weighting = IMTLG(**settings)
    random = np.random.default_rng(0)
    cases = [random.standard_normal((4, 4)) * 10 ** random.uniform(-1, 1, (4, 1)) for _ in range(60)]
    negative = 0
    for G in (NO_CONFLICT, *cases):
        solution = weighting.solve(gramian(G))
        w = solution.weights.numpy()
        assert solution.report.status == "converged"
        projections = G @ (w @ G) / np.linalg.norm(G, axis=1)
        np.testing.assert_allclose(projections, projections[0], rtol=1e-6)
        assert projections[0] > 0
        negative += w.sum() < 0
        if "max_norm" not in settings:
            assert abs(w.sum()) == pytest.approx(len(G) if settings.get("scale") in ("sum", "tasks") else 1)
    assert negative > 3


@pytest.mark.parametrize("scale", ["raw", "mean", "sum", "tasks"])
@pytest.mark.parametrize("G", [NO_CONFLICT, random_gradients(3, seed=2)], ids=["negative sum", "positive sum"])
def test_imtl_leaves_a_task_without_gradient_its_share(G, scale):
    factor = 5 if scale in ("sum", "tasks") else 1
    alone = IMTLG()(gramian(G)).numpy()
    w = IMTLG(scale=scale)(gramian(np.insert(G, [1, 3], 0.0, axis=0))).numpy() / factor
    np.testing.assert_allclose(w[[1, 4]], 1 / 5)
    np.testing.assert_allclose(w[[0, 2, 3]], alone * 3 / 5, rtol=1e-9)
    assert abs(w[[0, 2, 3]].sum()) == pytest.approx(3 / 5)


@pytest.mark.parametrize("scale", ["raw", "mean", "sum", "tasks"])
def test_imtl_weights_that_cancel_in_their_sum_stay_bounded(scale):
    # One v_i has the other sign; its gradient gets the length with which the weights v_i / ||g_i|| add up to 0.
    unit = NO_CONFLICT / np.linalg.norm(NO_CONFLICT, axis=1, keepdims=True)
    v = np.linalg.solve(unit @ unit.T, np.ones(3))
    odd = int(v.argmin())
    lengths = np.ones(3)
    lengths[odd] = -v[odd] / np.delete(v, odd).sum()
    assert lengths[odd] > 0
    solution = IMTLG(scale=scale).solve(gramian(unit * lengths[:, None]))
    assert solution.report.status == "stationary"
    factor = 3 if scale in ("sum", "tasks") else 1
    assert float(solution.weights.abs().sum()) == pytest.approx(factor, rel=1e-6)


@pytest.mark.parametrize("scale", ["raw", "mean", "sum", "tasks"])
@pytest.mark.parametrize("family", SOLVABLE)
def test_mgda_scale(family, scale):
    G = np.insert(gradients(5)[family], 2, 0.0, axis=0)
    w = MGDA(scale=scale)(gramian(G))
    assert float(w.sum()) == pytest.approx(6 if scale in ("sum", "tasks") else 1, rel=1e-12)
    assert w[2] == 0


def test_mgda_agrees_with_non_negative_least_squares():
    for seed in range(60):
        random = np.random.default_rng(seed)
        K = int(random.integers(2, 20))
        G = random.standard_normal((K, K + 3)) - random.uniform(0, 1) * random.standard_normal(K + 3)
        norms = np.linalg.norm(G, axis=1)
        # min ||G^T x||^2 + (1^T x - s)^2: x in proportion to the weights.
        s = norms.min()
        x, _ = optimize.nnls(np.vstack((G.T, s * np.ones(K))), np.append(np.zeros(K + 3), s))
        np.testing.assert_allclose(MGDA()(gramian(G)).numpy(), x / x.sum(), atol=1e-11)


def test_imtl_scale():
    M = gramian(random_gradients(4))
    raw = IMTLG()(M)
    torch.testing.assert_close(IMTLG(scale="tasks")(M), 4 * raw)
    assert float(IMTLG(scale="sum")(M).sum()) == pytest.approx(4)

"""MGDA and IMTL-G: optimal against every support, against closed forms, and projections that really are equal."""

import itertools
import math

import numpy as np
import pytest
import torch

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


def test_imtl_scale():
    M = gramian(random_gradients(4))
    raw = IMTLG()(M)
    torch.testing.assert_close(IMTLG(scale="tasks")(M), 4 * raw)
    assert float(IMTLG(scale="sum")(M).sum()) == pytest.approx(4)

"""CAGrad, by its certificate: in the ball, min_i g_i^T d <= g^T g_0 + c ||g_0|| ||g|| for all g in the convex hull."""

import numpy as np
import pytest
import torch

from cost_mtl.weighting import MGDA, CAGrad
from tests.weighting.cases import SOLVABLE, TASKS, gradients, gramian, random_gradients
from tests.weighting.reference import cagrad_reference


def direction(G, **settings):
    """d and the simplex weights lambda that certify it, from the weights of the unscaled direction."""
    return certified(G, CAGrad(rescale=0, scale="raw", **settings)(gramian(G)).numpy())


def certified(G, w):
    multipliers = np.clip(w - 1 / len(G), 0, None)
    return w @ G, multipliers / multipliers.sum()


def dual(G, c, multipliers):
    g_0, g = G.mean(axis=0), multipliers @ G
    return g @ g_0 + c * np.linalg.norm(g_0) * np.linalg.norm(g), c * np.linalg.norm(g_0) * np.linalg.norm(g)


@pytest.mark.parametrize("K", TASKS)
@pytest.mark.parametrize("c", [0.1, 0.4, 0.9, 2.0])
@pytest.mark.parametrize("family", [name for name in SOLVABLE if "spread" not in name])
def test_the_worst_off_task_gets_the_optimum(K, family, c):
    G = gradients(K)[family]
    d, multipliers = direction(G, c=c)
    g_0 = G.mean(axis=0)
    assert np.linalg.norm(d - g_0) <= c * np.linalg.norm(g_0) * (1 + 1e-9)
    bound, scale = dual(G, c, multipliers)
    assert abs((G @ d).min() - bound) < 1e-8 * scale


@pytest.mark.parametrize("family", [name for name in SOLVABLE if "spread" in name])
@pytest.mark.parametrize("c", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("K", [2, 3, 11])
def test_tasks_on_different_scales(K, c, family):
    # The optimality conditions on unit gradients, where no task drowns in another's rounding errors.
    G = gradients(K)[family]
    report = CAGrad(c).solve(gramian(G)).report
    assert report.status == "converged"
    assert report.residual < 1e-8
    d, multipliers = direction(G, c=c)
    g_0 = G.mean(axis=0)
    assert np.isclose(np.linalg.norm(d - g_0), c * np.linalg.norm(g_0), rtol=1e-6)
    norms = np.linalg.norm(G, axis=1)
    cosines = G @ d / norms / np.linalg.norm(d)
    _, scale = dual(G, c, multipliers)
    bound = dual(G, c, multipliers)[0] / norms / np.linalg.norm(d)
    assert (cosines > bound - 1e-8).all()
    assert scale > 0


@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "rank-deficient", "duplicated", "norms 1e-8"])
@pytest.mark.parametrize("c", [0.1, 0.4, 0.9])
@pytest.mark.parametrize("K", [2, 3, 11])
def test_agrees_with_a_conic_solver(K, c, family):
    G = gradients(K)[family]
    d, multipliers = direction(G, c=c)
    reference, theirs = certified(G, cagrad_reference(G @ G.T, c) / K)
    assert np.linalg.norm(d - reference) < 1e-4 * np.linalg.norm(reference)
    ours, conic = dual(G, c, multipliers)[0], dual(G, c, theirs)[0]
    assert abs(ours - conic) < 1e-8 * dual(G, c, theirs)[1]


def test_two_tasks_in_closed_form():
    # g_1 = (1, 0), g_2 = (-1, 2), g_0 = (0, 1). Up to c = 1 the first task alone is worst off: d = g_0 + c e_1. Beyond,
    # both gain the same, so d = (t, t), on the boundary of the ball: t^2 + (t - 1)^2 = c^2.
    G = np.array([[1.0, 0.0], [-1.0, 2.0]])
    for c in (0.1, 0.5, 0.9):
        d, _ = direction(G, c=c)
        np.testing.assert_allclose(d, [c, 1.0], atol=1e-12)
    for c in (1.5, 4.0):
        t = (1 + np.sqrt(2 * c**2 - 1)) / 2
        d, _ = direction(G, c=c)
        np.testing.assert_allclose(d, [t, t], rtol=1e-10)


@pytest.mark.parametrize("family", SOLVABLE)
def test_no_radius_is_the_mean_gradient_and_a_small_one_keeps_its_length(family):
    G = gradients(5)[family]
    assert torch.equal(CAGrad(0.0)(gramian(G)), torch.ones(5, dtype=torch.float64))
    for c in (0.1, 0.4, 0.9):
        d, _ = direction(G, c=c)
        assert np.linalg.norm(d) >= (1 - c) * np.linalg.norm(G.mean(axis=0)) * (1 - 1e-9)


@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "duplicated"])
def test_a_large_radius_approaches_mgda(family):
    G = gradients(5)[family]
    shortest = MGDA()(gramian(G)).numpy() @ G
    cosines = []
    for c in (10.0, 100.0, 1000.0):
        d, _ = direction(G, c=c)
        cosines.append(d @ shortest / np.linalg.norm(d) / np.linalg.norm(shortest))
    assert cosines[0] <= cosines[1] + 1e-12
    assert cosines[1] <= cosines[2] + 1e-12
    assert cosines[2] > 1 - 1e-5


def test_rescale_and_scale():
    G, c = random_gradients(4), 0.7
    M = gramian(G)
    d, _ = direction(G, c=c)
    for rescale, divisor in enumerate((1, 1 + c**2, 1 + c)):
        np.testing.assert_allclose(CAGrad(c, rescale)(M).numpy() @ G, 4 * d / divisor, rtol=1e-10)
        raw = CAGrad(c, rescale, scale="raw")(M).numpy() @ G
        np.testing.assert_allclose(raw, d / divisor, rtol=1e-10)
    assert float(CAGrad(c, scale="sum")(M).sum()) == pytest.approx(4)
    assert float(CAGrad(c, scale="mean")(M).sum()) == pytest.approx(1)
    assert np.linalg.norm(CAGrad(c, max_norm=0.5)(M).numpy() @ G) == pytest.approx(0.5)
    assert CAGrad.official() == CAGrad() == CAGrad(c=0.4, rescale=1)
    libmtl = CAGrad.libmtl()(M).numpy() @ G
    np.testing.assert_allclose(libmtl, direction(G, c=0.5)[0] / 1.25, rtol=1e-10)


def test_where_the_mean_gradient_vanishes_so_does_the_direction():
    G = random_gradients(4)
    G[3] = -G[:3].sum(axis=0)
    solution = CAGrad().solve(gramian(G))
    assert solution.report.status == "stationary"
    torch.testing.assert_close(solution.weights, torch.full((4,), 1 / 1.16, dtype=torch.float64))


@pytest.mark.parametrize("norm", [1e-10, 1e-3, 1e10])
def test_small_gradients_are_not_taken_for_zero(norm):
    G = random_gradients(3) * norm
    d, _ = direction(G, c=0.4)
    assert np.linalg.norm(d) >= 0.6 * np.linalg.norm(G.mean(axis=0))


@pytest.mark.parametrize("c", [1.5, 5.0])
def test_at_a_stationary_point_nobody_loses(c):
    # Opposite tasks beside a third: max min is 0. d: g_0 = (0, 1/3) of length 1/3 loses nothing for anyone.
    G = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])
    solution = CAGrad(c, rescale=0, scale="raw").solve(gramian(G))
    d = solution.weights.numpy() @ G
    assert solution.report.status == "stationary"
    np.testing.assert_allclose(d, [0, 1 / 3], atol=1e-4)


@pytest.mark.parametrize("settings", [{"c": -0.1}, {"c": float("nan")}, {"c": float("inf")}, {"rescale": 3}])
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CAGrad(**settings)

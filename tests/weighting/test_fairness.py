"""FairGrad and Nash-MTL: the equation itself, closed forms, limits, and where no solution exists."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from cost_mtl.weighting import MGDA, FairGrad, NashMTL
from tests.weighting.cases import SOLVABLE, TASKS, gradients, gramian, random_gradients, residual
from tests.weighting.reference import fairness_reference


@pytest.mark.parametrize("K", TASKS)
@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("family", SOLVABLE)
def test_the_equation_holds_on_every_solvable_family(K, family, alpha):
    M = gramian(gradients(K)[family])
    solution = FairGrad(alpha).solve(M)
    assert residual(M, solution.weights, alpha) < 1e-6
    assert float(solution.report.residual) < 1e-6
    assert solution.report.status == "converged"


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_the_equation_holds_on_random_conflicting_tasks(alpha, seed):
    random = np.random.default_rng(seed)
    K = int(random.integers(2, 12))
    G = random.standard_normal((K, K + 2)) * 10 ** random.uniform(-3, 3, (K, 1))
    M = gramian(G)
    assert residual(M, FairGrad(alpha)(M), alpha) < 1e-6


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 3.0, 5.0, 20.0])
@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "rank-deficient", "duplicated", "norms 1e-8"])
def test_other_alphas(alpha, family):
    for K in (2, 3, 11):
        M = gramian(gradients(K)[family])
        assert residual(M, FairGrad(alpha)(M), alpha) < 1e-6


@pytest.mark.parametrize("alpha", [1.0, 2.0])
@pytest.mark.parametrize("family", SOLVABLE)
@pytest.mark.parametrize("K", TASKS)
def test_a_float32_gramian(K, family, alpha):
    M = gramian(gradients(K)[family], torch.float32)
    solution = FairGrad(alpha).solve(M)
    assert solution.report.residual < 1e-6
    hard = alpha == 2 and K >= 40 and family == "conflicting, spread 1e±3"  # most rates are in heavy cancellation
    assert residual(M, solution.weights, alpha) < (3e-4 if hard else 1e-4)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("alpha", [2.0, 5.0])
def test_rounding_to_float32_stays_near_and_only_acts_where_it_must(alpha, seed):
    random = np.random.default_rng(seed)
    K = 3 + seed
    G = (random.standard_normal((K, K + 2)) - 0.5) * 10 ** random.uniform(-3, 3, (K, 1))
    M = gramian(G, torch.float32)
    exact = FairGrad(alpha)(M.double())
    plain, found = exact.float(), FairGrad(alpha)(M)
    torch.testing.assert_close(found.double(), exact, rtol=1.01e-4, atol=0)
    assert residual(M, found, alpha) <= max(residual(M, plain, alpha), 1e-4)
    if residual(M, plain, alpha) < 1e-6:
        assert torch.equal(found, plain)


def test_the_residual_is_not_an_artefact_of_float64():
    # The same residual in exact rational arithmetic, for alpha = 1.
    G = gradients(3)["spread 1e±6"]
    M = gramian(G)
    exact = [[Fraction(x) for x in row] for row in M.tolist()]
    w = [Fraction(x) for x in NashMTL()(M).tolist()]
    worst = max(
        abs(w_i * sum(m * x for m, x in zip(row, w, strict=True)) - 1) for w_i, row in zip(w, exact, strict=True)
    )
    assert worst < Fraction(1, 10**12)


@pytest.mark.parametrize("angle", [0.0, 0.3, 1.5, 2.5, 3.0, 3.14])
@pytest.mark.parametrize("ratio", [1e-6, 1.0, 1e3])
def test_two_tasks_in_closed_form(angle, ratio):
    # Navon et al.: w_i = 1 / (||g_i|| sqrt(1 + cos phi)).
    cosine = math.cos(angle)
    M = torch.tensor([[1.0, ratio * cosine], [ratio * cosine, ratio**2]], dtype=torch.float64)
    expected = torch.tensor([1.0, 1 / ratio], dtype=torch.float64) / math.sqrt(1 + cosine)
    torch.testing.assert_close(NashMTL()(M), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 5.0])
def test_orthogonal_tasks_and_one_task_in_closed_form(alpha):
    squares = torch.tensor([1e-12, 1.0, 7.0, 1e12], dtype=torch.float64)
    expected = squares ** (-alpha / (1 + alpha))
    torch.testing.assert_close(FairGrad(alpha)(torch.diag(squares)), expected, rtol=1e-12, atol=0)
    one = torch.tensor([[7.0]], dtype=torch.float64)
    torch.testing.assert_close(FairGrad(alpha)(one), expected[2:3], rtol=1e-12, atol=0)


@pytest.mark.parametrize("K", [2, 11])
def test_identical_tasks_share_equally(K):
    # K copies of g: K ||g||^2 w = w^(-1/alpha).
    M = torch.full((K, K), 3.0, dtype=torch.float64)
    expected = torch.full((K,), (3.0 * K) ** (-2 / 3), dtype=torch.float64)
    torch.testing.assert_close(FairGrad(2.0)(M), expected, rtol=1e-10, atol=0)


def test_nash_is_fairgrad_at_one_and_its_direction_has_norm_root_k():
    M = gramian(random_gradients(7))
    w = NashMTL()(M)
    assert torch.equal(w, FairGrad(1.0)(M))
    assert math.isclose(float(w @ M @ w), 7.0, rel_tol=1e-12)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "duplicated"])
def test_agrees_with_a_conic_solver(alpha, family):
    M = gramian(gradients(4)[family])
    reference = torch.from_numpy(fairness_reference(M.numpy(), alpha))
    torch.testing.assert_close(FairGrad(alpha)(M), reference, rtol=1e-3, atol=0)
    if alpha == 1:
        torch.testing.assert_close(NashMTL()(M), reference, rtol=1e-3, atol=0)


def test_alpha_zero_is_linear_scalarisation_and_the_limit():
    M = gramian(random_gradients(4, m=40))
    assert FairGrad(0)(M).tolist() == [1.0] * 4
    distances = [float((FairGrad(alpha)(M) - 1).abs().max()) for alpha in (0.4, 0.2, 0.1, 0.05)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.25


@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "spread 1e±3"])
def test_alpha_infinite_is_max_min_and_the_limit(family):
    G = gradients(5)[family]
    M = gramian(G)
    w = FairGrad(math.inf)(M)
    rates = M @ w
    assert float(rates.min()) > 1 - 1e-9  # every task gets at least 1 ...
    assert float((w * (rates - 1)).abs().max() / w.max()) < 1e-9  # ... and exactly 1 where it has a weight
    shortest = MGDA()(M)
    torch.testing.assert_close(w / w.sum(), shortest, rtol=1e-9, atol=1e-15)
    if family == "well-conditioned":
        unit = [w_ / (w_ @ M @ w_).sqrt() for w_ in (w, FairGrad(20.0)(M), FairGrad(5.0)(M))]
        near, far = (float((d - unit[0]) @ M @ (d - unit[0])) for d in unit[1:])
        assert near < far / 4


@pytest.mark.parametrize("alpha", [-1.0, 0.01, 21.0, math.nan])
def test_other_alphas_are_refused(alpha):
    with pytest.raises(ValueError, match=r"^alpha: expected .* got"):
        FairGrad(alpha)


STATIONARY = {
    "opposite": np.array([[1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]]),
    "opposite, different norms": np.array([[1.0, 2.0, 3.0], [-1e3, -2e3, -3e3]]),
    "a triangle": np.array([[1.0, 0.0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]]),
    "opposite beside a third": np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1e-6]]),
    "nearly opposite": np.array([[1.0, 1e-7], [-1.0, 1e-7]]),
    "many": gradients(40)["Pareto-stationary"],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("case", STATIONARY)
def test_pareto_stationary_points_get_the_documented_answer(case, alpha, dtype):
    M = gramian(STATIONARY[case], dtype)
    solution = FairGrad(alpha).solve(M)
    w = solution.weights.double()
    assert solution.report.status == "stationary"
    assert torch.isfinite(w).all()
    assert (w > 0).all()
    # The documented answer solves M + ridge diag(M), ridge 1e-6 (more for float32), and is bounded by it.
    ridge = max(1e-6, 4 * len(M) * torch.finfo(dtype).eps)
    if dtype == torch.float64:  # to float32 the weights are rounded, which the cancellation in M w amplifies
        assert residual(M + ridge * torch.diag(M.diagonal()), w, alpha) < 1e-6
    p = 1 / alpha
    alone = M.double().diagonal() ** (-1 / (1 + p))
    assert (w / alone).min() <= ridge ** (-1 / (1 + p)) * (1 + 1e-6)


def test_near_stationarity_is_solved_until_the_digits_run_out():
    # cos phi = -1 + delta: the closed form holds down to delta = 1e-9, below it the status says so.
    for delta, status in ((1e-3, "converged"), (1e-6, "converged"), (1e-8, "converged"), (1e-12, "stationary")):
        M = torch.tensor([[1.0, delta - 1], [delta - 1, 1.0]], dtype=torch.float64)
        solution = NashMTL().solve(M)
        assert solution.report.status == status
        if status == "converged":
            assert residual(M, solution.weights, 1.0) < 1e-6


def test_recipes_of_scale():
    M = gramian(random_gradients(3) * 1e-3)
    raw = FairGrad(2.0)(M)

    def norm(w):
        return float((w @ M @ w).sqrt())

    torch.testing.assert_close(FairGrad(2.0, scale="tasks")(M), 3 * raw)
    torch.testing.assert_close(FairGrad(2.0, scale="sum")(M), 3 * raw / raw.sum())
    torch.testing.assert_close(FairGrad(2.0, scale="mean")(M), raw / raw.sum())
    # Official FairGrad: times K, then the shared gradient clipped to norm 1.
    torch.testing.assert_close(FairGrad.official()(M), raw / norm(raw))
    assert torch.equal(FairGrad.libmtl(2.0)(M), raw)
    weak = FairGrad(2.0, max_norm=1e9)(M)
    assert torch.equal(weak, raw)  # a bound that is not reached changes nothing
    # Official Nash-MTL: ||d|| = sqrt(K) clipped to 1.
    nash = NashMTL()(M)
    torch.testing.assert_close(NashMTL.official()(M), nash / math.sqrt(3))
    assert math.isclose(norm(NashMTL.official()(M)), 1.0, rel_tol=1e-9)

"""The precision of M is carried, not taken from its dtype: M in float64 may be the sum of float32 products."""

import math

import numpy as np
import pytest
import torch

import cost_mtl
from cost_mtl.base import Solution, SolverReport, WeightingInputs
from cost_mtl.weighting import IMTLG, MGDA, CAGrad, FairGrad, NashMTL, resolve
from tests.fuzz.oracle import fair_weights
from tests.weighting.cases import SOLVING, gradients, gramian

solving = pytest.mark.parametrize("weighting", SOLVING.values(), ids=SOLVING)


def opposed(ratio, error):
    """Two gradients, g_2 = -ratio g_1, whose inner product came out too large by a relative error."""
    return torch.tensor([[1.0, -ratio * (1 + error)], [-ratio * (1 + error), ratio**2]], dtype=torch.float64)


@solving
@pytest.mark.parametrize("error", [1e-12, 1e-9, 3e-7])
@pytest.mark.parametrize("ratio", [1.0, 5.0, 1e3])
def test_a_slightly_indefinite_gramian_has_finite_weights(weighting, ratio, error):
    for noise in (None, 3e-7):
        solution = weighting.solve(opposed(ratio, error), noise=noise)
        assert torch.isfinite(solution.weights).all()
        assert (solution.weights >= 0).all()


@pytest.mark.parametrize("error", [-3e-7, -1e-12, 0.0, 1e-12, 1e-9, 3e-7])
@pytest.mark.parametrize("ratio", [1.0, 2.0, 5.0, 0.3])
def test_the_shortest_vector_between_opposed_gradients(ratio, error):
    # g_2 = -a g_1: a / (1 + a) of the first and 1 / (1 + a) of the second cancel.
    expected = torch.tensor([ratio, 1.0], dtype=torch.float64) / (1 + ratio)
    solution = MGDA().solve(opposed(ratio, error), noise=3e-7)
    torch.testing.assert_close(solution.weights, expected, rtol=1e-5, atol=0)
    assert solution.report.status == "stationary"


def test_what_a_gramian_shows_is_believed_against_what_is_said_of_it():
    # cos = -1 - 1e-7 can't be: the digits below 1e-7 are noise, and cos = -1 + 1e-6 known to 10 % only.
    C = torch.eye(4, dtype=torch.float64)
    C[0, 1] = C[1, 0] = -1 - 1e-7
    C[2, 3] = C[3, 2] = -1 + 1e-6
    assert NashMTL().solve(C[2:, 2:]).report.status == "converged"
    report = MGDA().solve(C, noise=0).report
    assert report.status == "stationary"
    assert report.rounding > 0.1


@pytest.mark.parametrize("noise", [-1e-9, math.nan, math.inf])
def test_a_noise_that_can_not_be_is_refused(noise):
    with pytest.raises(ValueError, match="noise: expected a finite number >= 0"):
        NashMTL().solve(torch.eye(2), noise=noise)


# ------------------------------------------------------------------------------------ what the digits determine


@pytest.mark.parametrize("weighting", [NashMTL(), FairGrad(), FairGrad(0.5), FairGrad(5.0)], ids=repr)
@pytest.mark.parametrize("noise", [1e-9, 1e-7])
def test_rates_that_the_digits_do_not_determine_are_not_called_converged(weighting, noise):
    for distance in np.geomspace(0.1, 1e4, 16) * noise:
        for sign in (-1, 1):  # the cosine that is true, and the one that is shown
            true = opposed(3.0, -distance)
            shown = opposed(3.0, -max(distance + sign * noise, 0.0))
            solution = weighting.solve(shown, noise=noise)
            w = solution.weights
            rates = w ** (1 / getattr(weighting, "alpha", 1.0)) * (true @ w)
            if solution.report.status == "converged":  # 1 % of a weight is 1 + 1 / alpha % of what it is compared with
                assert (rates - 1).abs().max() < 0.011 * (1 + 1 / getattr(weighting, "alpha", 1.0))
            else:
                assert solution.report.status == "stationary"
                assert distance < 1e3 * noise


def trained_once(weighting, G):
    """The report of one step on the losses theta^T g_i, whose gradients are the rows of G, float32."""
    G = torch.from_numpy(G).float()
    model = torch.nn.Linear(G.shape[1], 1, bias=False)
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = cost_mtl.COST(base, model, shared=model, weighting=weighting, teleporter=None)
    optimizer.step(lambda: list(model.weight[0] @ G.T))
    G = G.double()
    return optimizer.last_step, G @ G.T


@pytest.mark.parametrize("angle", [1e-1, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4])
@pytest.mark.parametrize("seed", range(3))
def test_near_a_stationary_point_cost_takes_the_digits_that_it_needs(seed, angle):
    # Two gradients at the angle pi - `angle`, 1 + cos = angle^2 / 2: below about 5e-3 a float32 sum does not tell.
    random = np.random.default_rng(seed)
    g = random.standard_normal((2, 3000))
    report, M = trained_once(NashMTL(), np.stack((g[0], 7 * (angle * g[1] - g[0]))))
    w = report.weights
    assert report.solver.status == "converged"
    assert (w * (M @ w) - 1).abs().max() < 1e-6 if angle < 3e-3 else 1e-2
    torch.testing.assert_close(report.gramian, M, rtol=1e-5, atol=0)


def test_cost_reads_the_gramian_once_more_only_where_it_must(monkeypatch):
    calls = []
    exact = cost_mtl.step.host_read.exact_gramian
    monkeypatch.setattr(cost_mtl.step.host_read, "exact_gramian", lambda G: calls.append(1) or exact(G))
    random = np.random.default_rng(0)
    trained_once(NashMTL(), random.standard_normal((3, 50)))
    assert calls == []
    g = random.standard_normal(50)
    report, _ = trained_once(NashMTL(), np.stack((g, -g)))
    assert calls == [1]
    assert report.solver.status == "stationary"


def test_exactly_proportional_and_opposed_gradients_in_training():
    g = np.random.default_rng(1).standard_normal(400)
    for weighting in (MGDA(), CAGrad(1.0), CAGrad(2.0), IMTLG(), NashMTL(), FairGrad(), FairGrad(math.inf)):
        report, _ = trained_once(weighting, np.stack((g, -5 * g)))
        assert report.solver.status == "stationary"
        assert torch.isfinite(report.weights).all()
        if isinstance(weighting, MGDA):
            expected = torch.tensor([5.0, 1.0], dtype=torch.float64) / 6
            torch.testing.assert_close(report.weights, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("weighting", [MGDA(), CAGrad(), CAGrad(1.0), IMTLG()], ids=repr)
@pytest.mark.parametrize("seed", range(4))
def test_two_quadratic_losses_end_quietly_where_they_are_stationary(weighting, seed):
    torch.manual_seed(seed)
    model = torch.nn.Linear(10, 1, bias=False)
    a, b = torch.randn(2, 10)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = cost_mtl.COST(base, model, shared=model, weighting=weighting, teleporter=None)
    before = model.weight.detach().clone()
    for _ in range(150):
        before.copy_(model.weight.detach())
        optimizer.step(lambda: [(model.weight - a).square().sum(), 3 * (model.weight - b).square().sum()])
        assert torch.isfinite(model.weight).all()
    assert optimizer.last_step.solver.status == "stationary"
    assert float((model.weight.detach() - before).norm()) < 1e-6
    # Stationary for both is a point between a and b.
    across = (model.weight.detach()[0] - a) - ((model.weight.detach()[0] - a) @ (b - a)) / ((b - a) @ (b - a)) * (b - a)
    assert float(across.norm()) < 1e-4 * float((b - a).norm())


# ------------------------------------------------------------------------------------ one weighting each


@pytest.mark.parametrize("ratio", [1.0, 5.0, 100.0])
def test_a_direction_that_is_all_rounding_is_not_converged(ratio):
    # Opposed gradients, c = 1: 0 is in the ball, and every other d lowers one rate below 0. So d = 0.
    M = opposed(ratio, 0.0)
    solution = CAGrad(1.0, rescale=0, scale="raw").solve(M)
    assert solution.report.status == "stationary"
    w = solution.weights
    assert float(w @ M @ w) <= 1e-12 * float(M.trace())


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("ratio", [10.0, 100.0, 1e3])
def test_a_small_alpha_with_norms_far_apart_is_solved(alpha, ratio):
    norms = torch.tensor([1.0, ratio], dtype=torch.float64)
    M = torch.tensor([[1.0, -0.3], [-0.3, 1.0]], dtype=torch.float64) * torch.outer(norms, norms)
    solution = FairGrad(alpha).solve(M)
    exact = fair_weights(M.numpy().astype(np.longdouble), alpha, solution.weights.numpy())
    assert solution.report.status == "converged"
    np.testing.assert_allclose(solution.weights.numpy(), exact.astype(np.float64), rtol=1e-6)
    # The long gradient's weight is the solution of 0.91 ratio^2 w = w^(-1/alpha) if the short one's rate is nearly 0.
    if ratio >= 100 and alpha <= 0.1:
        w = (0.91 * ratio**2) ** (-alpha / (1 + alpha))
        assert float(solution.weights[0]) == pytest.approx(0.3 * ratio * w, rel=1e-3)


def test_where_nothing_decides_between_two_tasks_no_weights_are_promised():
    # Two equal tasks in conflict with a long one: alpha = 0.05 leaves their rates at 1e-26 of the terms, and how they
    # share one weight is up to that. Their sum, and the direction, are those of the one task.
    one = gramian(np.array([[1.0, 0.0], [-30.0, 95.0]]))
    G = np.array([[1.0, 0.0], [1.0, 0.0], [-30.0, 95.0]])
    solution = FairGrad(0.05).solve(gramian(G))
    assert solution.report.status == "not_converged"
    w, expected = solution.weights, FairGrad(0.05).solve(one)
    assert expected.report.status == "converged"
    assert float(w[:2].sum()) == pytest.approx(float(expected.weights[0]), rel=0.05)
    assert (w > 0).all()


@pytest.mark.parametrize(("angle", "status"), [(3e-3, "converged"), (1e-3, "stationary"), (1e-8, "stationary")])
def test_the_largest_least_rate_is_promised_down_to_a_millionth(angle, status):
    # Unit gradients at the angle pi - angle: the shortest combination has the squared norm angle^2 / 4.
    G = np.array([[1.0, 0.0], [-math.cos(angle), math.sin(angle)]])
    solution = FairGrad(math.inf).solve(gramian(G))
    assert solution.report.status == status
    rate = min(1.0, angle**2 / 4 / 1e-6)
    torch.testing.assert_close(gramian(G) @ solution.weights, torch.full((2,), rate).double(), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(solution.weights / solution.weights.sum(), torch.full((2,), 0.5).double())


def test_cancelling_gradients_that_are_too_long_to_be_the_shortest_combination_by_these_digits():
    # Three that cancel, 1e9 times as long as a fourth: the least norm is 0, though the fourth alone looks shortest.
    triangle = 1e9 * np.array([[1.0, 0, 0], [-0.5, 0.75**0.5, 0], [-0.5, -(0.75**0.5), 0]])
    M = gramian(np.vstack((triangle, [[0.3, -0.4, 1.0]])))
    assert MGDA().solve(M).report.status == "stationary"
    assert MGDA().solve(M[1:, 1:]).report.status == "converged"


@pytest.mark.parametrize("alpha", [1.0, 2.0, 5.0])
@pytest.mark.parametrize("K", [2, 11, 64])
@pytest.mark.parametrize("seed", range(5))
def test_weights_at_a_stationary_point_are_bounded(seed, K, alpha):
    # sum M_ii w_i^2 <= ridge^(-2 alpha / (1 + alpha)) times what it is for each task alone.
    random = np.random.default_rng(seed)
    G = random.standard_normal((K, 2 * K)) * 10 ** random.uniform(-1, 1, (K, 1))
    G[-1] = -random.dirichlet(np.ones(K - 1)) @ G[:-1]
    if seed % 2:
        G[1] = -G[0]
    M = gramian(G)
    solution = FairGrad(alpha).solve(M)
    assert solution.report.status == "stationary"
    squares = M.diagonal()
    alone = (squares * (squares ** (-alpha / (1 + alpha))).square()).sum()
    assert (squares * solution.weights.square()).sum() <= 1e6 ** (2 * alpha / (1 + alpha)) * alone * (1 + 1e-9)


@pytest.mark.parametrize("weighting", [NashMTL.official(), FairGrad.official(), MGDA(max_norm=1e-3)], ids=repr)
@pytest.mark.parametrize("error", [-3e-7, 3e-7])
def test_clipping_holds_for_the_true_gradients(weighting, error):
    for distance in (1e-2, 1e-5, 1e-7, 0.0):
        w = weighting.solve(opposed(4.0, error - distance), noise=3e-7).weights
        true = opposed(4.0, -distance)
        assert float(w @ true @ w) ** 0.5 <= weighting.max_norm * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name in SOLVING if "mgda" not in name and "max-min" not in name])
@pytest.mark.parametrize("exponents", [(-19, 0, 18), (-15, -15, 15), (-22, 3, 3), (10, 18, 19)])
def test_float32_gramians_of_extreme_norms_keep_their_weights_positive(name, exponents):
    G = gradients(3)["well-conditioned"] * 10.0 ** np.array(exponents)[:, None]
    M = gramian(G / np.linalg.norm(G / 10.0 ** np.array(exponents)[:, None], axis=1, keepdims=True), torch.float32)
    w = SOLVING[name](M)
    assert torch.isfinite(w).all()
    assert (w != 0).all() if name == "imtl-g" else (w > 0).all()


def test_a_square_that_underflows_counts_as_no_gradient():
    # 1e-23 squared is 0 in float32, or close to it; its inner product with the other one, 1e-23, is still there.
    M = torch.tensor([[1e-46, 1e-23], [1e-23, 1.0]])
    assert NashMTL()(M).tolist() == [1.0, 1.0]  # the mean of the others


def test_a_weighting_is_told_the_precision_if_it_asks_for_it():
    class Asking:
        seen = ()

        def __call__(self, gramian):
            return self.solve(gramian).weights

        def solve(self, gramian, noise=None):
            self.seen = (*self.seen, noise)
            return Solution(torch.ones(len(gramian)), SolverReport(0, 0.0))

    class Plain(Asking):
        def solve(self, gramian):
            return Solution(torch.ones(len(gramian)), SolverReport(0, 0.0))

    asking, M = Asking(), torch.eye(2, dtype=torch.float64)
    resolve(asking).weigh(WeightingInputs(M, torch.ones(2), torch.eye(2), 0, 1e-5), {})
    assert asking.seen == (1e-5,)
    weighed = resolve(Plain()).weigh(WeightingInputs(M, torch.ones(2), torch.eye(2), 0, 1e-5), {})
    assert weighed.weights.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 3e-7), (torch.float64, 1e-14)], ids=str)
def test_cost_says_how_precise_its_gramian_is(dtype, noise):
    seen = []

    class Seeing:
        def initial_state(self, num_tasks):
            return {}

        def weigh(self, inputs, state):
            seen.append((inputs.gramian.device.type, inputs.gramian.dtype, inputs.noise))
            return cost_mtl.base.Weighed(torch.ones(2), state)

    model, x = torch.nn.Linear(3, 2).to(dtype), torch.randn(8, 3, dtype=dtype)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = cost_mtl.COST(base, model, shared=model, weighting=Seeing(), teleporter=None)
    optimizer.step(lambda: [model(x).square().mean(), (model(x) - 1).square().mean()])
    assert seen == [("cpu", torch.float64, noise)]


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
@solving
def test_a_gramian_on_a_gpu_gets_the_hosts_weights_and_errors(weighting):
    M = gramian(gradients(5)["conflicting"], torch.float32)
    w = weighting(M.cuda())
    assert (w.device.type, w.dtype) == ("cuda", torch.float32)
    assert torch.equal(w.cpu(), weighting(M))
    M[3, 3] = math.nan
    with pytest.raises(ValueError, match=r"not finite.*\[3\]"):
        weighting(M.cuda())

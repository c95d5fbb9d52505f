"""Every weighting on Gramians with rounding errors: finite, inside its documented bounds, and its status true.

60 Gramians in the suite; more by hand: FUZZ_GRAMIANS=2000 python -m pytest tests/fuzz
"""

import math
import os

import numpy as np
import pytest
import torch

from cost_mtl.weighting import IMTLG, MGDA, CAGrad, FairGrad, NashMTL, NGDiff
from cost_mtl.weighting.pcgrad import project_conflicts
from tests.fuzz.gramians import case
from tests.fuzz.oracle import LONG, Truth, fair_weights

COUNT = int(os.environ.get("FUZZ_GRAMIANS", "60"))
CHUNK = 20
RIDGE = 1e-6

near = 3e-2
"""Converged means determined to 1 %; an error of that size in both, and in what it is measured against, is 3."""


def fair(alpha):
    def check(truth, w, report, noise):
        assert (w > 0).all()
        inside = w[truth.present]
        assert np.allclose(w[~truth.present], inside.mean())
        if report.status == "stationary":
            # The unit gradients' hull comes that near to 0 ...
            assert truth.hull_distance <= 3 * max(1e-10, len(inside) * noise / 1e-2)
            if alpha >= 1:  # ... and the weights are bounded by the ridge
                alone = truth.norms ** (-2 * alpha / (1 + alpha))
                ridge = max(RIDGE, 4 * len(inside) * noise) - 2 * len(inside) * noise
                bound = max(ridge, RIDGE / 2) ** (-2 * alpha / (1 + alpha))
                assert (truth.norms * inside) @ (truth.norms * inside) <= bound * (truth.norms * alone) @ (
                    truth.norms * alone
                )
        elif report.status == "converged":
            rates = truth.M @ inside
            if not abs(inside ** (1 / alpha) * rates - 1).max() <= near:
                exact = fair_weights(truth.M, alpha, inside)
                assert exact is not None
                assert abs(inside / exact - 1).max() <= near
        else:
            assert report.rounding > 1e-2

    return check


def shortest(truth, w, report, noise):
    assert (w >= 0).all()
    assert w.sum() == pytest.approx(1, abs=1e-12)
    assert not w[~truth.present].any()
    limit = max(1e-12, noise / 1e-2)
    if not limit / 3 < truth.hull_distance < 3 * limit:
        assert report.status == ("stationary" if truth.hull_distance < limit else "converged")
    if report.status == "converged":
        least = truth.shortest(truth.norms.min() / truth.norms) * float(truth.norms.min()) ** 2
        assert truth.square_of(w[truth.present])[0] <= least * (1 + near)


def max_min(truth, w, report, noise):
    inside = w[truth.present]
    assert (w >= 0).all()
    square, least = truth.square_of(inside / inside.sum())[0], 1e-6 * truth.norms.min() ** 2
    if square < least * (1 - near):
        assert report.status == "stationary"
    if square < least * (1 + near):
        return
    if report.status == "converged":
        rates = truth.M @ inside
        # At least 1, up to the rounding of the terms: where a gradient is long, 1 is less than that.
        assert (rates - 1 >= -near - 100 * noise * truth.norms * (truth.norms @ inside)).all()
    shortest(truth, np.where(truth.present, w, 0) / inside.sum(), report, noise)


def conflict_averse(c):
    def check(truth, w, report, noise):
        inside, K = w[truth.present], truth.K
        assert (w >= 1 / K * (1 - 1e-12)).all()
        d, total = inside @ truth.G, truth.G.sum(axis=0)
        length = np.sqrt(total @ total) / K
        small = 3 * noise / 1e-2
        if report.status == "stationary":
            mean_vanishes = (K * length) ** 2 <= small * truth.norms.sum() ** 2
            assert mean_vanishes or truth.square_of(inside)[1] <= small or truth.hull_distance <= max(small, 3e-10)
            if c > 1 and not mean_vanishes:  # nobody loses
                assert (truth.unit @ d >= -near * length).all()
            return
        assert report.status == "converged"
        away = d - total / K
        assert np.sqrt(away @ away) <= c * length * (1 + near)
        assert np.sqrt(d @ d) >= (1 - c) * length * (1 - near)
        multipliers = inside - 1 / K
        g = multipliers / multipliers.sum() @ truth.G
        dual = g @ total / K + c * length * np.sqrt(g @ g)
        assert (truth.unit @ d >= dual / truth.norms - near * length).all()

    return check


def equal_projections(truth, w, report, noise):
    inside, n, K = w[truth.present], len(truth.norms), truth.K
    assert np.allclose(w[~truth.present], 1 / K)
    assert abs(inside).sum() >= n / K * (1 - 1e-9)
    if report.status == "converged":
        assert abs(inside.sum()) == pytest.approx(n / K, rel=1e-6)
        projections = truth.unit @ (inside @ truth.G)
        assert projections.min() > 0
        assert projections.max() / projections.min() <= 1 + near
        return
    # No direction of length 1 has equal projections on the unit gradients, none that the digits tell, or the sum is 0.
    v = np.linalg.pinv(truth.C.astype(np.float64), rcond=1e-12, hermitian=True).sum(1)
    solvable = abs(truth.C @ v - 1).max() < 1e-9
    vanishing = abs((v / truth.norms).sum()) <= 10 * max(1e-10, noise) * abs(v / truth.norms).sum()
    assert not solvable or vanishing or noise * abs(v).sum() > 1e-3


def surgery(truth, w, orders):
    """PCGrad on the vectors themselves in 80 bits: weights of 1 and more, and the same direction."""
    assert (w >= 1).all()
    size = float(w[truth.present] @ truth.norms)
    place = np.cumsum(truth.present) - 1
    total = np.zeros(truth.G.shape[1], dtype=LONG)
    for i in np.flatnonzero(truth.present):
        g = truth.G[place[i]].copy()
        for j in orders[i]:
            if j != i and truth.present[j]:
                other = truth.G[place[j]]
                g = g - min(g @ other, LONG(0)) / (other @ other) * other
        total += g
    difference = w[truth.present] @ truth.G - total
    assert np.sqrt(difference @ difference) <= 1e-3 * size


CHECKS = {
    "nash": (NashMTL(), fair(1.0)),
    "fairgrad 2": (FairGrad(), fair(2.0)),
    "fairgrad 1/2": (FairGrad(0.5), fair(0.5)),
    "fairgrad 5": (FairGrad(5.0), fair(5.0)),
    "fairgrad 0.1": (FairGrad(0.1), fair(0.1)),
    "max-min": (FairGrad(math.inf), max_min),
    "mgda": (MGDA(), shortest),
    "cagrad": (CAGrad(0.4, rescale=0, scale="raw"), conflict_averse(0.4)),
    "cagrad 1": (CAGrad(1.0, rescale=0, scale="raw"), conflict_averse(1.0)),
    "cagrad 2": (CAGrad(2.0, rescale=0, scale="raw"), conflict_averse(2.0)),
    "imtl-g": (IMTLG(), equal_projections),
}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("start", range(0, COUNT, CHUNK))
def test_finite_bounded_and_truthful(name, start):
    weighting, check = CHECKS[name]
    for seed in range(start, start + CHUNK):
        given = case(seed)
        truth = Truth(given.G)
        M = torch.from_numpy(given.M)
        assert torch.isfinite(weighting(M)).all(), given.name  # the precision unknown
        solution = weighting.solve(M, noise=given.noise)
        w = solution.weights.numpy()
        assert np.isfinite(w).all(), given.name
        try:
            check(truth, w, solution.report, given.shown_noise)
        except AssertionError as failure:
            raise AssertionError(f"{given.name}; {solution.report}, {w}") from failure


@pytest.mark.parametrize("start", range(0, COUNT, CHUNK))
def test_surgery_and_unlearning(start):
    for seed in range(start, start + CHUNK):
        given = case(seed)
        truth, K = Truth(given.G), len(given.G)
        M = torch.from_numpy(given.M)
        orders = torch.stack(
            [torch.randperm(K, generator=torch.Generator().manual_seed(K * seed + i)) for i in range(K)]
        )
        w = project_conflicts(M, orders).sum(0)
        assert torch.isfinite(w).all(), given.name
        surgery(truth, w.numpy(), orders.tolist())
        w = NGDiff()(M[:2, :2]).numpy()
        lengths = abs(w) * np.sqrt(given.M.diagonal()[:2])
        np.testing.assert_allclose(lengths, truth.present[:2].astype(float), rtol=1e-12, err_msg=given.name)
        assert w[0] >= 0 >= w[1]

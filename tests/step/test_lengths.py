"""The length of the combined gradient: the default keeps the plain sum's learning rate working, and what does not is
warned of once."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cost_mtl import COST, IMTLG, MGDA, CAGrad, EqualWeighting, FairGrad, NashMTL
from tests.nets import MultiHead, data, losses, mlp

FAMILY = [FairGrad, NashMTL, CAGrad, MGDA, IMTLG]
family = pytest.mark.parametrize("method", FAMILY)


def gramians(K, count=60, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        G = rng.standard_normal((K, K + 3)) * 10 ** rng.uniform(-1, 1, (K, 1)) + rng.uniform(
            -0.5, 1
        ) * rng.standard_normal(K + 3)
        yield torch.from_numpy(G)


@family
@pytest.mark.parametrize("K", [2, 3, 7])
def test_project_is_the_projection_of_the_sums_gradient_on_the_methods_line(method, K):
    for G in gramians(K):
        M = G @ G.T
        d = G.T @ method(scale="project")(M)
        line = G.T @ method()(M)
        s = G.sum(dim=0)
        cosine = float(line @ s / line.norm() / s.norm())
        assert float(d.norm()) == pytest.approx(float(s.norm()) * abs(cosine), rel=1e-6)
        assert float(torch.cosine_similarity(d, line, dim=0)) == pytest.approx(1.0, abs=1e-9)


@family
def test_project_scales_with_the_losses_and_is_the_sum_where_nothing_is_to_weigh(method):
    weighting = method(scale="project")
    for G in gramians(3, 10):
        M = G @ G.T
        torch.testing.assert_close(weighting(M * 1e6), weighting(M), rtol=1e-6, atol=1e-9)
    assert weighting(torch.tensor([[7.0]])).tolist() == [1.0]
    assert weighting(torch.eye(3, dtype=torch.float64)).tolist() == pytest.approx([1.0, 1.0, 1.0])


@family
def test_a_step_that_the_sum_bears_never_raises_it(method):
    # Quadratics 1/2 (x - c_i)^T H_i (x - c_i), eta = 1.9 / lambda_max(sum H_i): gradient descent on the sum converges.
    rng = np.random.default_rng(3)
    for _ in range(10):
        roots = [rng.standard_normal((4, 4)) * 10 ** rng.uniform(-1, 0.5) for _ in range(3)]
        H = [torch.from_numpy(r @ r.T) for r in roots]
        c = [torch.from_numpy(rng.standard_normal(4)) for _ in H]
        rate = 1.9 / float(torch.linalg.eigvalsh(sum(H))[-1])
        x = torch.from_numpy(3 * rng.standard_normal(4))

        def total(x, H=H, c=c):
            return sum(float((x - b) @ A @ (x - b)) / 2 for A, b in zip(H, c, strict=True))

        for _ in range(30):
            G = torch.stack([A @ (x - b) for A, b in zip(H, c, strict=True)])
            d = G.T @ method(scale="project")(G @ G.T)
            if float(d @ G.sum(dim=0)) < 0:  # the method goes against the sum: no length helps
                break
            before, x = total(x), x - rate * d
            assert total(x) <= before * (1 + 1e-12)


def unbalanced(seed=0, K=8, n=256):
    """Binary tasks of which few, or most, are positive; one shared trunk."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((n, 20))).float()
    teacher = torch.from_numpy(rng.standard_normal((20, K))).float()
    logits = torch.tanh(x @ teacher) * 3
    share = torch.tensor([0.01, 0.02, 0.05, 0.1, 0.3, 0.5, 0.9, 0.98])
    y = torch.stack([(z > z.quantile(1 - q)).float() for z, q in zip(logits.T, share, strict=True)], dim=1)
    torch.manual_seed(seed)
    model = MultiHead(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()), 32, K)
    return model, x, y


def trained(weighting, base, lr, steps=300, **settings):
    model, x, y = unbalanced()
    optimizer = base(model.parameters(), lr=lr, **({"momentum": 0.9} if base is torch.optim.SGD else {}))
    if weighting != "sum":
        given = {} if weighting == "default" else {"weighting": weighting}
        optimizer = COST(optimizer, model, shared=model.trunk, **given, **settings)

    def closure(rows):
        return [F.binary_cross_entropy_with_logits(out[:, 0], y[rows, k]) for k, out in enumerate(model(x[rows]))]

    for step in range(steps):
        rows = torch.arange(32) + 32 * (step % 8)
        if weighting == "sum":
            optimizer.zero_grad()
            sum(closure(rows)).backward()
            optimizer.step()
        else:
            optimizer.step(closure, rows)
    with torch.no_grad():
        return float(torch.stack(closure(torch.arange(len(x)))).mean())


@pytest.mark.parametrize(("base", "lr"), [(torch.optim.SGD, 0.01), (torch.optim.Adam, 1e-3)])
def test_all_defaults_train_unbalanced_tasks_at_the_sums_rate(base, lr):
    start = trained("sum", base, lr, steps=0)
    plain = trained("sum", base, lr)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = trained("default", base, lr)
    assert plain < 0.25 * start  # the rate suits the sum
    assert mine < 0.3 * start  # slower where one task in a hundred is positive, and far from diverging


def test_a_length_that_has_nothing_to_do_with_the_sums_is_warned_of_once():
    model, (x, ys) = mlp(2), data(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=1e-9), model, shared=model.trunk, teleporter=None,
                     weighting=lambda M: torch.full((2,), 2e3))  # fmt: skip
    with pytest.warns(
        UserWarning, match=r"weighting: the combined gradient has the norm .* plain sum .*max_norm"
    ) as caught:
        optimizer.step(lambda: losses(model, x, ys))
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(lambda: losses(model, x, ys))


@pytest.mark.parametrize(
    ("factor", "settings", "warned"),
    [(0.9e3, {}, False), (1.1e3, {}, True), (1.2e-3, {}, False), (0.9e-3, {}, True), (1e9, {"max_norm": 0.1}, False)],
)
def test_what_counts_as_unusual(factor, settings, warned):
    model, (x, ys) = mlp(2), data(2)
    optimizer = COST(torch.optim.SGD(model.parameters(), lr=1e-9), model, shared=model.trunk, teleporter=None,
                     weighting=EqualWeighting([factor, factor]), **settings)  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step(lambda: losses(model, x, ys))
    assert bool(caught) is warned


def test_a_pareto_point_is_not_unusual():
    # Opposed gradients: the sum's is rounding, and so is every direction.
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    model = nn.ParameterList([weight])
    for weighting in (FairGrad(scale="project"), MGDA(scale="project"), CAGrad()):
        optimizer = COST(
            torch.optim.SGD([weight], lr=0.1), model, shared=[weight], teleporter=None, weighting=weighting
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(30):
                optimizer.step(lambda: [weight.square().sum(), (weight - 1).square().sum()])
        assert torch.isfinite(weight).all()

"""What every weighting of Gramians keeps to, whatever its method."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cost_mtl.base import SolvingWeighting, Weighting
from cost_mtl.weighting import NGDiff
from tests.weighting.cases import NON_NEGATIVE, SOLVABLE, SOLVING, WEIGHTINGS, gradients, gramian, random_gradients

every = pytest.mark.parametrize("weighting", WEIGHTINGS.values(), ids=WEIGHTINGS)
solving = pytest.mark.parametrize("weighting", SOLVING.values(), ids=SOLVING)
non_negative = pytest.mark.parametrize("weighting", NON_NEGATIVE.values(), ids=NON_NEGATIVE)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keeps_shape_dtype_and_input(weighting, dtype):
    M = gramian(random_gradients(4), dtype)
    before = M.clone()
    w = weighting(M)
    assert (w.shape, w.dtype, w.device) == ((4,), dtype, M.device)
    assert torch.equal(M, before)
    assert not w.requires_grad
    assert torch.isfinite(w).all()


@non_negative
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("family", gradients(2))
@pytest.mark.parametrize("K", [2, 3, 11])
def test_finite_and_non_negative_on_every_family(weighting, family, K, dtype):
    w = weighting(gramian(gradients(K)[family], dtype))
    assert torch.isfinite(w).all()
    assert (w >= 0).all()


@every
def test_a_hundred_tasks_and_one(weighting):
    assert torch.isfinite(weighting(gramian(random_gradients(100)))).all()
    assert torch.isfinite(weighting(torch.tensor([[9.0]]))).all()


@every
@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "spread 1e±3", "duplicated"])
def test_permutes_with_the_tasks(weighting, family):
    G = gradients(6)[family]
    order = np.random.default_rng(1).permutation(6)
    w = weighting(gramian(G)).numpy()
    np.testing.assert_allclose(weighting(gramian(G[order])).numpy(), w[order], rtol=1e-7, atol=1e-9 * abs(w).max())


EXPONENTS = {
    "equal": 0, "fairgrad 2": -2 / 3, "fairgrad 1/2": -1 / 3, "fairgrad 5": -5 / 6, "fairgrad 0": 0, "max-min": -1,
    "official fairgrad": -1 / 2, "nash": -1 / 2, "nash, sum": 0, "official nash": -1 / 2, "cagrad": 0, "cagrad 0": 0,
    "cagrad 2": 0, "libmtl cagrad": 0, "mgda": 0, "imtl-g": 0,
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("s", [1e-16, 1e-8, 1e8, 1e16])
@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "spread 1e±3"])
def test_scales_as_the_maths_says(name, s, family):
    # M -> s M means w -> s^e w; where ||d|| is clipped to 1, e = -1/2 as long as the clip acts on both.
    M = gramian(gradients(5)[family]) * (1e-40 if name == "official fairgrad" else 1)
    w, scaled = WEIGHTINGS[name](M), WEIGHTINGS[name](M * s)
    torch.testing.assert_close(scaled, w * s ** EXPONENTS[name], rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", SOLVING)
def test_a_task_without_gradient_leaves_the_others_alone(name):
    weighting = SOLVING[name]
    G = random_gradients(4)
    absent = np.insert(G, 2, 0.0, axis=0)
    w, others = weighting(gramian(absent)), weighting(gramian(G))
    rest = torch.cat([w[:2], w[3:]])
    if any(part in name for part in ("official fairgrad", "sum", "libmtl", "imtl")):  # which the absent task counts in
        rest, others = rest / rest.sum(), others / others.sum()
    torch.testing.assert_close(rest, others, rtol=1e-9, atol=0)
    assert torch.isfinite(w[2])
    if name != "mgda":  # whose minimum would be zero with it
        assert w[2] > 0


@every
def test_all_gradients_zero(weighting):
    w = weighting(torch.zeros(3, 3))
    assert torch.isfinite(w).all()
    assert (w > 0).all()
    assert torch.equal(w, w.flip(0))


@solving
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gramian_that_is_not_finite_names_the_task(weighting, bad):
    M = gramian(random_gradients(4))
    M[2, :] = M[:, 2] = bad
    with pytest.raises(ValueError, match=r"not finite.*\[2\]"):
        weighting(M)


@solving
def test_what_is_no_gramian_is_refused(weighting):
    with pytest.raises(ValueError, match=r"\[K, K\].*\[2, 3\]"):
        weighting(torch.ones(2, 3))
    with pytest.raises(ValueError, match="not symmetric"):
        weighting(torch.tensor([[1.0, 0.5], [0.2, 1.0]]))
    with pytest.raises(ValueError, match="exceeds the product of norms"):
        weighting(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(ValueError, match="diagonal entry of task 1"):
        weighting(torch.tensor([[1.0, 0.0], [0.0, -1.0]]))
    with pytest.raises(TypeError, match="floating-point"):
        weighting(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="list"):
        weighting([[1.0]])


@every
def test_is_a_frozen_copyable_setting(weighting):
    assert isinstance(weighting, Weighting)
    assert pickle.loads(pickle.dumps(weighting)) == copy.deepcopy(weighting) == weighting
    with pytest.raises(dataclasses.FrozenInstanceError):
        weighting.scale = "sum"


@solving
def test_solve_reports_on_what_call_returns(weighting):
    assert isinstance(weighting, SolvingWeighting)
    M = gramian(random_gradients(5))
    solution = weighting.solve(M)
    assert torch.equal(solution.weights, weighting(M))
    assert solution.report.status == "converged"
    assert 0 <= solution.report.residual < 1e-9


class Counting(TorchDispatchMode):
    """Counts torch's operations: on a GPU each is a launch or a copy."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@solving
@pytest.mark.parametrize("K", [2, 40])
def test_a_solve_is_a_copy_to_the_host_and_one_back(weighting, K):
    M = gramian(gradients(K)["conflicting"], torch.float32)
    with Counting() as operations:
        weighting(M)
    assert operations.count <= 12


@solving
@pytest.mark.parametrize("setting", [{"scale": "median"}, {"max_norm": 0.0}])
def test_settings_that_do_not_exist_are_refused(weighting, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        dataclasses.replace(weighting, **setting)


@pytest.mark.parametrize("family", SOLVABLE)
def test_unlearning_adds_unit_gradients_of_opposite_sign(family):
    G = gradients(2)[family]
    unit = G / np.linalg.norm(G, axis=1, keepdims=True)
    np.testing.assert_allclose(NGDiff()(gramian(G)).numpy() @ G, unit[0] - unit[1], atol=1e-12)
    np.testing.assert_allclose(NGDiff(1, 0)(gramian(G)).numpy() @ G, unit[1] - unit[0], atol=1e-12)


def test_unlearning_is_for_two_tasks():
    assert NGDiff()(torch.tensor([[0.0, 0.0], [0.0, 4.0]])).tolist() == [0.0, -0.5]
    with pytest.raises(ValueError, match="two tasks"):
        NGDiff()(torch.eye(3))
    with pytest.raises(ValueError, match="0 and 1"):
        NGDiff(1, 1)
    with pytest.raises(ValueError, match=r"\[1\]"):
        NGDiff()(torch.tensor([[1.0, float("nan")], [float("nan"), float("nan")]]))

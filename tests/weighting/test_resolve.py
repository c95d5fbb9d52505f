"""What COST(weighting=...) takes, and what it refuses with the fix."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import cost_mtl
from cost_mtl.base import StatefulWeighting, WeightingInputs
from cost_mtl.weighting import RLW, CAGrad, EqualWeighting, FairGrad, NashMTL, resolve


def inputs(K=3, dtype=torch.float64):
    G = torch.randn(K, 10, dtype=dtype)
    return WeightingInputs(G @ G.T, torch.ones(K), G, 0)


def by_diagonal(gramian):
    return gramian.diagonal().rsqrt()


@pytest.mark.parametrize(
    "weighting",
    [EqualWeighting(), FairGrad(), NashMTL(), CAGrad(), by_diagonal],
    ids=lambda w: getattr(w, "__name__", str(w)),
)
def test_functions_of_the_gramian(weighting):
    resolved = resolve(weighting)
    assert isinstance(resolved, StatefulWeighting)
    state = resolved.initial_state(3)
    assert state == {}
    given = inputs()
    for same in (resolved, copy.deepcopy(resolved), pickle.loads(pickle.dumps(resolved))):
        weighed = same.weigh(given, state)
        assert torch.equal(weighed.weights, weighting(given.gramian))
        assert weighed.state == {}


def test_the_report_of_a_solving_weighting_comes_through():
    given = inputs()
    weighed = resolve(FairGrad()).weigh(given, {})
    assert weighed.solver == FairGrad().solve(given.gramian).report
    assert resolve(by_diagonal).weigh(given, {}).solver is None


def test_a_stateful_weighting_is_taken_as_it_is():
    weighting = RLW()
    assert resolve(weighting) is weighting


def test_an_answer_is_copied_detached_and_cast():
    kept = torch.ones(3, requires_grad=True)
    weights = resolve(lambda gramian: kept).weigh(inputs(), {}).weights
    assert (weights.dtype, weights.requires_grad) == (torch.float64, False)
    assert weights.data_ptr() != kept.data_ptr()
    same_dtype = torch.ones(3, dtype=torch.float64)
    assert resolve(lambda gramian: same_dtype).weigh(inputs(), {}).weights.data_ptr() != same_dtype.data_ptr()


def test_wrong_answers_are_refused_by_name():
    def lopsided(gramian):
        return torch.ones(2)

    with pytest.raises(ValueError, match=r"lopsided: expected weights of shape \[3\], got \[2\]"):
        resolve(lopsided).weigh(inputs(), {})
    with pytest.raises(TypeError, match="expected a real tensor of weights"):
        resolve(lambda gramian: [1.0, 1.0, 1.0]).weigh(inputs(), {})
    with pytest.raises(TypeError, match="real tensor"):
        resolve(lambda gramian: gramian.diagonal() * 1j).weigh(inputs(), {})
    with pytest.raises(ValueError, match=r"not finite for task\(s\) \[1\]"):
        resolve(lambda gramian: torch.tensor([1.0, float("nan"), 1.0])).weigh(inputs(), {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("fairgrad", "expected an object, got the name 'fairgrad'"),
        (FairGrad, r"write FairGrad\(\)"),
        (3, "got int"),
        (None, "got NoneType"),
        (torch.ones(3), "got Tensor"),
    ],
)
def test_what_is_no_weighting(given, words):
    with pytest.raises(TypeError, match=words):
        resolve(given)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=words):
        cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, weighting=given)


def test_nothing_heavy_is_imported_on_the_way():
    code = (
        "import sys, torch, cost_mtl; from cost_mtl.weighting import resolve, FairGrad, CAGrad; "
        "[resolve(w) for w in (FairGrad(), CAGrad(), torch.nn.Identity())]; FairGrad()(torch.eye(3)); "
        "sys.exit(', '.join({'torchjd', 'scipy', 'cvxpy'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

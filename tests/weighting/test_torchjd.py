"""torchjd's weightings of Gramians plug in as they are; everything else of torchjd's is refused with the fix."""

import copy
import io
import pickle

import pytest
import torch

import cost_mtl
from cost_mtl.base import WeightingInputs
from cost_mtl.weighting import resolve

jd = pytest.importorskip("torchjd.aggregation", reason="torchjd is an optional extra")
scalarization = pytest.importorskip("torchjd.scalarization", reason="torchjd is an optional extra")


def inputs(K, step=0, dtype=torch.float64):
    G = torch.randn(K, 12, dtype=dtype, generator=torch.Generator().manual_seed(step))
    return WeightingInputs(G @ G.T, torch.ones(K), G, step)


STATELESS = {
    "UPGrad": lambda: jd.UPGradWeighting(),
    "DualProj": lambda: jd.DualProjWeighting(),
    "AlignedMTL": lambda: jd.AlignedMTLWeighting(),
    "MGDA": lambda: jd.MGDAWeighting(),
    "IMTLG": lambda: jd.IMTLGWeighting(),
    "CAGrad": lambda: jd.CAGradWeighting(c=0.4),
    "FairGrad": lambda: jd.FairGradWeighting(alpha=1.0),
    "Krum": lambda: jd.KrumWeighting(1),
    "Mean": lambda: jd.MeanWeighting(),
    "Sum": lambda: jd.SumWeighting(),
}
STATEFUL = {
    "GradVac": lambda: jd.GradVacWeighting(),
    "PCD": lambda: jd.PCDWeighting(tau=0.5),
    "CR-MOGM of UPGrad": lambda: jd.CRMOGMWeighting(jd.UPGradWeighting()),
    "CR-MOGM of GradVac": lambda: jd.CRMOGMWeighting(jd.GradVacWeighting()),
}


@pytest.mark.parametrize("name", STATELESS)
def test_stateless_weightings_of_gramians(name):
    resolved = resolve(STATELESS[name]())
    state = resolved.initial_state(5)
    for K in (5, 6):
        given = inputs(K)
        weighed = resolved.weigh(given, state)
        torch.testing.assert_close(weighed.weights, STATELESS[name]()(given.gramian).detach())
        state = weighed.state


def test_a_constant_weighting_is_copied():
    kept = torch.tensor([1.0, 2.0, 3.0])
    weights = resolve(jd.ConstantWeighting(kept)).weigh(inputs(3, dtype=torch.float32), {}).weights
    assert torch.equal(weights, kept)
    assert weights.data_ptr() != kept.data_ptr()


def run(resolved, steps, state, start=0, K=4):
    weights = []
    for step in range(start, start + steps):
        torch.manual_seed(step)  # GradVac draws its orders from the global stream
        weighed = resolved.weigh(inputs(K, step), state)
        state = weighed.state
        weights.append(weighed.weights)
    return torch.stack(weights), state


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_weightings_keep_their_memory_in_the_state(name):
    alone = STATEFUL[name]()
    expected = []
    for step in range(6):
        torch.manual_seed(step)
        expected.append(alone(inputs(4, step).gramian).detach().clone())
    resolved = resolve(STATEFUL[name]())
    whole, _ = run(resolved, 6, resolved.initial_state(4))
    torch.testing.assert_close(whole, torch.stack(expected))
    # Saved after three steps, with another optimizer using the same object in between.
    _, state = run(resolved, 3, resolved.initial_state(4))
    run(resolved, 2, resolved.initial_state(4))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    rest, _ = run(pickle.loads(pickle.dumps(resolved)), 3, torch.load(file, weights_only=True), start=3)
    assert torch.equal(rest, whole[3:])


@pytest.mark.parametrize("name", STATEFUL)
def test_stateful_weightings_start_afresh_with_another_number_of_tasks(name):
    resolved = resolve(STATEFUL[name]())
    _, state = run(resolved, 3, resolved.initial_state(4))
    changed, _ = run(resolved, 2, state, start=3, K=3)
    fresh, _ = run(resolve(STATEFUL[name]()), 2, resolved.initial_state(3), start=3, K=3)
    assert torch.equal(changed, fresh)


def test_copies_and_subclasses():
    class Doubled(jd.UPGradWeighting):
        def forward(self, gramian):
            return 2 * super().forward(gramian)

    given = inputs(3)
    once = resolve(jd.UPGradWeighting()).weigh(given, {}).weights
    resolved = copy.deepcopy(resolve(Doubled()))
    torch.testing.assert_close(resolved.weigh(given, {}).weights, 2 * once)


REFUSED = {
    "an aggregator": (lambda: jd.UPGrad(), r"UPGrad, .*Aggregator.*pass UPGradWeighting\(\)"),
    "an aggregator without Gramian form": (lambda: jd.ConFIG(), "ConFIG, .*no form that needs the Gramian only"),
    "GradDrop": (lambda: jd.GradDrop(), r"GradDrop, .*pass cost_mtl.GradDrop\(\)"),
    "the mean": (lambda: jd.Mean(), r"pass MeanWeighting\(\)"),
    "an aggregator's Jacobian weighting": (lambda: jd.UPGrad().weighting, r"\.gramian_weighting instead"),
    "ExcessMTL": (lambda: jd.ExcessMTLWeighting(1.0), "ExcessMTLWeighting, .*of Jacobians"),
    "MoDo": (lambda: jd.MoDoWeighting(), "MoDoWeighting, .*of Jacobians"),
    "a wrapped one of Jacobians": (lambda: jd.CRMOGMWeighting(jd.ExcessMTLWeighting(1.0)), "of Jacobians"),
    "a scalarizer": (lambda: scalarization.UW(3), r"UW, .*Scalarizer.*cost_mtl.Uncertainty"),
    "a class": (lambda: jd.UPGradWeighting, r"write UPGradWeighting\(\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_fix(case):
    make, words = REFUSED[case]
    with pytest.raises(TypeError, match=words):
        resolve(make())


def test_nash_mtl_is_refused_in_both_forms():
    pytest.importorskip("ecos", reason="torchjd's NashMTL needs ecos")
    for given in (jd.NashMTL(n_tasks=3), jd.NashMTL(n_tasks=3).weighting):
        with pytest.raises(TypeError, match=r"NashMTL.*pass cost_mtl.NashMTL\(\)"):
            resolve(given)


def test_in_a_training_step():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {"trunk": torch.nn.Linear(3, 4), "a": torch.nn.Linear(4, 1), "b": torch.nn.Linear(4, 1)}
    )
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = cost_mtl.COST(base, model, shared=model["trunk"], weighting=jd.UPGradWeighting(), teleporter=None)
    x = torch.randn(8, 3)

    def losses():
        z = model["trunk"](x)
        return [(model["a"](z) - 1).square().mean(), (model["b"](z) + 1).square().mean()]

    optimizer.step(losses)
    torch.testing.assert_close(
        optimizer.last_step.weights, jd.UPGradWeighting()(optimizer.last_step.gramian), check_dtype=False
    )

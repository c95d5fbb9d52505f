"""The device path reads nothing back: watched on CPU tensors, on meta tensors (nothing there to read), on a GPU."""

import copy
import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cost_mtl.base import WeightingInputs
from cost_mtl.weighting import DWA, FAMO, RLW, EqualWeighting, GradDrop, NGDiff, PCGrad, ScaleInvariant, Uncertainty
from tests.weighting.cases import SOLVING, gradients, gramian, random_gradients

on_device = {name: dataclasses.replace(w, solver="device") for name, w in SOLVING.items()}
every = pytest.mark.parametrize("weighting", on_device.values(), ids=on_device)


class NoHostReads(TorchDispatchMode):
    """Fails on every operation that would make the host wait for the device."""

    READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.READS, f"{func} reads from the device"
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), f"{func} counts a mask"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def forbidden(monkeypatch):
    """Ways to read a tensor that no dispatch mode sees."""

    def fail(self, *args, **kwargs):
        raise AssertionError("a tensor was read on the host")

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, fail)


@every
def test_no_host_read(weighting, forbidden):
    M = gramian(random_gradients(4))
    with NoHostReads():
        weighting.solve(M)


def test_the_watch_sees_a_host_read():
    with NoHostReads(), pytest.raises(AssertionError, match="reads from the device"):
        bool(torch.ones(()) > 0)
    with NoHostReads(), pytest.raises(AssertionError):
        torch.ones(3)[torch.tensor([True, False, True])]


@every
def test_runs_on_tensors_without_data(weighting, monkeypatch):
    for module in ("cagrad", "mgda"):  # operations on meta tensors are slow, and one iteration is like another
        monkeypatch.setattr(f"cost_mtl.weighting.{module}.ITERATIONS", 3)
    monkeypatch.setattr("cost_mtl.weighting._fairness.iteration_limit", lambda alpha: 3)
    w = weighting(torch.empty(5, 5, dtype=torch.float32, device="meta"))
    assert (w.shape, w.dtype, w.device.type) == ((5,), torch.float32, "meta")


@every
@pytest.mark.parametrize("family", ["well-conditioned", "conflicting", "spread 1e±3", "norms 1e-8", "norms 1e+8"])
@pytest.mark.parametrize("K", [2, 7])
def test_the_same_weights_as_on_the_host(weighting, family, K):
    M = gramian(gradients(K)[family])
    host = dataclasses.replace(weighting, solver="host").solve(M)
    device = weighting.solve(M)
    torch.testing.assert_close(device.weights, host.weights, rtol=1e-6, atol=1e-9 * float(host.weights.max()))
    assert device.report.status == "converged"
    assert float(device.report.residual) < 1e-6


@every
def test_a_gramian_that_is_not_finite_gives_nan_and_a_status(weighting, forbidden):
    M = gramian(random_gradients(3))
    M[1, :] = M[:, 1] = float("nan")
    with NoHostReads():
        solution = weighting.solve(M)
    assert isinstance(solution.report.code, torch.Tensor)


@every
def test_the_status_can_be_read_afterwards(weighting):
    M = gramian(random_gradients(3))
    M[1, 1] = float("inf")
    solution = weighting.solve(M)
    assert solution.report.status == "non_finite"
    assert torch.isnan(solution.weights).all()


def inputs(device):
    G = torch.from_numpy(random_gradients(3)).float().to(device)
    return WeightingInputs((G @ G.T).double(), G.new_ones(3), G, 5)


STATEFUL = [RLW(), DWA(steps_per_epoch=2), PCGrad(), FAMO(), ScaleInvariant(), Uncertainty(3)]
names = pytest.mark.parametrize("weighting", STATEFUL, ids=lambda w: type(w).__name__)


def steps(weighting, device, between):
    """Two steps on the device, with ``between()`` called after the first."""
    if isinstance(weighting, Uncertainty):
        weighting = copy.deepcopy(weighting).to(device)
    now = inputs(device)
    state = weighting.weigh(now, weighting.initial_state(3)).state
    between()
    weighed = weighting.weigh(dataclasses.replace(now, step=6), state)
    if isinstance(weighting, FAMO):
        weighting.observe(now.losses, weighed.state)
    return weighed.weights


@names
def test_stateful_weightings_read_nothing_of_a_device_tensor(weighting):
    assert steps(weighting, "meta", lambda: None).device.type == "meta"


@pytest.mark.parametrize("weighting", [EqualWeighting(), EqualWeighting((1.0, 2.0)), NGDiff()], ids=repr)
def test_direct_weightings_read_nothing_of_a_device_tensor(weighting):
    assert weighting(torch.empty(2, 2, device="meta")).device.type == "meta"


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cuda
@pytest.mark.parametrize("name", SOLVING)
def test_no_synchronisation_on_a_gpu(name):
    M = gramian(random_gradients(11)).cuda()
    expected = SOLVING[name](M.cpu())
    SOLVING[name](M)  # handles and workspaces of the linear algebra
    torch.cuda.set_sync_debug_mode("error")
    try:
        solution = SOLVING[name].solve(M)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(solution.weights.cpu(), expected, rtol=1e-6, atol=1e-9)


@cuda
@pytest.mark.parametrize("name", SOLVING)
def test_can_be_captured_in_a_graph(name):
    M = gramian(random_gradients(11)).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        SOLVING[name](M)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        w = SOLVING[name](M)
    other = gramian(random_gradients(11, seed=1))
    M.copy_(other)
    graph.replay()
    torch.testing.assert_close(w.cpu(), SOLVING[name](other), rtol=1e-6, atol=1e-9)


@cuda
@pytest.mark.parametrize("weighting", [*STATEFUL, GradDrop()], ids=lambda w: type(w).__name__)
def test_stateful_weightings_do_not_synchronise(weighting):
    try:
        w = steps(weighting, "cuda", lambda: torch.cuda.set_sync_debug_mode("error"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(w).all()

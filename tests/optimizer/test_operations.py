"""What a plain step costs beside its passes: operations of torch, and reads from the device. docs/dropin.md says so."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import cost_mtl
from tests.nets import data, losses, mlp

TEXT = (Path(__file__).parents[2] / "docs" / "dropin.md").read_text(encoding="utf-8")

READS = ("cpu", "tolist", "numpy")
"""Methods that copy a tensor to the host: on the CPU torch calls no operation for them."""


class Counting(TorchDispatchMode):
    """Counts operations, and reads of tensors that are on the device.

    There is one memory on a CPU, so tensors are told apart by where they come from: the result of ``cpu()`` is on the
    host, and so are NumPy's arrays and what is computed from such tensors alone. All others count as on the device.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.reads, self.paused = 0, [], False

    def on_host(self, value):
        return getattr(value, "on_host", False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        name = func.name()
        if not self.paused and not name.startswith("profiler::"):
            self.operations += 1
            if "_local_scalar_dense" in name and not self.on_host(tensors[0]):
                self.reads.append(name)
        result = func(*args, **kwargs or {})
        if tensors and all(self.on_host(value) for value in tensors):
            for value in tree_flatten(result)[0]:
                if isinstance(value, torch.Tensor):
                    value.on_host = True
        return result

    def watch(self, monkeypatch):
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._reading(getattr(torch.Tensor, name), name))
        from_numpy = torch.from_numpy

        def marked(array):
            tensor = from_numpy(array)
            tensor.on_host = True
            return tensor

        monkeypatch.setattr(torch, "from_numpy", marked)

    def _reading(self, method, name):
        def read(tensor, *args, **kwargs):
            if not self.paused and not self.on_host(tensor):
                self.reads.append(name)
            if name != "cpu":
                return method(tensor, *args, **kwargs)
            copy = tensor.detach().clone()
            copy.on_host = True
            return copy

        return read


def counted(step, base, monkeypatch):
    """Of the third step, so that nothing is made for the first time; the base optimizer's own step is not counted."""
    count = Counting()
    own_step = base.step

    def uncounted(*args, **kwargs):
        count.paused = True
        try:
            return own_step(*args, **kwargs)
        finally:
            count.paused = False

    monkeypatch.setattr(base, "step", uncounted)
    step()
    step()
    with monkeypatch.context() as patch, count:
        count.watch(patch)
        step()
    return count


def plain(monkeypatch, K=3):
    """K calls of autograd.grad, and the sum: what any method with K gradients has to do."""
    model = mlp(K)
    base = torch.optim.Adam(model.parameters(), lr=1e-3)
    params, (x, ys) = list(model.parameters()), data(K)

    def step():
        found = losses(model, x, ys)
        for i, loss in enumerate(found):
            grads = torch.autograd.grad(loss, params, retain_graph=i < K - 1, allow_unused=True)
            for p, g in zip(params, grads, strict=True):
                if g is not None:
                    p.grad = g if p.grad is None or i == 0 else p.grad + g
        base.step()

    return counted(step, base, monkeypatch)


def cost(monkeypatch, K=3, **settings):
    model = mlp(K)
    base = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = cost_mtl.COST(base, model, shared=model.trunk, **settings)
    x, ys = data(K)
    return counted(lambda: optimizer.step(lambda: losses(model, x, ys)), base, monkeypatch)


METHODS = [cost_mtl.FairGrad(), cost_mtl.NashMTL(), cost_mtl.CAGrad(), cost_mtl.MGDA(), cost_mtl.IMTLG()]


@pytest.mark.parametrize("weighting", METHODS, ids=lambda weighting: type(weighting).__name__)
@pytest.mark.parametrize("K", [2, 3, 11])
def test_a_plain_step_reads_from_the_device_once(monkeypatch, weighting, K):
    assert cost(monkeypatch, K, weighting=weighting).reads == ["cpu"]


def test_a_read_too_many_is_noticed(monkeypatch):
    def step():
        losses(model, x, ys)[0].item()
        optimizer.step(lambda: losses(model, x, ys))

    model, (x, ys) = mlp(3), data(3)
    base = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = cost_mtl.COST(base, model, shared=model.trunk)
    assert len(counted(step, base, monkeypatch).reads) == 2


def test_the_documented_counts_are_those_of_today(monkeypatch):
    """K = 3, FairGrad, Adam: an upper bound, and no more than a tenth above the count."""
    found = re.search(r"(\d+) operations of torch, (\d+) of them", TEXT)
    whole, by_hand = int(found[1]), int(found[2])
    assert cost(monkeypatch).operations <= whole <= 1.1 * cost(monkeypatch).operations
    assert plain(monkeypatch).operations <= by_hand <= 1.1 * plain(monkeypatch).operations

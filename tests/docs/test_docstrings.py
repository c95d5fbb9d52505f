"""Every public class and function has an example in its docstring, and it runs."""

import doctest

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import cost_mtl
from cost_mtl import merging

# Examples of these are written with their rooms.
EXEMPT = {
    "COST", "Acceptance", "DenseTeleporter", "DifferenceTeleporter", "LevelSet", "LoRATeleporter", "Move",
    "NoAdaptableLayerError", "Penalty", "TeleportReport", "Teleporter", "UnrepeatableClosureError",
    "reuse_trajectory_",
}  # fmt: skip
NO_CODE = {"__version__", "merging", "Loss", "Model"}  # a string, a module, type aliases

PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (cost_mtl, merging)
    for name in module.__all__
    if name not in NO_CODE
}


def examples(thing):
    """The doctests of a class (its methods too) or function, under the names that its users import."""
    globs = {name: getattr(merging, name) for name in merging.__all__}
    if not thing.__module__.startswith("cost_mtl.merging"):
        globs |= {name: getattr(cost_mtl, name) for name in cost_mtl.__all__}
    globs |= {"torch": torch, "nn": nn, "cost_mtl": cost_mtl, "save_file": save_file}
    found = doctest.DocTestFinder().find(thing, thing.__name__, globs=globs)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_runs(name, tmp_path, monkeypatch):
    tests = examples(PUBLIC[name])
    if name.rpartition(".")[2] not in EXEMPT:
        assert tests, f"{name} has no example in its docstring"
    monkeypatch.chdir(tmp_path)
    lines = []
    for test in tests:
        torch.manual_seed(0)
        doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=lines.append)
    assert not lines, "".join(lines)


def test_exempt_names_are_public():
    assert {name.rpartition(".")[2] for name in PUBLIC} >= EXEMPT

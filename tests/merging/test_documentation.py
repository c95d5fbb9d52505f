"""What docs/merging.md and the README show of merging is run, and the names and options that it mentions exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import cost_mtl.merging
from cost_mtl.merging.cli import _parser

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "merging.md"


def blocks(language, page=PAGE):
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def test_the_python_example_runs():
    (example,) = blocks("python")
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    assert isinstance(names["final"], nn.Sequential)
    assert names["report"].best <= names["report"].starts[0]


def test_the_readme_example_runs(mlp, perturb):
    (example,) = [text for text in blocks("python", ROOT / "README.md") if "cost_mtl.merging" in text]
    names: dict[str, object] = {"base": mlp, "task_1": perturb(mlp, 1), "task_2": perturb(mlp, 2)}
    exec(compile(example, "README.md", "exec"), names)
    for name, value in names["merged"].named_parameters():
        base, one, two = (dict(names[model].named_parameters())[name] for model in ("base", "task_1", "task_2"))
        torch.testing.assert_close(value, base + 0.3 * ((one - base) + (two - base)))
    (command,) = re.findall(r"`cost-mtl (merge .*?)`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert _parser().parse_args(command.split()).scale == 0.3


def test_the_commands_are_understood():
    commands = [line.split("#")[0].split() for text in blocks("") for line in text.splitlines() if "cost-mtl" in line]
    merges = [words[1:] for words in commands if "--help" not in words]
    assert len(merges) == 2
    for words in merges:
        assert _parser().parse_args(words).scale == 0.3


@pytest.mark.parametrize("name", cost_mtl.merging.__all__)
def test_public_names_exist_and_are_documented(name):
    thing = getattr(cost_mtl.merging, name)
    if callable(thing) and hasattr(thing, "__module__") and thing.__module__.startswith("cost_mtl"):
        assert thing.__doc__

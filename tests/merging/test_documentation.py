"""What docs/merging.md shows is run, and the names and options that it mentions exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import cost_mtl.merging
from cost_mtl.merging.cli import _parser

PAGE = Path(__file__).parents[2] / "docs" / "merging.md"


def blocks(language):
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in fences if name == language]


def test_the_python_example_runs():
    (example,) = blocks("python")
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    assert isinstance(names["final"], nn.Sequential)
    assert names["report"].best <= names["report"].starts[0]


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

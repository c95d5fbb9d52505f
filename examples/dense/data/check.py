"""The integrity check that runs before training: names the first bad file in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dense.data.layout import Split, field_shape, load_array
from dense.errors import UserError
from dense.spec import DenseSpec

__all__ = ["CheckLevel", "check_array", "check_labels", "check_split"]

CheckLevel = Literal["full", "headers", "off"]


def check_split(split: Split, spec: DenseSpec, level: CheckLevel = "full", *, progress: bool = True) -> None:
    """Check every file of ``split``.

    ``"headers"`` opens each file: type, shape and length are right (no pixel is read: under a second for NYUv2).
    ``"full"`` reads every value as well: labels are whole numbers in [-1, classes), depths finite and not negative,
    normals inside [-1, 1], images finite. ``"off"`` does nothing.

    Raises:
        UserError: naming the first bad file.
    """
    if level == "off":
        return
    height, width = _image_size(split.path("image", split.indices[0]))
    bar = tqdm(split.indices, f"checking {split.root}", unit="image", disable=not progress, leave=False)
    for index in bar:
        for field in split.folders:
            path = split.path(field, index)
            array = load_array(path)
            _check_header(path, array, field_shape(field, height, width))
            if level == "full":
                check_array(path, array, field, spec.classes)


def _image_size(path: Path) -> tuple[int, int]:
    """Height and width of the split's first image, which all its files must have."""
    shape = load_array(path).shape
    if len(shape) != 3 or not all(shape):
        raise UserError(f"{path}: expected an image of shape H x W x 3, got {shape}")
    if shape[0] % 32 or shape[1] % 32:
        raise UserError(f"{path}: {shape[0]}x{shape[1]}, the model needs multiples of 32")
    return shape[0], shape[1]


def _check_header(path: Path, array: NDArray[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype.kind not in "fiu":
        raise UserError(f"{path}: expected numbers, got dtype {array.dtype}")
    if array.shape not in (shape, (*shape, 1)):
        raise UserError(f"{path}: expected shape {shape}, got {array.shape}")


def check_array(path: Path, array: NDArray[np.generic], field: str, classes: int) -> None:
    """Check the values of one file.

    Raises:
        UserError: naming the file, what was expected and what was found.
    """
    values = np.asarray(array, dtype=np.float32)
    if not np.isfinite(values).all():
        raise UserError(f"{path}: NaN or infinite values")
    low, high = float(values.min()), float(values.max())
    if field == "segmentation":
        check_labels(path, values, classes)
    elif field == "depth" and low < 0:
        raise UserError(f"{path}: expected depth >= 0 (0 is invalid), got {low:g}")
    elif field == "normal" and (low < -1.01 or high > 1.01):
        raise UserError(f"{path}: expected normals in [-1, 1], got [{low:g}, {high:g}]")


def check_labels(path: Path, labels: NDArray[np.generic], classes: int) -> None:
    """Labels are whole numbers from -1 (void) to classes - 1.

    Raises:
        UserError: otherwise.
    """
    low, high = float(labels.min()), float(labels.max())
    if low < -1 or high > classes - 1:
        raise UserError(f"{path}: expected labels from -1 (void) to {classes - 1}, got {low:g} to {high:g}")
    if not np.array_equal(labels, np.floor(labels)):
        raise UserError(f"{path}: expected whole numbers as labels, got fractions")

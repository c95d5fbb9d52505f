"""Converts the labelled NYU Depth v2 file (``nyu_depth_v2_labeled.mat``, HDF5) to MTAN's layout.

What it needs, all from the data set's site or its toolbox:

- ``nyu_depth_v2_labeled.mat``: images, depths, labels (894 names);
- ``splits.mat``: the official 795 training and 654 test images (here: train and val);
- ``classMapping40.mat``: 894 names -> 40 classes (Gupta et al.). The step from 40 to 13 classes is built in.

The result has MTAN's format and classes, but not MTAN's bits: its authors published files, not the script that made
them; resampling, the depth variant and above all the normals differ. Compare within one preparation only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

from dense.data.layout import load_array, save_array, whole_folder
from dense.data.normals import NYU_CAMERA, normals_from_depth
from dense.errors import UserError
from dense.spec import NYUV2

__all__ = ["CLASS_40_TO_13", "NyuSources", "prepare_nyuv2"]

CLASS_40_TO_13 = (
    12, 5, 6, 1, 4, 9, 10, 12, 13, 6, 8, 6, 13, 10, 6, 13, 6, 7, 7, 5, 7, 3, 2, 6, 11, 7, 7, 7, 7, 7, 7, 6, 7, 7, 7, 7,
    7, 7, 6, 7,
)  # fmt: skip
"""Class 1..13 of the classes 1..40 (class13Mapping.mat of the SceneNet/NYUv2 meta-data, Handa et al.)."""


@dataclass(frozen=True)
class NyuSources:
    """Input files and choices.

    Attributes:
        mat: ``nyu_depth_v2_labeled.mat``.
        splits: ``splits.mat`` with ``trainNdxs`` and ``testNdxs``.
        classes: ``classMapping40.mat`` with ``mapClass``.
        normals: folder with ``{n}.npy`` [H, W, 3], n = 1..1449 the number of the image in the .mat file, all-zero where
            invalid; None: computed from the depth and the camera.
        depth: ``"raw"`` keeps the sensor's holes as 0 (invalid); ``"filled"`` takes the toolbox's inpainted depth.
        size: height and width written.
    """

    mat: Path
    splits: Path
    classes: Path
    normals: Path | None = None
    depth: str = "raw"
    size: tuple[int, int] = NYUV2.size

    def __post_init__(self) -> None:
        if self.depth not in ("raw", "filled"):
            raise UserError(f"depth: expected 'raw' or 'filled', got {self.depth!r}")
        for path in (self.mat, self.splits, self.classes):
            if not path.is_file():
                raise UserError(f"{path}: no such file")
        if self.normals is not None and not self.normals.is_dir():
            raise UserError(f"{self.normals}: no such folder")


def prepare_nyuv2(sources: NyuSources, out: Path, *, progress: bool = True) -> Path:
    """Write ``out/{train,val}/{image,label,depth,normal}/{i}.npy``.

    Raises:
        UserError: for a file that is missing, is not what it should be, or an ``out`` that exists.
    """
    if out.exists():
        raise UserError(f"{out}: exists already; remove it or choose another folder")
    import h5py

    numbers = _read_splits(sources.splits)
    lookup = _class_lookup(sources.classes)
    try:
        file = h5py.File(sources.mat, "r")
    except OSError as error:
        raise UserError(f"{sources.mat}: truncated or not an HDF5 file ({error})") from None
    with file, whole_folder(out) as folder:
        arrays = {name: _field(file, name, sources.mat) for name in ("images", "labels", _depth_name(sources.depth))}
        jobs = [(split, i, number) for split, picked in numbers.items() for i, number in enumerate(picked)]
        for split, i, number in tqdm(jobs, "NYUv2", unit="image", disable=not progress):
            _convert_one(arrays, sources, lookup, number - 1, folder / split, i)
    return out


def _convert_one(
    arrays: dict[str, Any], sources: NyuSources, lookup: NDArray[np.int64], row: int, base: Path, i: int
) -> None:
    # MATLAB's H x W x C x N arrives as N x C x W x H.
    try:
        image = np.transpose(arrays["images"][row], (2, 1, 0))
        raw_label = np.transpose(arrays["labels"][row]).astype(np.int64)
        depth = np.transpose(arrays[_depth_name(sources.depth)][row]).astype(np.float64)
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{sources.mat}: image {row + 1} cannot be read ({error})") from None
    if raw_label.max() >= lookup.size:
        raise UserError(f"{sources.mat}: label {raw_label.max()} in image {row + 1}, names go to {lookup.size - 1}")
    height, width = sources.size
    rows, columns = _nearest_rows(depth.shape[0], height), _nearest_rows(depth.shape[1], width)
    nearest = (rows[:, None], columns)
    small_depth = depth[nearest]
    resized = Image.fromarray(image).resize((width, height), Image.Resampling.BILINEAR)
    save_array(base / "image" / f"{i}.npy", np.asarray(resized, np.float32) / 255)
    save_array(base / "label" / f"{i}.npy", lookup[raw_label[nearest]].astype(np.float32))
    save_array(base / "depth" / f"{i}.npy", small_depth[..., None].astype(np.float32))
    if sources.normals is None:
        normal = normals_from_depth(small_depth, NYU_CAMERA, rows=rows, columns=columns)
    else:
        normal = _given_normals(sources.normals / f"{row + 1}.npy", height, width)
    save_array(base / "normal" / f"{i}.npy", normal.astype(np.float32))


def _given_normals(path: Path, height: int, width: int) -> NDArray[np.floating]:
    given = np.asarray(load_array(path), np.float32)
    if given.ndim != 3 or given.shape[2] != 3:
        raise UserError(f"{path}: expected [H, W, 3], got {given.shape}")
    return given[_nearest_rows(given.shape[0], height)[:, None], _nearest_rows(given.shape[1], width)]


def _depth_name(depth: str) -> str:
    return "rawDepths" if depth == "raw" else "depths"


def _field(file: Any, name: str, path: Path) -> Any:
    if name not in file:
        raise UserError(f"{path}: no field '{name}'; expected nyu_depth_v2_labeled.mat of the data set's site")
    return file[name]


def _nearest_rows(source: int, target: int) -> NDArray[np.int64]:
    """Source index whose pixel centre is nearest to each target pixel's centre."""
    return np.minimum(((np.arange(target) + 0.5) * source / target).astype(np.int64), source - 1)


def _load_mat(path: Path, *names: str) -> list[NDArray[np.int64]]:
    from scipy.io import loadmat

    try:
        content = loadmat(path)
    except (ValueError, OSError, NotImplementedError, TypeError) as error:
        raise UserError(f"{path}: not a MATLAB 5 file ({error})") from None
    if missing := [name for name in names if name not in content]:
        raise UserError(f"{path}: no field '{missing[0]}'")
    return [np.asarray(content[name]).astype(np.int64).ravel() for name in names]


def _read_splits(path: Path) -> dict[str, NDArray[np.int64]]:
    train, test = _load_mat(path, "trainNdxs", "testNdxs")
    return {"train": train, "val": test}


def _class_lookup(path: Path) -> NDArray[np.int64]:
    """Name id 0..894 -> class 0..12, or -1 for unlabelled (0)."""
    (to_40,) = _load_mat(path, "mapClass")
    if to_40.min() < 1 or to_40.max() > 40:
        raise UserError(f"{path}: expected classes 1 to 40 in 'mapClass', got {to_40.min()} to {to_40.max()}")
    return np.concatenate([[-1], np.asarray(CLASS_40_TO_13)[to_40 - 1] - 1])

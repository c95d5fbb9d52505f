"""Converts CityScapes' official folders (leftImg8bit, gtFine, disparity) to MTAN's layout at 128 x 256.

``depth`` is the disparity in pixels of the full-size image over 256, 0 where the matcher found none: its largest value,
126/256 = 0.4922, is that of MTAN's files, whose script was never published; resampling may differ from theirs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from dense.data.layout import save_array, whole_folder
from dense.errors import UserError
from dense.spec import CITYSCAPES

__all__ = ["LABEL_TO_7", "LABEL_TO_19", "disparity_values", "prepare_cityscapes"]

# CityScapes' label ids 0..33; the categories are flat, construction, object, nature, sky, human, vehicle; the 19 are
# the "train ids" of its benchmark. -1: void (category 0), or not evaluated.
LABEL_TO_7 = (
    -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6,
)  # fmt: skip
LABEL_TO_19 = (
    -1, -1, -1, -1, -1, -1, -1, 0, 1, -1, -1, 2, 3, 4, -1, -1, -1, 5, -1, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -1, -1,
    16, 17, 18,
)  # fmt: skip


def prepare_cityscapes(
    source: Path, out: Path, *, size: tuple[int, int] = CITYSCAPES.size, progress: bool = True
) -> Path:
    """Write ``out/{train,val}/{image,label_7,label_19,depth}/{i}.npy`` from the folders below ``source``.

    The images are numbered in the alphabetical order of ``city/name``.

    Raises:
        UserError: for a missing folder or file, a damaged image, a label id above 33, or an ``out`` that exists.
    """
    if out.exists():
        raise UserError(f"{out}: exists already; remove it or choose another folder")
    jobs = []
    for split in ("train", "val"):
        folder = source / "leftImg8bit" / split
        if not folder.is_dir():
            raise UserError(f"{folder}: missing folder; {source} must hold leftImg8bit, gtFine and disparity")
        images = sorted(folder.glob("*/*_leftImg8bit.png"))
        if not images:
            raise UserError(f"{folder}: no */*_leftImg8bit.png in it")
        jobs += [(split, i, path) for i, path in enumerate(images)]
    with whole_folder(out) as folder:
        for split, i, path in tqdm(jobs, "CityScapes", unit="image", disable=not progress):
            _convert_one(source, path, split, size, folder / split, i)
    return out


def _convert_one(source: Path, image_path: Path, split: str, size: tuple[int, int], base: Path, i: int) -> None:
    city, stem = image_path.parent.name, image_path.name.removesuffix("_leftImg8bit.png")
    height, width = size
    label_path = source / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png"
    image = _read(image_path).convert("RGB").resize((width, height), Image.Resampling.BOX)
    ids = np.asarray(_read(label_path).resize((width, height), Image.Resampling.NEAREST)).astype(np.int64)
    if ids.max() >= len(LABEL_TO_7):
        raise UserError(f"{label_path}: label id {ids.max()}, CityScapes' end at {len(LABEL_TO_7) - 1}")
    disparity = _read(source / "disparity" / split / city / f"{stem}_disparity.png")
    coded = np.asarray(disparity.resize((width, height), Image.Resampling.NEAREST))
    save_array(base / "image" / f"{i}.npy", np.asarray(image, np.float32) / 255)
    save_array(base / "label_7" / f"{i}.npy", np.asarray(LABEL_TO_7, np.float32)[ids])
    save_array(base / "label_19" / f"{i}.npy", np.asarray(LABEL_TO_19, np.float32)[ids])
    save_array(base / "depth" / f"{i}.npy", disparity_values(coded)[..., None])


def disparity_values(coded: NDArray[np.generic]) -> NDArray[np.float32]:
    """The PNG's 16-bit code p is 0 for "invalid", else disparity = (p - 1)/256 px; returns disparity/256."""
    code = coded.astype(np.float32)
    return np.where(code > 0, (code - 1) / 256 / 256, 0).astype(np.float32)


def _read(path: Path) -> Image.Image:
    try:
        image = Image.open(path)
        image.load()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path}: truncated or not an image ({error})") from None
    return image

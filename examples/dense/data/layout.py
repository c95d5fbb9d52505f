"""Finds and opens the ``.npy`` files of one split; every complaint names the first bad path."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dense.errors import UserError
from dense.spec import DenseSpec

__all__ = ["Split", "field_shape", "load_array", "open_split", "save_array", "whole_folder"]

_CHANNELS = {"image": 3, "depth": 1, "normal": 3}


@dataclass(frozen=True)
class Split:
    """One split on disk.

    Attributes:
        root: ``root/train`` or ``root/val``.
        folders: field (``"image"`` or a task) -> its folder.
        indices: the numbers i of the files ``{i}.npy``, ascending, the same in every folder.
    """

    root: Path
    folders: Mapping[str, Path]
    indices: tuple[int, ...]

    def path(self, field: str, index: int) -> Path:
        """File of ``field`` for the image ``index``."""
        return self.folders[field] / f"{index}.npy"


def field_shape(field: str, height: int, width: int) -> tuple[int, ...]:
    """Shape on disk: H x W for labels, H x W x C for everything else."""
    return (height, width, _CHANNELS[field]) if field in _CHANNELS else (height, width)


def load_array(path: Path) -> NDArray[np.generic]:
    """Memory-map ``path``: only the pages that are read come from the disk.

    Raises:
        UserError: if the file is missing, is no ``.npy`` file or is shorter than its header says.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{path}: truncated or not a .npy file ({' '.join(str(error).split())})") from None
    if not isinstance(array, np.ndarray):  # np.load goes by the content, whatever the name says
        array.close()
        raise UserError(f"{path}: a zip archive of arrays (.npz), not a .npy file")
    return array


def save_array(path: Path, array: NDArray[np.generic]) -> None:
    """Write ``array`` as ``.npy``, making the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array, allow_pickle=False)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """An empty folder beside ``out`` to write into, which becomes ``out`` at the end of the block.

    Whatever ends the block earlier removes it, so that ``out`` is there completely or not at all. Each call has a
    folder of its own: two programs that make the same set at the same time do not write into each other's.

    Raises:
        UserError: if another program has made ``out`` meanwhile.
    """
    partial = out.with_name(f"{out.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        try:
            partial.rename(out)
        except OSError:
            raise UserError(f"{out}: made by another program meanwhile; the same command again uses it") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_split(root: Path, spec: DenseSpec, split: str) -> Split:
    """List the files of ``root/split`` and check that every folder holds the same numbers.

    Raises:
        UserError: for a missing root, split, folder or file.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; expected {spec.name} as {root}/{{train,val}}/image/0.npy and so on")
    base = root / split
    if not base.is_dir():
        raise UserError(f"{base}: missing folder; {root} must hold 'train' and 'val'")
    folders = {"image": _folder(base, ("image",))}
    for task in spec.tasks:
        folders[task] = _folder(base, spec.label_folders if task == "segmentation" else (task,))
    indices = _numbers(folders["image"])
    for folder in folders.values():
        _same_numbers(folder, indices, folders["image"])
    return Split(base, folders, tuple(sorted(indices)))


def _folder(base: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if (base / name).is_dir():
            return base / name
    raise UserError(f"{base / names[0]}: missing folder" + (f" (or '{names[1]}')" if len(names) > 1 else ""))


def _numbers(folder: Path) -> set[int]:
    numbers = {int(path.stem) for path in folder.glob("*.npy") if path.stem.isdigit()}
    if not numbers:
        raise UserError(f"{folder}: no files named 0.npy, 1.npy, ...")
    return numbers


def _same_numbers(folder: Path, indices: set[int], reference: Path) -> None:
    here = _numbers(folder)
    if missing := indices - here:
        raise UserError(f"{folder / f'{min(missing)}.npy'}: missing ({len(missing)} of {len(indices)} files are)")
    if surplus := here - indices:
        raise UserError(f"{reference / f'{min(surplus)}.npy'}: missing, although {folder} has this number")

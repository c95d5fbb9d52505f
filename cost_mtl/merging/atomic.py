"""Output that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_folder", "atomic_path", "check_output"]


def check_output(path: Path, overwrite: bool) -> None:
    """Raises before any work is done when the output can't be put there."""
    if path.exists() and not overwrite and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(
            f"out: {path} exists; choose another path, or replace it on purpose (overwrite=True, --overwrite)"
        )
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"out: the folder {path.absolute().parent} does not exist")


@contextmanager
def atomic_path(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary path beside ``path``; what was written there takes its place when the body ends without error.

    On any error, and on Ctrl-C, nothing is left of it and an earlier file is untouched. A symbolic link is followed.
    """
    path = path.resolve()
    check_output(path, overwrite)
    if path.is_dir():
        raise IsADirectoryError(f"out: expected a file, {path} is a folder")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.absolute().parent)
    os.close(handle)
    staging = Path(name)
    try:
        yield staging
        _readable(staging, 0o666)
        _sync(staging)
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """The same for a whole folder. An earlier folder is moved aside first, and comes back if the move fails."""
    path = path.resolve()
    check_output(path, overwrite)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"out: expected a folder, {path} is a file")
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.absolute().parent))
    try:
        yield staging
        for file in staging.iterdir():
            _readable(file, 0o666)
            _sync(file)
        _readable(staging, 0o777)
        _swap_in(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _swap_in(staging: Path, path: Path) -> None:
    if not path.exists() or not any(path.iterdir()):
        os.replace(staging, path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.absolute().parent))
    try:
        os.replace(path, aside)
    except BaseException:  # a mount point, say
        aside.rmdir()
        raise
    try:
        os.replace(staging, path)
    except BaseException:
        os.replace(aside, path)
        raise
    shutil.rmtree(aside)


def _readable(path: Path, mode: int) -> None:
    # Temporary files are the owner's alone; the output gets what the umask allows, like any other file.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(mode & ~mask)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())

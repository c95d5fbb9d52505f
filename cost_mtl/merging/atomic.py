"""Output that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["atomic_folder", "atomic_path"]


@contextmanager
def atomic_path(path: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A temporary path beside ``path``; what was written there takes its place when the body ends without error.

    On any error, and on Ctrl-C, nothing is left of it and an earlier file is untouched. A symbolic link is followed.

    Args:
        path: where to.
        check: raises where ``path`` must not be written to; called first, and again just before the move.
    """
    path = Path(os.path.realpath(path))  # of a loop of links it makes something that does not exist
    check()
    if path.is_dir():
        raise IsADirectoryError(f"out: expected a file, {path} is a folder")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    staging = Path(name)
    try:
        yield staging
        _readable(staging, 0o666)
        _sync(staging)
        check()
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: Path, check: Callable[[], None]) -> Iterator[Path]:
    """The same for a whole folder. An earlier folder is moved aside, and removed when the new one is in its place."""
    path = Path(os.path.realpath(path))  # of a loop of links it makes something that does not exist
    check()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"out: expected a folder, {path} is a file")
    staging = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
    try:
        yield staging
        for file in staging.iterdir():
            _readable(file, 0o666)
            _sync(file)
        _readable(staging, 0o777)
        check()
        _swap_in(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _swap_in(staging: Path, path: Path) -> None:
    if not path.exists() or not any(path.iterdir()):
        os.replace(staging, path)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    try:
        os.replace(path, aside)
        os.replace(staging, path)
    except BaseException:  # for example a mount point, or a signal between any two of these lines
        _swap_back(staging, path, aside)
        raise
    try:
        shutil.rmtree(aside)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _swap_back(staging: Path, path: Path, aside: Path) -> None:
    if not any(aside.iterdir()):
        aside.rmdir()  # nothing was moved yet
        return
    if path.exists():
        os.replace(path, staging)
    os.replace(aside, path)


def _readable(path: Path, mode: int) -> None:
    # Temporary files are the owner's alone; the output gets what the umask allows, like any other file.
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(mode & ~mask)


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())

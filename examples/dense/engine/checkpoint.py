"""Atomic checkpoints of everything that a run's future depends on, and the random streams."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dense.errors import UserError

__all__ = ["load_checkpoint", "restore_rng", "rng_state", "save_checkpoint", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's streams (CUDA included)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """All random streams as tensors and plain containers (what ``torch.load(weights_only=True)`` takes)."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": [version, list(words), gauss],
        "numpy": {
            "key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "pos": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Put every stream where :func:`rng_state` found it."""
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    saved = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": saved["key"].numpy().astype(np.uint32), "pos": saved["pos"]},
            "has_gauss": saved["has_gauss"],
            "gauss": saved["gauss"],
        }
    )


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write next to ``path``, flush to the disk, then rename: a kill leaves the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def load_checkpoint(path: Path, device: str) -> dict[str, Any]:
    """Read a checkpoint; tensors come to ``device``, the random streams stay on the CPU.

    Raises:
        UserError: if the file is damaged.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several types for damaged files (zip, pickle, runtime)
        raise UserError(f"{path}: damaged checkpoint ({type(error).__name__}); remove it to start over") from None
    content["model"] = {key: value.to(device) for key, value in content["model"].items()}
    return content

"""Randomness that depends on (seed, step) alone: the same on every process and after a resume, never the user's."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["keyed_generator"]


def keyed_generator(seed: int, step: int, device: torch.device | None = None) -> torch.Generator:
    """A fresh generator for one step. On the CPU unless told otherwise: the draws then do not depend on the device."""
    mixed = int(np.random.SeedSequence((abs(seed), int(seed < 0), step)).generate_state(1, np.uint64)[0])
    return torch.Generator(device or torch.device("cpu")).manual_seed(mixed >> 1)

"""Warnings that point at the user's line, whatever stands between: a scheduler's wrapper, hooks, compiled code."""

from __future__ import annotations

import sys
import warnings

INSIDE = ("cost_mtl", "torch", "contextlib", "functools", "accelerate", "lightning", "lightning_fabric",
          "pytorch_lightning")  # fmt: skip
"""Packages whose frames are not the user's."""


def warn(message: str) -> None:
    """A UserWarning at the first line outside of :data:`INSIDE`."""
    warnings.warn(message, stacklevel=_level())


def _level() -> int:
    """``stacklevel`` for a warning that is made by the function which calls this one."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in INSIDE:
        level, frame = level + 1, frame.f_back
    return level

"""The arrays that the solvers compute with: NumPy, float64 (but for what _rounding.py makes), on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["EPS", "Array", "add_diagonal"]

Array = NDArray[np.floating[Any]]

EPS = float(np.finfo(np.float64).eps)


def add_diagonal(A: Array, x: Array | float) -> Array:
    """A + diag(x), a new array."""
    H: Array = A.copy()
    H.reshape(-1)[:: len(A) + 1] += x
    return H

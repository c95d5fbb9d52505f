"""One way to write a solver for two kinds of arrays: NumPy on the host, torch on the device.

The solvers of this folder use what NumPy arrays and torch tensors have in common (arithmetic, ``@``, ``**``, ``sum``,
``max``, ``min``, ``clip``) and take the rest from one of the two namespaces below. On the host they stop as soon as
they are done. On the device nothing may be read back, so ``stop`` is always False there and the number of iterations is
fixed, whatever the numbers are: the work can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

__all__ = ["HOST", "Array", "Arrays", "device_arrays"]

Array = Any
"""A float64 NumPy array or torch tensor; scalars are NumPy scalars or tensors of shape []."""


class Arrays(Protocol):
    """What the solvers need beyond the methods that both kinds of arrays share."""

    on_host: bool

    def where(self, condition: Array, x: Array, y: Array) -> Array: ...
    def log(self, x: Array) -> Array: ...

    def at_least(self, x: Array, bound: Array) -> Array:
        """max(x, bound), elementwise; the bound is a number or an array."""
        ...

    def at_most(self, x: Array, bound: Array) -> Array:
        """min(x, bound), likewise."""
        ...

    def pick(self, condition: Array, x: Array, y: Array) -> Array:
        """``where`` for one condition [] that decides between whole arrays."""
        ...

    def scalar(self, x: float) -> Array:
        """The number as a scalar of this kind."""
        ...

    def add_diagonal(self, A: Array, x: Array) -> Array:
        """A + diag(x), a new array."""
        ...

    def columns(self, x: Array, y: Array) -> Array:
        """[K, 2]"""
        ...

    def solver(self, H: Array) -> Callable[[Array], Array]:
        """b -> H^-1 b, for b [K] or [K, n] and a symmetric positive definite H; NaN where H is singular after all."""
        ...

    def stop(self, condition: Array) -> bool:
        """Whether an iteration may end here: never, where finding out would wait for the device."""
        ...


class _Host:
    on_host = True
    where = staticmethod(np.where)
    log = staticmethod(np.log)
    at_least = staticmethod(np.maximum)
    at_most = staticmethod(np.minimum)

    def pick(self, condition: Array, x: Array, y: Array) -> Array:
        return x if condition else y

    def scalar(self, x: float) -> Array:
        return np.float64(x)

    def add_diagonal(self, A: Array, x: Array) -> Array:
        H = A.copy()
        H.reshape(-1)[:: len(A) + 1] += x
        return H

    def columns(self, x: Array, y: Array) -> Array:
        both = np.empty((len(x), 2))
        both[:, 0], both[:, 1] = x, y
        return both

    def solver(self, H: Array) -> Callable[[Array], Array]:
        def solve(b: Array) -> Array:
            # NumPy has no factorisation to keep, but for these sizes a new one costs less than the inverse.
            try:
                return np.linalg.solve(H, b)
            except np.linalg.LinAlgError:  # the callers keep their best iterate and report how good it is
                return b * math.nan

        return solve

    def stop(self, condition: Array) -> bool:
        return bool(condition)


HOST: Arrays = _Host()


class _Device:
    on_host = False
    log = staticmethod(torch.log)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        # Two Python numbers would make a tensor of torch's default dtype.
        return torch.where(condition, self.scalar(x) if isinstance(x, float) else x, y)

    pick = where

    def scalar(self, x: float) -> Array:
        return torch.full((), x, dtype=torch.float64, device=self._device)  # a fill, not a copy from the host

    def at_least(self, x: Array, bound: Array) -> Array:
        return x.clamp(min=bound)

    def at_most(self, x: Array, bound: Array) -> Array:
        return x.clamp(max=bound)

    def add_diagonal(self, A: Array, x: Array) -> Array:
        return A + torch.diag(x)

    def columns(self, x: Array, y: Array) -> Array:
        return torch.stack((x, y), dim=1)

    def solver(self, H: Array) -> Callable[[Array], Array]:
        # `info` stays on the device unread: NaN says the same.
        lower, info = torch.linalg.cholesky_ex(H)
        failed = torch.where(info > 0, math.nan, 0.0)

        def solve(b: Array) -> Array:
            right = b if b.dim() == 2 else b.unsqueeze(1)
            return torch.cholesky_solve(right, lower).reshape(b.shape) + failed

        return solve

    def stop(self, condition: Array) -> bool:
        return False


def device_arrays(device: torch.device) -> Arrays:
    """The namespace for tensors on ``device``; CPU tensors work too, which is how the tests look for host reads."""
    return _Device(device)

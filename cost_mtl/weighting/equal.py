"""Linear scalarisation: fixed weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["EqualWeighting"]


@dataclass(frozen=True)
class EqualWeighting:
    """Linear scalarisation (LS): the sum of the task losses, or a fixed weighted sum of them.

    Args:
        weights: K finite, non-negative numbers, one per task; None (default) stands for all ones, the sum that every
            paper's "LS" row minimises.

    Raises:
        ValueError: a weight is negative or not finite, or their number is not K at the first call.
    """

    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        if isinstance(self.weights, Mapping | str):
            raise ValueError(f"weights must be a sequence of numbers in the order of the tasks; got {self.weights}")
        values = tuple(float(w) for w in self.weights)
        if not values or any(not math.isfinite(w) or w < 0 for w in values):
            raise ValueError(f"weights must be finite and non-negative, one per task; got {self.weights}")
        object.__setattr__(self, "weights", values)

    def __call__(self, gramian: Tensor) -> Tensor:
        """Weights [K] for the Gramian [K, K], of which only the shape, dtype and device are looked at."""
        num_tasks = gramian.shape[0]
        if self.weights is None:
            return torch.ones(num_tasks, dtype=gramian.dtype, device=gramian.device)
        if len(self.weights) != num_tasks:
            raise ValueError(f"weights has {len(self.weights)} entries, but there are {num_tasks} tasks")
        return torch.tensor(self.weights, dtype=gramian.dtype, device="cpu").to(gramian.device, non_blocking=True)

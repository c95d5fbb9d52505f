"""Dynamic weight averaging."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cost_mtl.base import State, Weighed, WeightingInputs

__all__ = ["DWA"]


@dataclass(frozen=True)
class DWA:
    """Dynamic weight averaging (Liu, Johns & Davison, MTAN, CVPR 2019, arXiv 1803.10704, Eqn 7).

    w = K softmax(r / T) with r_i = L_i(t - 1) / L_i(t - 2), the ratio of the mean losses of the last two epochs: a task
    whose loss falls slowly gets more weight. Ones during the first two epochs.

    Its state is the sum of the losses in the current epoch and their means in the two before.

    Args:
        steps_per_epoch: optimizer steps over which the losses are averaged (``len(loader)``).
        temperature: T > 0; 2 (default) is the paper's. Large: equal weights.

    Raises:
        ValueError: a setting is out of range.
    """

    steps_per_epoch: int
    temperature: float = 2.0

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, got {self.steps_per_epoch!r}")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be positive and finite, got {self.temperature!r}")

    def initial_state(self, num_tasks: int) -> State:
        return {"epoch": 0, "total": None, "count": 0, "last": None, "before_last": None}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K] from the losses of the epochs before; the current ones are added to the state."""
        losses = inputs.losses.detach().to(torch.float64)
        epoch, total, count = inputs.step // self.steps_per_epoch, state["total"], state["count"]
        last, before_last = state["last"], state["before_last"]
        if epoch != state["epoch"] and count > 0:
            last, before_last = total / count, last
            total, count = None, 0
        new: State = {
            "epoch": epoch,
            "total": losses.clone() if total is None else total.to(losses.device) + losses,
            "count": count + 1,
            "last": last,
            "before_last": before_last,
        }
        if before_last is None:
            w = torch.ones_like(losses)
        else:
            last, before_last = last.to(losses.device), before_last.to(losses.device)
            # A task that had no labels for an epoch has a mean loss of 0: no rate is known, so 1.
            ratio = torch.where(before_last == 0, 1.0, last / before_last)
            w = len(losses) * torch.softmax(ratio / self.temperature, 0)
        return Weighed(w.to(inputs.gramian.device, inputs.gramian.dtype), new)

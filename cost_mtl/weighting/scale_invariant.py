"""Scale-invariant linear scalarisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._checks import check_positive

__all__ = ["ScaleInvariant"]


@dataclass(frozen=True)
class ScaleInvariant:
    """The sum of the logarithms of the losses ("SI" in the papers' tables): w_i = 1 / L_i.

    Multiplying a loss by a constant changes nothing. A task whose loss is exactly 0 (no labels in this batch) gets
    weight 0.

    Raises:
        ValueError: a loss is negative (on the CPU; on a GPU, where looking would wait for the device, its weight is
            NaN).
    """

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K] from the losses [K]."""
        losses = inputs.losses.detach()
        check_positive(losses, "ScaleInvariant", "takes the logarithm of the losses")
        w = torch.where(losses > 0, 1 / losses, torch.where(losses == 0, 0.0, torch.nan))
        return Weighed(w.to(inputs.gramian.device, inputs.gramian.dtype), state)

"""Scale-invariant linear scalarisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
        ValueError: in a step, before parameters move: a loss is negative.

    Example:
        >>> from cost_mtl.base import WeightingInputs
        >>> weighting = ScaleInvariant()
        >>> losses, G = torch.tensor([1.0, 4.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0]])
        >>> inputs = WeightingInputs(cost_mtl.gramian(G), losses, G, step=0)
        >>> weighting.weigh(inputs, weighting.initial_state(2)).weights
        tensor([1.0000, 0.2500])
    """

    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K] from the losses [K]."""
        losses = inputs.losses.detach()
        check_positive(losses, inputs.names, "ScaleInvariant", "takes the logarithm of the losses")
        w = torch.where(losses > 0, 1 / losses, 0.0)
        return Weighed(w.to(inputs.gramian.device, inputs.gramian.dtype), state)

"""GradDrop: per element of the gradient, the tasks of one sign take it all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cost_mtl._validation import integer, share
from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._keyed import keyed_generator

__all__ = ["GradDrop", "drop_signs"]


@dataclass(frozen=True)
class GradDrop:
    """Gradient sign dropout (Chen et al., "Just Pick a Sign", NeurIPS 2020, arXiv 2010.06808, Algorithm 1).

    For every element j of the gradient, P_j = (1 + sum_i g_ij / sum_i |g_ij|) / 2 is the chance that the positive
    entries are kept and the negative ones dropped; otherwise the other way round. The direction is the sum of what is
    kept, and no linear combination of the rows of G; the reported weights are ones. It needs the whole gradients.

    The paper drops at the activations; here, as in later comparisons, at the shared parameters. The draws depend on
    (``seed``, step) and on the device type.

    Args:
        leak: share in [0, 1] of each dropped entry that is kept all the same; 0 (default) as in the paper.
        seed: of the draws.

    Raises:
        ValueError: ``leak`` is not in [0, 1], or ``seed`` is not an integer.

    Example:
        >>> from cost_mtl.base import WeightingInputs
        >>> weighting = GradDrop()
        >>> losses, G = torch.tensor([1.0, 4.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0]])
        >>> inputs = WeightingInputs(cost_mtl.gramian(G), losses, G, step=0)
        >>> weighting.weigh(inputs, weighting.initial_state(2)).direction[0]  # both entries of this column are positive
        tensor(4.)
    """

    leak: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        share("leak", self.leak, zero=True)
        integer("seed", self.seed)

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """The direction [m] from the gradients G [K, m]."""
        G = inputs.gradients
        generator = keyed_generator(self.seed, inputs.step, G.device)
        # A half draw would be too coarse a uniform number: float32 whatever the dtype of G.
        uniform = torch.rand(G.shape[1], generator=generator, device=G.device, dtype=torch.float32)
        weights = torch.ones(len(G), dtype=inputs.gramian.dtype, device=inputs.gramian.device)
        return Weighed(weights, state, direction=drop_signs(G, uniform, self.leak))


def drop_signs(G: Tensor, uniform: Tensor, leak: float = 0.0) -> Tensor:
    """The direction [m] from G [K, m] and numbers [m] in [0, 1). Row by row: memory O(m), not O(K m)."""
    total, absolute = torch.zeros_like(G[0]), torch.zeros_like(G[0])
    for g in G:
        part = g / len(G)  # the mean: a sum could overflow, and the quotient be NaN
        total += part
        absolute += part.abs()
    purity = (1 + torch.where(absolute > 0, total / absolute, 0.0)) / 2
    keep_positive = purity > uniform.to(purity.dtype)
    direction = torch.zeros_like(total)
    for g in G:
        kept = torch.where((g > 0) == keep_positive, g, leak * g)
        direction += kept
    return direction

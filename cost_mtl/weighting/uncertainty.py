"""Uncertainty weighting: the task weights are learnt."""

from __future__ import annotations

import torch
from torch import nn

from cost_mtl.base import State, Weighed, WeightingInputs

__all__ = ["Uncertainty"]


class Uncertainty(nn.Module):
    """Weighting by learnt task uncertainty (Kendall, Gal & Cipolla, CVPR 2018, arXiv 1705.07115).

    The objective is sum_i exp(-s_i) L_i / 2 + s_i / 2 with a learnable s_i = log sigma_i^2 per task, so the weights are
    w_i = exp(-s_i) / 2 and the gradient of s_i is (1 - exp(-s_i) L_i) / 2. The s_i are ordinary parameters: give them
    to the base optimizer with the model's, and save ``state_dict()`` with the model's. ``COST`` fills their ``.grad``::

        weighting = cost_mtl.Uncertainty(num_tasks=3)
        base = torch.optim.Adam([*model.parameters(), *weighting.parameters()], lr=1e-4)
        optimizer = cost_mtl.COST(base, model, weighting=weighting)

    The published method weights the tasks' own parameters as well: ``COST(heads="weighted")``.

    Args:
        num_tasks: K.
        log_variance: the value that every s_i starts from. 0 (default): sigma = 1, equal weights; MTAN's scripts: -0.5.

    Attributes:
        log_variances: the parameter s [K].
    """

    def __init__(self, num_tasks: int, log_variance: float = 0.0) -> None:
        super().__init__()
        if num_tasks < 1:
            raise ValueError(f"num_tasks must be at least 1, got {num_tasks!r}")
        self.log_variances = nn.Parameter(torch.full((num_tasks,), float(log_variance)))

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K], and the gradient [K] of the log-variances.

        Raises:
            ValueError: the number of losses is not ``num_tasks``.
        """
        s = self.log_variances
        if inputs.losses.shape != s.shape:
            raise ValueError(f"Uncertainty was made for {len(s)} tasks, but there are {len(inputs.losses)} losses")
        precision = torch.exp(-s.detach())
        gradient = (1 - precision * inputs.losses.detach().to(s.device, s.dtype)) / 2
        weights = (precision / 2).to(inputs.gramian.device, inputs.gramian.dtype)
        return Weighed(weights, state, parameter_grads=((s, gradient),))

"""Uncertainty weighting: the task weights are learnt."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from cost_mtl._validation import at_least, finite
from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._checks import check_positive

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

    The sum is over the tasks that are there: a task that is absent from the batch (missing from the closure's mapping,
    without a graph, or with a loss and a gradient of exactly zero) gives its s_i no gradient, and COST keeps s_i and
    the base optimizer's state of it as they are. Tasks with names take the places of s in the order in which they first
    appear (``optimizer.state_dict()["cost"]["names"]``).

    Args:
        num_tasks: K, of all tasks.
        log_variance: the value that every s_i starts from. 0 (default): sigma = 1, equal weights; MTAN's scripts: -0.5.

    Raises:
        ValueError: ``num_tasks`` is not an integer >= 1, or ``log_variance`` is not a finite number.

    Attributes:
        log_variances: the parameter s [K].

    Example:
        >>> from cost_mtl.base import WeightingInputs
        >>> weighting = Uncertainty(num_tasks=2)
        >>> losses, G = torch.tensor([1.0, 4.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0]])
        >>> inputs = WeightingInputs(cost_mtl.gramian(G), losses, G, step=0)
        >>> weighting.weigh(inputs, weighting.initial_state(2)).weights
        tensor([0.5000, 0.5000])
    """

    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True

    def __init__(self, num_tasks: int, log_variance: float = 0.0) -> None:
        super().__init__()
        at_least("num_tasks", num_tasks, 1)
        finite("log_variance", log_variance)
        self.log_variances = nn.Parameter(torch.full((num_tasks,), float(log_variance)))

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K] of the tasks that are there, and the gradient of all log-variances.

        Raises:
            ValueError: there are more tasks than ``num_tasks`` (without names: not exactly as many); a loss is
                negative, with which s would fall for ever.
        """
        s, known = self.log_variances, len(inputs.known)
        if known > len(s) or (known < len(s) and not inputs.named):
            raise ValueError(f"num_tasks: expected the number of losses, {known}, got {len(s)}: make a new Uncertainty")
        why = "takes each loss for a squared error, which has no variance to learn where it is negative"
        check_positive(inputs.losses, inputs.names, "Uncertainty", why)
        at = torch.tensor(inputs.places, device=s.device)
        precision = torch.exp(-s.detach()[at])
        gradient, absent = torch.zeros_like(s), torch.ones_like(s, dtype=torch.bool)
        gradient[at] = (1 - precision * inputs.losses.detach().to(s.device, s.dtype)) / 2
        absent[at] = False
        weights = (precision / 2).to(inputs.gramian.device, inputs.gramian.dtype)
        at_rest = ((s, absent),) if len(inputs.names) < len(s) else ()
        return Weighed(weights, state, parameter_grads=((s, gradient),), at_rest=at_rest)

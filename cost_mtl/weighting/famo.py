"""FAMO: losses fall at the same rate, for the price of one more evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._checks import check_positive

__all__ = ["FAMO"]

_BETAS = (0.9, 0.999)
_ADAM_EPSILON = 1e-8


@dataclass(frozen=True)
class FAMO:
    """Fast adaptive multitask optimization (Liu et al., NeurIPS 2023, arXiv 2306.03792, Algorithm 2).

    z = softmax(xi), w_i proportional to z_i / (L_i - b_i + eps), sum of w = 1. After the update the losses are
    evaluated again on the same batch, and the logits xi take one Adam step along the change of log(L_i - b_i + eps): a
    task whose loss fell less gains weight. That evaluation is the one exception to COST's one closure call a step.

    Its state: the logits and Adam's two moments [K], the number of their steps, and the losses of the current step. The
    published method weights the tasks' own parameters as well: ``COST(heads="weighted")``.

    Args:
        lr: of the logits. 0.025 (default) is the paper's.
        weight_decay: gamma, coupled (added to the gradient). 1e-3 (default) is the paper's; the authors' class has 1e-5
            and their scripts set it per data set.
        min_losses: lower bounds b [K] of the losses; None (default): zeros.
        epsilon: 1e-8 (default), the authors': keeps the logarithm of a loss at its bound finite.

    Raises:
        ValueError: a setting is out of range, or (on the CPU) a loss is below its bound.
    """

    lr: float = 0.025
    weight_decay: float = 1e-3
    min_losses: tuple[float, ...] | None = None
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and >= 0, got {value!r}")
        if not self.epsilon > 0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon!r}")
        if self.min_losses is not None:
            object.__setattr__(self, "min_losses", tuple(float(b) for b in self.min_losses))

    def initial_state(self, num_tasks: int) -> State:
        if self.min_losses is not None and len(self.min_losses) != num_tasks:
            raise ValueError(f"min_losses has {len(self.min_losses)} entries, but there are {num_tasks} tasks")
        zeros = torch.zeros(num_tasks, dtype=torch.float64, device="cpu")
        return {"logits": zeros, "mean": zeros.clone(), "square": zeros.clone(), "steps": 0, "losses": None}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K], sum 1, from the losses and the logits."""
        gap = self._gap(inputs.losses)
        w = torch.softmax(state["logits"].to(gap.device, non_blocking=True), 0) / gap
        w = (w / w.sum()).to(inputs.gramian.device, inputs.gramian.dtype)
        return Weighed(w, state | {"losses": inputs.losses.detach().clone()})

    def observe(self, losses_after: Tensor, state: State) -> State:
        """The state with the logits moved, from the losses [K] after the update on the same batch."""
        after = self._gap(losses_after)
        logits, mean, square = (state[key].to(after.device, non_blocking=True) for key in ("logits", "mean", "square"))
        fallen = self._gap(state["losses"]).log() - after.log()
        # A loss that is not finite after the update says nothing, and would stay in the logits for good.
        fallen = torch.where(torch.isfinite(fallen).all(), fallen, torch.zeros_like(fallen))
        z = torch.softmax(logits, 0)
        gradient = z * (fallen - (z * fallen).sum()) + self.weight_decay * logits
        steps = state["steps"] + 1
        mean = _BETAS[0] * mean + (1 - _BETAS[0]) * gradient
        square = _BETAS[1] * square + (1 - _BETAS[1]) * gradient**2
        size = (square / (1 - _BETAS[1] ** steps)).sqrt() + _ADAM_EPSILON
        logits = logits - self.lr * mean / (1 - _BETAS[0] ** steps) / size
        return {"logits": logits, "mean": mean, "square": square, "steps": steps, "losses": None}

    def _gap(self, losses: Tensor) -> Tensor:
        """L - b + eps [K], float64."""
        gap = losses.detach().to(torch.float64)
        if self.min_losses is not None:
            # Subtracted as numbers: a tensor would have to be copied to the device.
            gap = torch.stack([loss - bound for loss, bound in zip(gap, self.min_losses, strict=True)])
        check_positive(gap, "FAMO", "takes the logarithm of the losses minus their bounds")
        return gap + self.epsilon

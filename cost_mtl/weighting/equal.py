"""Linear scalarisation: fixed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._checks import numbers_of_tasks

__all__ = ["EqualWeighting"]


@dataclass(frozen=True)
class EqualWeighting:
    """Linear scalarisation (LS): the sum of the task losses, or a fixed weighted sum of them.

    The tasks' own parameters get their own loss's gradient, unweighted, unless ``COST(heads="weighted")`` says
    otherwise. A task of weight 0 trains nothing that is shared.

    Args:
        weights: None (default): all ones, the sum that every paper's "LS" row minimises. A mapping task name -> weight,
            for closures that return a mapping: ``EqualWeighting({"seg": 1.0, "depth": 0.1})``. Or K numbers in the
            order of the tasks; where the tasks have names, that is the order in which they first appear, and all have
            to be there in the first step. Finite and non-negative.

    Raises:
        ValueError: a weight is negative or not finite; in the first step that shows it, their number is not K, or a
            task has none.

    Example:
        >>> EqualWeighting()(torch.eye(3))
        tensor([1., 1., 1.])
        >>> EqualWeighting([1.0, 0.5])(torch.eye(2))
        tensor([1.0000, 0.5000])
        >>> by_name = EqualWeighting({"seg": 1.0, "depth": 0.1})  # for a closure that returns a mapping
    """

    weights: Mapping[str, float] | Sequence[float] | None = None

    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        numbers = numbers_of_tasks("weights", self.weights)
        values = list(numbers.values() if isinstance(numbers, Mapping) else numbers)
        if not values or min(values) < 0:
            raise ValueError(f"weights: expected finite numbers >= 0, one per task, got {self.weights!r}")
        object.__setattr__(self, "weights", numbers)

    def __call__(self, gramian: Tensor) -> Tensor:
        """Weights [K] for the Gramian [K, K], of which only the shape, dtype and device are looked at.

        Raises:
            ValueError: the weights go by name, and a Gramian has no names; or their number is not K.
        """
        K = gramian.shape[0]
        if isinstance(self.weights, Mapping):
            raise ValueError("weights: expected K numbers where a Gramian is all there is, got weights by task name")
        if self.weights is not None and len(self.weights) != K:
            raise ValueError(f"weights: expected one for each of the {K} tasks, got {len(self.weights)}")
        numbers = [1.0] * K if self.weights is None else list(self.weights)
        return torch.tensor(numbers, dtype=gramian.dtype, device="cpu").to(gramian.device, non_blocking=True)

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K] of the tasks that are there."""
        M = inputs.gramian
        w = torch.tensor(self._of(inputs), dtype=M.dtype, device="cpu")
        return Weighed(w.to(M.device, non_blocking=True), state)

    def _of(self, inputs: WeightingInputs) -> list[float]:
        if self.weights is None:
            return [1.0] * len(inputs.names)
        if isinstance(self.weights, Mapping):
            missing = [name for name in inputs.names if name not in self.weights]
            if missing:
                raise ValueError(f"weights: expected one for each task, got none for {missing}; there are weights for "
                                 f"{list(self.weights)}")  # fmt: skip
            return [self.weights[name] for name in inputs.names]
        if len(self.weights) != len(inputs.known):
            fewer = inputs.named and len(inputs.known) < len(self.weights)
            raise ValueError(
                f"weights: expected one for each of the {len(inputs.known)} tasks {list(inputs.known)}, got "
                f"{len(self.weights)}" + (", whose order is open until all tasks have been there: give them by name, "
                                          "as a mapping" if fewer else "")
            )  # fmt: skip
        return [self.weights[place] for place in inputs.places]

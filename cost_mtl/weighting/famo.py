"""FAMO: losses fall at the same rate, for the price of one more evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cost_mtl._validation import finite
from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._checks import check_positive, numbers_of_tasks
from cost_mtl.weighting._state import numbers_by_task, refuse_state, same_keys, vector

__all__ = ["FAMO"]

_BETAS = (0.9, 0.999)
_FORMERLY = {"logit": "logits", "mean": "mean", "square": "square"}
"""A task's numbers, and what the tensors of them were called in checkpoints of before."""

_ADAM_EPSILON = 1e-8


@dataclass(frozen=True)
class FAMO:
    """Fast adaptive multitask optimization (Liu et al., NeurIPS 2023, arXiv 2306.03792, Algorithm 2).

    z = softmax(xi), w_i proportional to z_i / (L_i - b_i + eps), sum of w = 1. After the update the losses are
    evaluated again on the same batch, and the logits xi take one Adam step along the change of log(L_i - b_i + eps): a
    task whose loss fell less gains weight. That evaluation is the one exception to COST's one closure call a step; the
    logits move at the beginning of the coming step, so that nothing waits for the losses.

    Its state: for each task its logit and Adam's two moments and count of steps; the losses before and after the last
    update. A task that is absent from a batch keeps its own, and the others are weighed as if there were none of it.
    The published method weights the tasks' own parameters as well: ``COST(heads="weighted")``.

    Args:
        lr: of the logits. 0.025 (default) is the paper's.
        weight_decay: gamma, coupled (added to the gradient). 1e-3 (default) is the paper's; the authors' class has 1e-5
            and their scripts set it per data set.
        min_losses: lower bounds b of the losses, by task name or [K] in the order of the tasks; None (default): zeros.
        epsilon: 1e-8 (default), the authors': keeps the logarithm of a loss at its bound finite.

    Raises:
        ValueError: a setting is out of range; in a step, before parameters move, a loss is below its bound, or was
            after the update before.

    Example:
        >>> from cost_mtl.base import WeightingInputs
        >>> weighting = FAMO()
        >>> losses, G = torch.tensor([1.0, 4.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0]])
        >>> inputs = WeightingInputs(cost_mtl.gramian(G), losses, G, step=0)
        >>> weighting.weigh(inputs, weighting.initial_state(2)).weights  # at first in proportion to 1 / loss
        tensor([0.8000, 0.2000])
    """

    lr: float = 0.025
    weight_decay: float = 1e-3
    min_losses: Sequence[float] | Mapping[str, float] | None = None
    epsilon: float = 1e-8

    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True

    def __post_init__(self) -> None:
        finite("lr", self.lr, least=0)
        finite("weight_decay", self.weight_decay, least=0)
        finite("epsilon", self.epsilon, above=0)
        if self.min_losses is not None:
            object.__setattr__(self, "min_losses", numbers_of_tasks("min_losses", self.min_losses))

    def initial_state(self, num_tasks: int) -> State:
        return {"tasks": {}, "names": [], "losses": None, "after": None}

    def read_state(self, state: Any, known: Sequence[str]) -> State:
        """A state from a checkpoint, in today's form: before it went by task name it had one tensor [K] a field.

        Raises:
            ValueError: a field is not what it should be.
        """
        if type(state) is dict and "logits" in state:
            same_keys(state, ("logits", "mean", "square", "steps", "losses"))
            columns = {new: vector(old, state[old], len(known)) for new, old in _FORMERLY.items()}
            steps = numbers_by_task("steps", dict.fromkeys(known, state["steps"]), known, counts=True)
            rows = {name: {key: float(column[i]) for key, column in columns.items() if column is not None}
                    for i, name in enumerate(known)}  # fmt: skip
            tasks = {name: row | {"steps": steps[name]} for name, row in rows.items()}
            return {"tasks": tasks, "names": [], "losses": None, "after": None}
        same_keys(state, ("tasks", "names", "losses", "after"))
        tasks, names = state["tasks"], state["names"]
        if type(tasks) is not dict or any(
            type(t) is not dict or set(t) != {*_FORMERLY, "steps"} for t in tasks.values()
        ):
            refuse_state("tasks", f"task name -> {[*_FORMERLY, 'steps']}", tasks)
        for key in _FORMERLY:
            numbers_by_task(f"tasks: {key}", {name: task[key] for name, task in tasks.items()}, known)
        numbers_by_task("tasks: steps", {name: task["steps"] for name, task in tasks.items()}, known, counts=True)
        if type(names) is not list or not set(map(str, names)) <= set(tasks):
            refuse_state("names", f"tasks among {list(tasks)}", names)
        vector("losses", state["losses"], len(names), or_none=True)
        if state["after"] is not None and not isinstance(state["after"], Tensor):  # it may be infinite
            refuse_state("after", f"{len(names)} numbers in a tensor or None", state["after"])
        return dict(state)

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K], sum 1, from the losses and the logits, which first take the step that the last update asks for.

        Raises:
            ValueError: a loss is below its bound, now or after the last update; ``min_losses`` has not one bound per
                task.
        """
        bounds = self._bounds(inputs)
        gap = self._gap(inputs.losses, inputs.names, bounds, "")
        tasks = self._moved(dict(state["tasks"]), state, bounds)
        for name in inputs.names:
            tasks.setdefault(name, {"logit": 0.0, "mean": 0.0, "square": 0.0, "steps": 0})
        logits = torch.tensor([tasks[name]["logit"] for name in inputs.names], dtype=torch.float64, device="cpu")
        w = torch.softmax(logits, 0) / gap
        w = (w / w.sum()).to(inputs.gramian.device, inputs.gramian.dtype)
        losses = inputs.losses.detach().cpu().clone()
        return Weighed(w, {"tasks": tasks, "names": list(inputs.names), "losses": losses, "after": None})

    def observe(self, losses_after: Tensor, state: State) -> State:
        """The state with the losses [K] after the update on the same batch; nothing is read from the device."""
        return state | {"after": losses_after.detach().clone()}

    def _moved(self, tasks: dict[str, dict[str, Any]], state: State, bounds: Mapping[str, float]) -> dict[str, Any]:
        """The tasks' logits and moments after one Adam step along what the last update did."""
        names, after = state.get("names"), state.get("after")
        if not names or after is None:
            return tasks
        fallen = self._gap(state["losses"], names, bounds, "").log()
        fallen = fallen - self._gap(after, names, bounds, ", after the last update,").log()
        # A loss that is not finite after the update says nothing, and would stay in the logits for good.
        fallen = fallen if bool(torch.isfinite(fallen).all()) else torch.zeros_like(fallen)
        logits = torch.tensor([tasks[name]["logit"] for name in names], dtype=torch.float64, device="cpu")
        z = torch.softmax(logits, 0)
        gradient = z * (fallen - (z * fallen).sum()) + self.weight_decay * logits
        return tasks | {name: self._adam(tasks[name], float(g)) for name, g in zip(names, gradient, strict=True)}

    def _adam(self, task: Mapping[str, Any], gradient: float) -> dict[str, Any]:
        steps = task["steps"] + 1
        mean = _BETAS[0] * task["mean"] + (1 - _BETAS[0]) * gradient
        square = _BETAS[1] * task["square"] + (1 - _BETAS[1]) * gradient**2
        size = math.sqrt(square / (1 - _BETAS[1] ** steps)) + _ADAM_EPSILON
        logit = task["logit"] - self.lr * mean / (1 - _BETAS[0] ** steps) / size
        return {"logit": logit, "mean": mean, "square": square, "steps": steps}

    def _bounds(self, inputs: WeightingInputs) -> dict[str, float]:
        """b of every known task."""
        given, known = self.min_losses, inputs.known
        if given is None:
            return dict.fromkeys(known, 0.0)
        if isinstance(given, Mapping):
            missing = [name for name in known if name not in given]
            if missing:
                raise ValueError(f"min_losses: expected a bound for each task, got none for {missing}")
            return {name: given[name] for name in known}
        if len(given) != len(known):
            raise ValueError(f"min_losses: expected one for each of the {len(known)} tasks {list(known)}, got "
                             f"{len(given)}; by name, as a mapping, they need not all be known")  # fmt: skip
        return dict(zip(known, given, strict=True))

    def _gap(self, losses: Tensor, names: Sequence[str], bounds: Mapping[str, float], when: str) -> Tensor:
        """L - b + eps [K], float64, on the CPU."""
        bound = torch.tensor([bounds[name] for name in names], dtype=torch.float64, device="cpu")
        gap = losses.detach().to("cpu", torch.float64) - bound
        check_positive(gap, names, "FAMO", "takes the logarithm of the losses minus their bounds", when)
        return gap + self.epsilon

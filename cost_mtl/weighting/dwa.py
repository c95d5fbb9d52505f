"""Dynamic weight averaging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cost_mtl._validation import at_least, finite
from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._state import numbers_by_task, refuse_state, same_keys, vector

__all__ = ["DWA"]

_MEANS = ("total", "last", "before_last")


@dataclass(frozen=True)
class DWA:
    """Dynamic weight averaging (Liu, Johns & Davison, MTAN, CVPR 2019, arXiv 1803.10704, Eqn 7).

    w = K softmax(r / T) with r_i = L_i(t - 1) / L_i(t - 2), the ratio of the mean losses of the last two epochs: a task
    whose loss falls slowly gets more weight. Ones during the first two epochs.

    Its state, for each task: sum and number of its losses in the current epoch, and their means in the two before. A
    task that is absent from a batch is not counted in it; one without a mean in both epochs has r = 1.

    Args:
        steps_per_epoch: optimizer steps over which the losses are averaged (``len(loader)``).
        temperature: T > 0; 2 (default) is the paper's. Large: equal weights.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> from cost_mtl.base import WeightingInputs
        >>> weighting = DWA(steps_per_epoch=100)
        >>> losses, G = torch.tensor([1.0, 4.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0]])
        >>> inputs = WeightingInputs(cost_mtl.gramian(G), losses, G, step=0)
        >>> weighting.weigh(inputs, weighting.initial_state(2)).weights  # ones in the first two epochs
        tensor([1., 1.])
    """

    steps_per_epoch: int
    temperature: float = 2.0

    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least("steps_per_epoch", self.steps_per_epoch, 1)
        finite("temperature", self.temperature, above=0)

    def initial_state(self, num_tasks: int) -> State:
        return {"epoch": 0, "total": {}, "count": {}, "last": {}, "before_last": {}}

    def read_state(self, state: Any, known: Sequence[str]) -> State:
        """A state from a checkpoint, in today's form: before it went by task name it had one tensor [K] a field, or
        None, and one count.

        Raises:
            ValueError: a field is not what it should be.
        """
        same_keys(state, ("epoch", "total", "count", "last", "before_last"))
        numbers_by_task("epoch", {"": state["epoch"]}, [""], counts=True)
        if type(state["count"]) is int:
            split = {key: _split(vector(key, state[key], len(known), or_none=True), known) for key in _MEANS}
            counts = dict.fromkeys(split["total"], state["count"])
            state = {"epoch": state["epoch"], "count": counts} | split
        for key in _MEANS:
            numbers_by_task(key, state[key], known)
        numbers_by_task("count", state["count"], known, counts=True)
        if set(state["count"]) != set(state["total"]):
            refuse_state("count", f"the tasks of the total, {list(state['total'])}", state["count"])
        return dict(state)

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K] from the losses of the epochs before; the current ones are added to the state."""
        losses = dict(zip(inputs.names, inputs.losses.detach().double().tolist(), strict=True))
        epoch, total, count = inputs.step // self.steps_per_epoch, dict(state["total"]), dict(state["count"])
        last, before_last = state["last"], state["before_last"]
        if epoch != state["epoch"] and count:
            last, before_last = {name: total[name] / count[name] for name in total}, last
            total, count = {}, {}
        for name, loss in losses.items():
            total[name], count[name] = total.get(name, 0.0) + loss, count.get(name, 0) + 1
        new: State = {"epoch": epoch, "total": total, "count": count, "last": last, "before_last": before_last}
        ratio = torch.tensor([_ratio(last, before_last, n) for n in inputs.names], dtype=torch.float64, device="cpu")
        w = len(losses) * torch.softmax(ratio / self.temperature, 0) if before_last else torch.ones_like(ratio)
        return Weighed(w.to(inputs.gramian.device, inputs.gramian.dtype), new)


def _ratio(last: Mapping[str, float], before_last: Mapping[str, float], name: str) -> float:
    # A mean loss of 0, or none: the rate is not known.
    before = before_last.get(name, 0.0)
    return last[name] / before if before != 0 and name in last else 1.0


def _split(values: Tensor | None, known: Sequence[str]) -> dict[str, float]:
    return {} if values is None else dict(zip(known, values.tolist(), strict=True))

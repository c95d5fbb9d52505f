"""Turns what the user gives as ``COST(weighting=...)`` into the one interface that COST calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from cost_mtl.base import SolvingWeighting, State, StatefulWeighting, Weighed, WeightingInputs
from cost_mtl.weighting import torchjd_adapter
from cost_mtl.weighting._checks import checked_weights

__all__ = ["resolve"]


def resolve(weighting: Any) -> StatefulWeighting:
    """The :class:`~cost_mtl.base.StatefulWeighting` behind ``weighting``.

    Args:
        weighting: a ``StatefulWeighting`` (returned as it is), a ``SolvingWeighting``, any function of the Gramian, or
            a torchjd Weighting of Gramians. The last three get an adapter that checks each answer (a finite tensor
            [K]), copies it (some functions write into the tensor
            that they returned) and, for torchjd's stateful weightings, keeps their memory in the state, so that COST
            saves it, and resets them when K changes.

    Raises:
        TypeError: ``weighting`` is a class, a name, not callable, a torchjd Aggregator or Scalarizer, or a torchjd
            Weighting of Jacobians (which would silently return wrong weights [K]).
    """
    if inspect.isclass(weighting):
        raise TypeError(
            f"weighting: expected an object, got the class {weighting.__name__}: write {weighting.__name__}()"
        )
    if isinstance(weighting, str):
        raise TypeError(f"weighting: expected an object, got the name {weighting!r}: write cost_mtl.FairGrad(), say")
    if isinstance(weighting, StatefulWeighting):
        return weighting
    if torchjd_adapter.is_torchjd(weighting):
        torchjd_adapter.refuse_unless_of_gramians(weighting)
        return torchjd_adapter.TorchJDWeighting(weighting)
    if isinstance(weighting, SolvingWeighting):
        return _Solving(weighting, "noise" in inspect.signature(weighting.solve).parameters)
    if callable(weighting):
        return _Function(weighting)
    raise TypeError(
        f"weighting: expected a callable gramian [K, K] -> weights [K] or a StatefulWeighting, "
        f"got {type(weighting).__name__}: for the plain sum write cost_mtl.EqualWeighting()"
    )


def _name(weighting: Any) -> str:
    return str(getattr(weighting, "__qualname__", type(weighting).__name__))


@dataclass(frozen=True)
class _Function:
    function: Callable[[Tensor], Tensor]
    needs: ClassVar[str] = "gramian"

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        weights = self.function(inputs.gramian.clone())  # some functions work in place
        return Weighed(checked_weights(weights, inputs.gramian, f"weighting {_name(self.function)}"), state)


@dataclass(frozen=True)
class _Solving:
    weighting: SolvingWeighting
    takes_noise: bool = False
    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True  # a solution has no memory, and tasks have no places in it

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        options: dict[str, Any] = {"noise": inputs.noise} if self.takes_noise else {}
        solution = self.weighting.solve(inputs.gramian, **options)
        weights = checked_weights(solution.weights, inputs.gramian, f"weighting {_name(self.weighting)}")
        return Weighed(weights, state, solver=solution.report)

"""torchjd's weightings inside COST. torchjd is never imported here: whoever holds one of its objects has done so."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, get_args, get_origin

import torch
from torch import Tensor, nn

from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._checks import checked_weights

__all__ = ["TorchJDWeighting", "is_torchjd", "refuse_unless_of_gramians"]

_BLIND = ("MeanWeighting", "SumWeighting", "ConstantWeighting", "RandomWeighting")
"""Declared as weightings of Jacobians, but they look at the number of rows alone: a Gramian does as well."""

_OURS = {
    "NashMTL": "cost_mtl.NashMTL()",
    "GradDrop": "cost_mtl.GradDrop()",
    "DWA": "cost_mtl.DWA()",
    "FAMO": "cost_mtl.FAMO()",
    "UW": "cost_mtl.Uncertainty(num_tasks)",
    "Random": "cost_mtl.RLW()",
}


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _is_a(obj: Any, module: str, name: str) -> bool:
    cls = _loaded(module, name)
    return isinstance(cls, type) and isinstance(obj, cls)


def is_torchjd(obj: Any) -> bool:
    """Whether ``obj`` is one of torchjd's weightings, aggregators or scalarizers, or of a class derived from them."""
    aggregation = ("Weighting", "Aggregator")
    return any(_is_a(obj, "torchjd.aggregation", name) for name in aggregation) or _is_a(
        obj, "torchjd.scalarization", "Scalarizer"
    )


def refuse_unless_of_gramians(obj: Any) -> None:
    """Raises TypeError, with what to pass instead, for everything but a torchjd Weighting of Gramians."""
    name = type(obj).__name__
    if _is_a(obj, "torchjd.aggregation", "Aggregator"):
        raise TypeError(
            f"weighting: expected a weighting of Gramians, got {name}, a torchjd Aggregator, which maps a "
            f"Jacobian to a gradient: {_instead(obj)}"
        )
    if _is_a(obj, "torchjd.scalarization", "Scalarizer"):
        ours = _OURS.get(name)
        raise TypeError(
            f"weighting: expected a weighting of Gramians, got {name}, a torchjd Scalarizer, which maps losses to one: "
            + (f"pass {ours} instead" if ours else "pass a weighting of Gramians instead")
        )
    if not _takes_gramian(obj):
        raise TypeError(
            f"weighting: expected a weighting of Gramians, got {name}, a torchjd Weighting of Jacobians, which would "
            f"return wrong weights from a Gramian: {_instead(obj)}"
        )


def _instead(obj: Any) -> str:
    name = type(obj).__name__.lstrip("_").removesuffix("Weighting")
    if name in _OURS:
        return f"pass {_OURS[name]} instead"
    weighting = _loaded("torchjd.aggregation", f"{name}Weighting")
    if isinstance(getattr(obj, "gramian_weighting", None), nn.Module) and weighting is not None:
        return f"pass {name}Weighting(), or this aggregator's .gramian_weighting, instead of {name}()"
    if isinstance(weighting, type) and name + "Weighting" in _BLIND:
        return f"pass {name}Weighting() instead of {name}()"
    if name == "Composition":
        return "pass the aggregator's .gramian_weighting instead of its .weighting"
    return "it has no form that needs the Gramian only: pass a torchjd Weighting of Gramians, such as UPGradWeighting()"


def _takes_gramian(weighting: Any) -> bool:
    if _is_a(weighting, "torchjd.aggregation", "CRMOGMWeighting"):
        return _takes_gramian(weighting.weighting)
    if any(_is_a(weighting, "torchjd.aggregation", name) for name in _BLIND):
        return True
    if type(weighting).__name__ == "_Composition":  # aggregator.weighting: the Gramian is taken inside
        return False
    return _declared_statistic(weighting) != "Matrix"


def _declared_statistic(weighting: Any) -> str:
    """Name of X in the ``Weighting[X]`` that the object's class derives from, the most derived one first."""
    generic = _loaded("torchjd.aggregation", "Weighting")
    for cls in type(weighting).__mro__:
        for base in cls.__dict__.get("__orig_bases__", ()):
            if get_origin(base) is generic:
                return str(getattr(get_args(base)[0], "__name__", ""))
    return ""


# A plain value, unlike a module or a hook table, can be part of a saved state.
_PLAIN = (Tensor, int, float, bool, str, tuple, list, dict, type(None), torch.dtype, torch.device)


def _fields(weighting: nn.Module) -> dict[str, Any]:
    """Attributes and buffers of the weighting and of those that it wraps, by dotted name."""
    known = vars(nn.Module())
    found: dict[str, Any] = {}
    for prefix, module in weighting.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in known} | dict(module._buffers)
        found |= {f"{prefix}.{name}": value for name, value in own.items() if isinstance(value, _PLAIN)}
    return found


def _restore(weighting: nn.Module, memory: dict[str, Any]) -> None:
    for dotted, value in memory.items():
        prefix, _, name = dotted.rpartition(".")
        setattr(weighting.get_submodule(prefix), name, value)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class TorchJDWeighting:
    """A torchjd Weighting of Gramians.

    Where it is stateful (GradVac, PCD, CR-MOGM), its memory, that is every field that differs from a freshly reset
    object, moves into the state after each call and back before the next: two optimizers may share the object, a
    checkpoint holds it, and another K resets it.
    """

    weighting: nn.Module
    needs: ClassVar[str] = "gramian"

    def initial_state(self, num_tasks: int) -> State:
        return {"num_tasks": num_tasks, "memory": {}} if self._stateful else {}

    @property
    def _stateful(self) -> bool:
        return callable(getattr(self.weighting, "reset", None))

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        gramian = inputs.gramian
        name = f"weighting {type(self.weighting).__name__} (torchjd)"
        if not self._stateful:
            return Weighed(checked_weights(self.weighting(gramian), gramian, name), state)
        fresh = state.get("num_tasks") != gramian.shape[0]
        self.weighting.reset()  # type: ignore[operator]
        blank = _fields(self.weighting)
        if not fresh:
            # A checkpoint may have been loaded onto a GPU, but M is on the host.
            memory = {key: _copied(value) for key, value in state["memory"].items()}
            on_device = {k: v.to(gramian.device) if isinstance(v, Tensor) else v for k, v in memory.items()}
            _restore(self.weighting, on_device)
        weights = checked_weights(self.weighting(gramian), gramian, name)
        memory = {k: _copied(v) for k, v in _fields(self.weighting).items() if v is not blank.get(k)}
        return Weighed(weights, {"num_tasks": gramian.shape[0], "memory": memory})

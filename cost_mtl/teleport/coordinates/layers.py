"""Which layers of the shared part an adapter can be put on, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

ADAPTABLE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layer types that are adapted. Subclasses are not: their forward may be another one."""


@dataclass(frozen=True)
class Layer:
    """An adaptable layer with all the places it is reached from.

    Attributes:
        name: its first full name in the model.
        module: the layer.
        places: (parent module, attribute name) pairs; several where one layer is used under several names.
    """

    name: str
    module: nn.Module
    places: tuple[tuple[nn.Module, str], ...]


def shared_layers(roots: Sequence[nn.Module], shared: Iterable[Tensor]) -> tuple[list[Layer], dict[str, str]]:
    """Layers below the roots whose weight is a trainable shared parameter, and name -> reason for those left out.

    Args:
        roots: the model, and shared modules outside of it.
        shared: the trainable shared parameters.
    """
    wanted = {id(p) for p in shared}
    places: dict[int, list[tuple[str, nn.Module, str]]] = {}
    modules: dict[int, nn.Module] = {}
    owners: dict[int, set[int]] = {}
    for root in roots:
        for prefix, parent in root.named_modules(remove_duplicate=False):
            for child_name, child in parent._modules.items():
                if child is None:
                    continue
                name = f"{prefix}.{child_name}" if prefix else child_name
                modules[id(child)] = child
                found = places.setdefault(id(child), [])
                if not any(parent is p and child_name == c for _, p, c in found):
                    found.append((name, parent, child_name))
                for p in child.parameters(recurse=False):
                    owners.setdefault(id(p), set()).add(id(child))
    layers: list[Layer] = []
    skipped: dict[str, str] = {}
    for key, module in modules.items():
        own = [p for p in module._parameters.values() if p is not None]
        if not any(id(p) in wanted for p in own):
            if any(id(p) in wanted for p in _parametrization_originals(module)):
                skipped[places[key][0][0]] = "parametrized: its weight is computed from other parameters"
            continue
        name = places[key][0][0]
        reason = _why_not(module, [parent for _, parent, _ in places[key]], wanted, owners)
        if reason:
            skipped[name] = reason
        else:
            layers.append(Layer(name, module, tuple((parent, child) for _, parent, child in places[key])))
    for root in roots:
        if any(id(p) in wanted for p in root._parameters.values() if p is not None):
            skipped.setdefault(
                "(root)", f"{type(root).__name__}: the model itself, which nothing can be put in place of"
            )
    return layers, skipped


def _parametrization_originals(module: nn.Module) -> list[Tensor]:
    # Not is_parametrized(module) alone: the type guard would make the list of parametrizations opaque to mypy.
    if not parametrize.is_parametrized(module):
        return []
    return list(module.parametrizations.parameters())  # type: ignore[union-attr]


def _why_not(
    module: nn.Module, parents: Sequence[nn.Module], wanted: set[int], owners: dict[int, set[int]]
) -> str | None:
    weight = module._parameters.get("weight")
    kind = type(module).__name__
    if any(isinstance(parent, nn.MultiheadAttention) for parent in parents):
        return "inside MultiheadAttention, which reads its weights without calling the layer"
    if parametrize.is_parametrized(module) or (type(module) in ADAPTABLE and weight is None):
        return "parametrized: its weight is computed from other parameters"
    if type(module) not in ADAPTABLE or weight is None:
        return f"{kind}: no adapter for this type of layer"
    if id(weight) not in wanted:
        return "its weight is frozen or not shared"
    if getattr(module, "groups", 1) > 1:
        return f"{kind} with groups={module.groups}: PEFT cannot merge into grouped convolutions"
    if len(owners[id(weight)]) > 1:
        return "its weight is tied to another layer's"
    return None

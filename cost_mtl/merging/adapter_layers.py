"""What peft knows of each layer that a LoRA adapter changes: its factor, and whether its weight is transposed.

A configuration says each of these once for all layers, which is not always true: peft keeps one ``fan_in_fan_out``
for Linear and Conv1D layers together (the last layer's), and ``scale_layer`` changes a layer and no configuration. So
a live model is read layer by layer; a folder, which holds the configuration alone, is read beside its base's layers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from cost_mtl.merging.source import MappingSource, TensorSource

__all__ = ["WHAT_TO_DO", "LayerFacts", "check_no_adapter", "config_scaling", "is_transposed_layer", "live_layers"]

WHAT_TO_DO = "merge it with peft's merge_and_unload() and pass the merged model"


@dataclass(frozen=True)
class LayerFacts:
    """ΔW = scaling · B·A, or its transpose where the weight is kept as [in, out]."""

    scaling: float
    transposed: bool


def live_layers(adapter: Any, active: str, name: str) -> dict[str, LayerFacts]:
    """Name of each layer that the active adapter changes -> its own settings.

    Args:
        adapter: a PeftModel with a LoRA adapter.
        active: the one adapter to read.
        name: what errors call it.

    Raises:
        ValueError: a layer is merged, disabled, has other adapters active, or is of a kind whose change is not s·B·A.
    """
    from peft.tuners.lora import layer as lora
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    facts: dict[str, LayerFacts] = {}
    for key, layer in adapter.base_model.model.named_modules():
        module: Any = layer  # peft's layers declare few of their attributes
        if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
            _check_state(module, key, active, name)
        if not isinstance(layer, BaseTunerLayer) or active not in getattr(module, "scaling", {active: 1}):
            continue
        if not (type(module) in (lora.Linear, lora.Embedding) or isinstance(layer, lora._ConvNd)):
            raise ValueError(
                f"{name}: expected layers whose change is s·B·A, got the adapter's layer {key!r}, a "
                f"{type(module).__name__} of peft: {WHAT_TO_DO}"
            )
        if module.lora_variant.get(active) is not None:
            kind = type(module.lora_variant[active]).__name__
            raise ValueError(
                f"{name}: expected a plain LoRA, got a {kind} as the adapter's layer {key!r}: {WHAT_TO_DO}"
            )
        facts[key] = LayerFacts(
            scaling=float(module.scaling[active]),
            transposed=isinstance(module, lora.Embedding) or bool(getattr(module, "fan_in_fan_out", False)),
        )
    return facts


def _check_state(module: Any, key: str, active: str, name: str) -> None:
    if getattr(module, "merged_adapters", ()):
        raise ValueError(
            f"{name}: expected adapters beside the base's weights, got {list(module.merged_adapters)} merged into "
            f"{key!r}: call unmerge_adapter() first, or {WHAT_TO_DO}"
        )
    if module.disable_adapters:
        raise ValueError(f"{name}: expected an enabled adapter, got one that is disabled at {key!r}: enable it first")
    others = [adapter for adapter in module.active_adapters if adapter != active]
    if others:
        raise ValueError(f"{name}: expected the active adapter {active!r} at every layer, got {others} at {key!r}")
    if active not in module.active_adapters and active in module._get_available_adapters():
        raise ValueError(
            f"{name}: expected the adapter {active!r} to be active at every layer, got it inactive at {key!r}"
        )


def config_scaling(config: Any, module: str, rank: int) -> float:
    """The factor of a layer as peft computes it from a configuration: α/r, or α/√r with rsLoRA."""
    from peft.utils.other import get_pattern_key

    patterns: Mapping[str, float] = config.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(list(patterns), module), config.lora_alpha)
    return float(alpha) / (math.sqrt(rank) if config.use_rslora else rank)


def is_transposed_layer(module: nn.Module | None) -> bool | None:
    """Whether a layer keeps its weight as [in, out]; None where its class does not say so."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return True
    return False if isinstance(module, nn.Linear) else None


def check_no_adapter(source: TensorSource) -> None:
    """Raises ValueError where peft's layers stand in a model that should be plain.

    Its names are then no longer the base's, and a difference of factors is no difference of weights.
    """
    if not isinstance(source, MappingSource):
        wrapped = None
    elif source.module is not None:
        wrapped = _wrapped_layer(source.module)
    else:
        keys = [key for key in source.infos if ".base_layer." in key]
        wrapped = keys[0] if keys and any(".lora_" in key for key in source.infos) else None
    if wrapped is not None:
        raise ValueError(
            f"{source.name}: expected a model without adapters, got one whose {wrapped!r} is wrapped by peft. "
            "get_peft_model works in place, on the very model that it is given: as the base, pass a copy made before "
            "it (copy.deepcopy(model)) or the base's checkpoint; as a fine-tuned model, pass the PeftModel, or "
            f"{WHAT_TO_DO}"
        )


def _wrapped_layer(module: nn.Module) -> str | None:
    if "peft" not in sys.modules:  # someone who injected an adapter has imported peft
        return None
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for key, layer in module.named_modules():
        if isinstance(layer, BaseTunerLayer | AuxiliaryTrainingWrapper):
            return str(key)
    return None

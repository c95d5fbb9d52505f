"""PEFT's LoRA adapters as task vectors: the change of each weight, ΔW = s·B·A, never the factors.

Averaging or adding the factors A and B of two adapters is not adding their ΔW; once an adapter is a task vector, all
arithmetic is on ΔW and exact. ΔW is computed from the adapter's own tensors in float32, one weight at a time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_mtl.merging.blocks import LazyBlocks, all_finite, compute_dtype, subtract
from cost_mtl.merging.source import MappingSource, TensorInfo, TensorSource, names_of

__all__ = ["adapter_blocks", "is_adapter"]

_PREFIX = "base_model.model."
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base's weights as they were. PiSSA, OLoRA, CorDA, LoftQ and others do not: for them
B·A is no difference from the original base."""
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "alora_invocation_tokens",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
)
_WHAT_TO_DO = "merge it with peft's merge_and_unload() and pass the merged model"


@dataclass
class _Parts:
    """What an adapter holds for one weight: factors, or the whole new value, or both."""

    factor_a: str = ""
    factor_b: str = ""
    whole: str = ""
    embedding: bool = False
    module: str = ""


def is_adapter(model: object) -> bool:
    """Whether this is the folder of a PEFT adapter, or a live PeftModel."""
    if isinstance(model, str | os.PathLike):
        return (Path(model) / "adapter_config.json").is_file()
    peft = sys.modules.get("peft")  # someone who holds a PeftModel has imported peft
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_blocks(base: TensorSource, adapter: Any, name: str, exclude: Sequence[str] = ()) -> LazyBlocks:
    """The task vector's blocks of an adapter, computed at each access.

    Linear layers, embeddings and convolutions with LoRA, with rank and alpha patterns, rsLoRA and trained biases;
    ``modules_to_save`` give new value − base.

    Args:
        base: the original model that the adapter was trained on.
        adapter: its folder, or a PeftModel (its active adapter).
        name: what errors call it.
        exclude: shell patterns of keys of the base to leave alone.

    Raises:
        ValueError: the adapter is no plain LoRA (another PEFT method, DoRA, PiSSA, ...), fits another base, or one of
            its tensors is not understood.
    """
    config, source = _open(adapter, name)
    _check_config(config, name)
    parts = _parse(source, name)
    canonical = {alias: key for key in base.infos for alias in names_of(base, key)}
    unknown = [key for key in parts if key not in canonical]
    if unknown:
        raise ValueError(f"{name}: the adapter changes {unknown[0]!r}, which {base.name} does not have")
    chosen: dict[str, _Parts] = {}
    for key, part in parts.items():
        block = canonical[key]
        if block in chosen:
            raise ValueError(f"{name}: the adapter changes the tied weight {block!r} twice: {_WHAT_TO_DO}")
        if not any(fnmatchcase(alias, pattern) for alias in names_of(base, block) for pattern in exclude):
            chosen[block] = part
    if not chosen:
        raise ValueError(f"{name}: the adapter changes no weight of {base.name}")
    dtypes = {key: compute_dtype(base.infos[key].dtype, label=f"{base.name}, {key!r}") for key in chosen}
    infos = {key: TensorInfo(base.infos[key].shape, dtype) for key, dtype in dtypes.items()}
    return LazyBlocks(infos, lambda key: _delta(base, source, config, key, chosen[key], name))


def _open(adapter: Any, name: str) -> tuple[Any, TensorSource]:
    if isinstance(adapter, str | os.PathLike):
        from peft import PeftConfig  # heavy, and only adapters need it

        from cost_mtl.merging.checkpoint import CheckpointSource

        try:
            config = PeftConfig.from_pretrained(str(adapter))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name}: {Path(adapter) / 'adapter_config.json'} is not readable ({error!r})") from error
        return config, CheckpointSource(Path(adapter) / "adapter_model.safetensors", name)
    from peft import get_peft_model_state_dict

    active = adapter.active_adapters
    if len(active) != 1:
        raise ValueError(f"{name}: expected one active adapter, got {list(active)}")
    # Embeddings that the adapter did not train are the base's; asking for them would look for the base on the hub.
    state = get_peft_model_state_dict(adapter, adapter_name=active[0], save_embedding_layers=False)
    return adapter.peft_config[active[0]], MappingSource(state, name)


def _check_config(config: Any, name: str) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise ValueError(f"{name}: expected a LoRA adapter, got {kind}: {_WHAT_TO_DO}")
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    for field in (*variants, *_UNSUPPORTED):
        if getattr(config, field, None):
            raise ValueError(f"{name}: the adapter uses {field}, whose change is not s·B·A: {_WHAT_TO_DO}")
    if config.init_lora_weights not in _PLAIN_INITS:
        raise ValueError(
            f"{name}: the adapter was initialised with {config.init_lora_weights!r}, which changed the base's weights: "
            f"{_WHAT_TO_DO}"
        )


def _parse(source: TensorSource, name: str) -> dict[str, _Parts]:
    """Base key -> what the adapter holds for it."""
    parts: dict[str, _Parts] = {}
    for stored in source.infos:
        key = stored.removeprefix(_PREFIX)
        if key.endswith(".lora_A.weight"):
            _entry(parts, key, ".lora_A.weight").factor_a = stored
        elif key.endswith(".lora_B.weight"):
            _entry(parts, key, ".lora_B.weight").factor_b = stored
        elif key.endswith(".lora_embedding_A"):
            _entry(parts, key, ".lora_embedding_A", embedding=True).factor_a = stored
        elif key.endswith(".lora_embedding_B"):
            _entry(parts, key, ".lora_embedding_B", embedding=True).factor_b = stored
        elif ".lora_" in key:
            raise ValueError(f"{name}: the adapter's tensor {stored!r} is not understood: {_WHAT_TO_DO}")
        else:
            plain = key.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
            parts.setdefault(plain, _Parts()).whole = stored
    for key, part in parts.items():
        if bool(part.factor_a) != bool(part.factor_b):
            raise ValueError(f"{name}: the adapter has only one of the two factors of {key!r}")
    return parts


def _entry(parts: dict[str, _Parts], key: str, suffix: str, embedding: bool = False) -> _Parts:
    module = key.removesuffix(suffix)
    part = parts.setdefault(module + ".weight", _Parts())
    part.embedding, part.module = embedding, module
    return part


def _delta(base: TensorSource, source: TensorSource, config: Any, key: str, part: _Parts, name: str) -> Tensor:
    """ΔW of one weight."""
    label = f"{name}, {key!r}"
    weight = base.read(key)
    dtype = compute_dtype(weight.dtype, label=label)
    delta = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    if part.whole:
        whole = source.read(part.whole)
        if whole.shape != weight.shape:
            raise ValueError(f"{label}: shape {list(whole.shape)} in the adapter, {list(weight.shape)} in {base.name}")
        delta = subtract(whole, weight, label)
    if part.factor_a:
        a, b = (source.read(factor).to(weight.device, dtype) for factor in (part.factor_a, part.factor_b))
        if b.flatten(1).shape[1] != a.shape[0]:
            raise ValueError(f"{label}: the factors' shapes {list(b.shape)} and {list(a.shape)} do not fit together")
        product = b.flatten(1) @ a.flatten(1)
        if part.embedding or config.fan_in_fan_out:
            product = product.T
        if product.shape != weight.flatten(1).shape:
            raise ValueError(
                f"{label}: the adapter's ΔW is {list(product.shape)}, the weight {list(weight.shape)} "
                "(another base, or a grouped convolution)"
            )
        delta = delta + product.reshape(weight.shape) * _scaling(config, part.module, a.shape[0])
    if not all_finite(delta):
        raise ValueError(f"{label}: the adapter's ΔW is not finite")
    return delta


def _scaling(config: Any, module: str, rank: int) -> float:
    from peft.utils.other import get_pattern_key

    patterns: Mapping[str, float] = config.alpha_pattern or {}
    alpha = patterns.get(get_pattern_key(list(patterns), module), config.lora_alpha)
    return float(alpha) / (math.sqrt(rank) if config.use_rslora else rank)

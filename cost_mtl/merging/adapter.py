"""PEFT's LoRA adapters as task vectors: the change of each weight, ΔW = s·B·A, never the factors.

Averaging or adding the factors A and B of two adapters is not adding their ΔW; once an adapter is a task vector, all
arithmetic is on ΔW and exact. ΔW is computed from the adapter's own tensors in float32, one weight at a time.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl.merging.adapter_layers import (
    WHAT_TO_DO,
    LayerFacts,
    config_scaling,
    is_transposed_layer,
    live_layers,
)
from cost_mtl.merging.adapter_tensors import PREFIX, Parts, parse_adapter, plain_name
from cost_mtl.merging.architecture import read_architecture, submodule, tied_names
from cost_mtl.merging.blocks import LazyBlocks, all_finite, compute_dtype, subtract
from cost_mtl.merging.checkpoint import CheckpointSource
from cost_mtl.merging.keys import is_statistic
from cost_mtl.merging.source import MappingSource, TensorInfo, TensorSource, names_of

__all__ = ["adapter_blocks", "adapter_origins", "is_adapter"]

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


@dataclass(frozen=True)
class _Opened:
    """An adapter: its configuration and tensors; of a live one also its layers' settings, and what its model ties."""

    config: Any
    source: TensorSource
    layers: Mapping[str, LayerFacts] | None = None
    ties: Sequence[frozenset[str]] = ()


def is_adapter(model: object) -> bool:
    """Whether this is the folder of a PEFT adapter, or a live PeftModel."""
    if isinstance(model, str | os.PathLike):
        return (Path(model) / "adapter_config.json").is_file()
    peft = sys.modules.get("peft")  # someone who holds a PeftModel has imported peft
    return peft is not None and isinstance(model, peft.PeftModel)


def adapter_origins(adapter: Any) -> frozenset[Path]:
    """The folders that an adapter is read from, and the one of the base that it was trained on, where it is local."""
    if not isinstance(adapter, str | os.PathLike):
        return frozenset()
    base = _read_config(adapter, "finetuned").base_model_name_or_path
    local = [Path(base).absolute()] if isinstance(base, str) and base and Path(base).exists() else []
    return frozenset([Path(adapter).absolute(), *local])


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
    opened = _open(adapter, name)
    architecture = _architecture_of(base)
    model = architecture if isinstance(architecture, nn.Module) else None
    chosen = _chosen(base, parse_adapter(opened.source, name), exclude)
    if not chosen:
        raise ValueError(f"{name}: expected an adapter that changes weights of {base.name}, got one that changes none")
    ties = [tie for tie in opened.ties if sum(key in base.infos for key in tie) < len(tie)]  # the base may be untied
    _check_ties([*ties, *_ties_of(base), *(tied_names(model) if model else ())], chosen, base.name, name)
    parts = _without_buffers(base, opened.source, _blocks_of(base, chosen, name), name)
    factored = {key: part for key, part in parts.items() if part.factor_a}
    single = len(factored) == 1
    facts = {key: _facts(opened, part, base, key, architecture, single, name) for key, part in factored.items()}
    dtypes = {key: compute_dtype(base.infos[key].dtype, label=f"{base.name}, {key!r}") for key in parts}
    infos = {key: TensorInfo(base.infos[key].shape, dtype) for key, dtype in dtypes.items()}
    return LazyBlocks(infos, lambda key: _delta(base, opened.source, facts.get(key), key, parts[key], name))


def _open(adapter: Any, name: str) -> _Opened:
    if isinstance(adapter, str | os.PathLike):
        config = _read_config(adapter, name)
        _check_config(config, name)
        return _Opened(config, CheckpointSource(Path(adapter) / "adapter_model.safetensors", name))
    from peft import get_peft_model_state_dict

    active = adapter.active_adapters
    if len(active) != 1:
        raise ValueError(f"{name}: expected one active adapter, got {list(active)}")
    config = adapter.peft_config[active[0]]
    _check_config(config, name)
    layers = live_layers(adapter, active[0], name)
    # Embeddings that the adapter did not train are the base's; asking for them would search the hub for the base.
    state = get_peft_model_state_dict(adapter, adapter_name=active[0], save_embedding_layers=False)
    _check_trained(adapter, state.values(), name)
    model = adapter.get_base_model()
    ties = [frozenset(plain_name(key) for key in tie) for tie in tied_names(model)]
    return _Opened(config, MappingSource(state, name), layers, [tie for tie in ties if len(tie) > 1])


def _read_config(folder: str | os.PathLike[str], name: str) -> Any:
    """The configuration of an adapter's folder."""
    from peft import PeftConfig  # heavy, and only adapters need it

    try:
        return PeftConfig.from_pretrained(str(folder))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{name}: expected a readable {Path(folder) / 'adapter_config.json'}, got {error!r}"
        ) from error


def _check_trained(adapter: nn.Module, state: Iterable[Tensor], name: str) -> None:
    """Raises where weights are trained that are neither the adapter's nor another adapter's."""
    known = {tensor.data_ptr() for tensor in state}
    for key, parameter in adapter.named_parameters():
        own = ".lora_" in key or ".modules_to_save." in key
        if parameter.requires_grad and not own and parameter.data_ptr() not in known:
            raise ValueError(
                f"{name}: expected all trainable weights in the adapter, got "
                f"{key.removeprefix(PREFIX)!r} outside of it: {WHAT_TO_DO}"
            )


def _architecture_of(base: TensorSource) -> nn.Module | str:
    """The base's layers, or why they are not known."""
    module = getattr(base, "module", None)
    if isinstance(module, nn.Module):
        return module
    folder = getattr(base, "folder", None)
    return read_architecture(folder) if folder is not None else "a state_dict holds weights alone"


def _ties_of(base: TensorSource) -> list[frozenset[str]]:
    return [frozenset(names) for key in base.infos if len(names := names_of(base, key)) > 1]


def _chosen(base: TensorSource, parts: Mapping[str, Parts], exclude: Sequence[str]) -> dict[str, Parts]:
    """What the adapter changes, by its own names, without what is excluded by any name."""
    stored = {alias: key for key in base.infos for alias in names_of(base, key)}

    def excluded(key: str) -> bool:
        names = names_of(base, stored[key]) if key in stored else [key]
        return any(fnmatchcase(alias, pattern) for alias in names for pattern in exclude)

    return {key: part for key, part in parts.items() if not excluded(key)}


def _check_ties(ties: Iterable[frozenset[str]], changed: Iterable[str], base: str, name: str) -> None:
    """Raises where the adapter trained one of two tied weights alone: a merged weight can't be both."""
    changed = set(changed)
    for tie in ties:
        trained, left = sorted(tie & changed), sorted(tie - changed)
        if trained and left:
            raise ValueError(
                f"{name}: expected tied weights to change together, got an adapter that changes {trained[0]!r} alone, "
                f"which is tied to {left[0]!r} in {base}: the merge would change both, so untie the two in the base "
                "first (give each a weight of its own)"
            )


def _blocks_of(base: TensorSource, chosen: Mapping[str, Parts], name: str) -> dict[str, Parts]:
    """The same by the base's keys."""
    stored = {alias: key for key in base.infos for alias in names_of(base, key)}
    unknown = [key for key in chosen if key not in stored]
    if unknown:
        module, _, parameter = unknown[0].rpartition(".")
        parametrized = any(key.startswith(f"{module}.parametrizations.{parameter}.") for key in stored)
        why = f"which is parametrized in {base.name}" if parametrized else f"which {base.name} does not have"
        raise ValueError(f"{name}: expected an adapter of {base.name}, got one that changes {unknown[0]!r}, {why}")
    blocks: dict[str, Parts] = {}
    for key, part in chosen.items():
        if stored[key] in blocks:
            raise ValueError(f"{name}: expected one change of the tied weight {stored[key]!r}, got two: {WHAT_TO_DO}")
        blocks[stored[key]] = part
    return blocks


def _without_buffers(
    base: TensorSource, source: TensorSource, parts: Mapping[str, Parts], name: str
) -> dict[str, Parts]:
    """The weights alone. Buffers of a module in ``modules_to_save`` are no weights, and must be the base's."""
    weights: dict[str, Parts] = {}
    for key, part in parts.items():
        dtype = base.infos[key].dtype
        if (dtype.is_floating_point or dtype.is_complex) and not (is_statistic(key) or key in base.buffers):
            weights[key] = part
        elif not torch.equal(base.read(key).cpu(), source.read(part.whole).cpu()):
            raise ValueError(
                f"{name}: expected the base's buffers, got one whose modules_to_save changes the buffer {key!r}: "
                f"{WHAT_TO_DO}"
            )
    return weights


def _check_config(config: Any, name: str) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise ValueError(f"{name}: expected a LoRA adapter, got {kind}: {WHAT_TO_DO}")
    variants = [field.name for field in dataclasses.fields(config) if field.metadata.get("is_lora_variant")]
    for field in (*variants, *_UNSUPPORTED):
        if getattr(config, field, None):
            raise ValueError(f"{name}: expected an adapter whose change is s·B·A, got one with {field}: {WHAT_TO_DO}")
    if config.init_lora_weights not in _PLAIN_INITS:
        raise ValueError(
            f"{name}: expected an initialisation that keeps the base's weights, got {config.init_lora_weights!r}: "
            f"{WHAT_TO_DO}"
        )


def _facts(
    opened: _Opened, part: Parts, base: TensorSource, key: str, architecture: nn.Module | str, single: bool, name: str
) -> LayerFacts:
    if opened.layers is not None:
        if part.module not in opened.layers:
            raise ValueError(
                f"{name}: expected a layer of peft for the adapter's factors, got none at {part.module!r}: {WHAT_TO_DO}"
            )
        return opened.layers[part.module]
    infos = opened.source.infos
    scaling = config_scaling(opened.config, part.module, infos[part.factor_a].shape[0])
    if part.embedding or len(base.infos[key].shape) != 2:
        return LayerFacts(scaling, transposed=part.embedding)
    model = architecture if isinstance(architecture, nn.Module) else None
    transposed = is_transposed_layer(submodule(model, part.module))
    if transposed is None:
        transposed = _transposed_by_shape(opened, part, base, key)
    if transposed is None and not single:
        raise ValueError(
            f"{name}: expected a base whose layers are known, got the square weight {key!r} of a Linear or a Conv1D "
            f"(fan_in_fan_out is one setting for all layers; {architecture}): pass the base as a module, or a "
            "folder whose config.json transformers knows"
        )
    return LayerFacts(scaling, bool(opened.config.fan_in_fan_out) if transposed is None else transposed)


def _transposed_by_shape(opened: _Opened, part: Parts, base: TensorSource, key: str) -> bool | None:
    """Whether a weight is [in, out], as far as shapes tell: None for a square one that may be either.

    A Conv1D always has a bias, and its size tells a Conv1D from the Linear of another base.
    """
    infos, shape = opened.source.infos, base.infos[key].shape
    out, inner = infos[part.factor_b].shape[0], infos[part.factor_a].shape[-1]
    stored = {alias: block for block in base.infos for alias in names_of(base, block)}
    bias = stored.get(part.module + ".bias")
    if shape == (out, out):
        return False if bias is None and not opened.config.fan_in_fan_out else None
    return shape == (inner, out) and bias is not None and base.infos[bias].shape == (out,)


def _delta(
    base: TensorSource, source: TensorSource, facts: LayerFacts | None, key: str, part: Parts, name: str
) -> Tensor:
    """ΔW of one weight."""
    label = f"{name}, {key!r}"
    weight = base.read(key)
    dtype = compute_dtype(weight.dtype, label=label)
    delta = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    if part.whole:
        whole = source.read(part.whole)
        if whole.shape != weight.shape:
            raise ValueError(
                f"{label}: expected the shape {list(weight.shape)} of {base.name}, got {list(whole.shape)}"
            )
        delta = subtract(whole, weight, label)
    if facts is not None:
        a, b = (source.read(factor).to(weight.device, dtype) for factor in (part.factor_a, part.factor_b))
        if b.flatten(1).shape[1] != a.shape[0]:
            raise ValueError(f"{label}: expected factors of one rank, got shapes {list(b.shape)} and {list(a.shape)}")
        product = b.flatten(1) @ a.flatten(1)
        if facts.transposed:
            product = product.T
        if product.shape != weight.flatten(1).shape:
            raise ValueError(
                f"{label}: expected a ΔW of the weight's shape {list(weight.shape)}, got {list(product.shape)} "
                "(another base, or a grouped convolution)"
            )
        delta = delta + product.reshape(weight.shape) * facts.scaling
    if not all_finite(delta):
        raise ValueError(f"{label}: expected a finite ΔW, got NaN or infinity")
    return delta

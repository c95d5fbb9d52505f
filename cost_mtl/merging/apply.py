"""θ = base + scale τ on a whole model: dtypes, devices, ties and buffers as the base has them."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl.merging.adapter_layers import check_no_adapter
from cost_mtl.merging.blocks import add_block, checked_factor, converted
from cost_mtl.merging.fields import HasFields
from cost_mtl.merging.keys import is_statistic
from cost_mtl.merging.opening import open_source
from cost_mtl.merging.source import Model, TensorSource, names_of
from cost_mtl.merging.statistics import (
    BufferPolicy,
    average_statistics,
    check_policy,
    differing_statistics,
    recalibrate_batchnorm,
)

__all__ = ["apply_vector", "block_keys", "merged_tensor", "warn_about_statistics"]


def apply_vector(
    base: Model, vector: HasFields, scale: float, buffers: BufferPolicy, batches: Iterable[Any] | None
) -> nn.Module | dict[str, Tensor]:
    """See :meth:`cost_mtl.merging.TaskVector.apply_to`."""
    check_policy(buffers)
    scale = checked_factor(scale, "scale")
    if buffers == "recalibrate" and not (isinstance(base, nn.Module) and batches is not None):
        given = type(base).__name__ if batches is not None else "no batches"
        raise ValueError(f'buffers: "recalibrate" expected a module as base, and batches, got {given}')
    if buffers != "recalibrate" and batches is not None:
        raise ValueError(f'batches: expected buffers="recalibrate" with them, got buffers={buffers!r}')
    source = open_source(base, "base")
    check_no_adapter(source)
    block_of = block_keys(source, vector)
    warn_about_statistics(source, vector, buffers)
    merged = {key: merged_tensor(source, key, vector, block_of, scale, buffers) for key in source.infos}
    for key, dtype in vector.added.items():
        if key not in source.infos:
            merged[key] = converted(vector.blocks[key] * scale, dtype, repr(key))
    if not isinstance(base, nn.Module):
        return _state_dict(base, source, merged)
    unknown = [key for key in vector.added if key not in source.infos]
    if unknown:
        raise ValueError(f"base: expected a state_dict, since the vector adds {unknown[0]!r}, got a module without it")
    model = copy.deepcopy(base)
    model.load_state_dict(_state_dict(base.state_dict(), source, merged))
    if buffers == "recalibrate" and batches is not None:
        recalibrate_batchnorm(model, batches)
    return model


def block_keys(source: TensorSource, vector: HasFields) -> dict[str, str]:
    """Key of the base -> the vector's block for it, whichever of its names the vector knows it by.

    Raises:
        ValueError: the vector has a block that the base lacks, or two blocks that the base ties in one weight.
    """
    stored = {name: key for key in source.infos for name in names_of(source, key)}
    unknown = [block for block in vector.blocks if block not in stored and block not in vector.added]
    if unknown:
        raise ValueError(
            f"{source.name}: expected all blocks of the task vector, got a model that lacks {unknown[0]!r} "
            f"({len(unknown)} such blocks in all)"
        )
    block_of: dict[str, str] = {}
    for block in vector.blocks:
        if block in stored and block_of.setdefault(stored[block], block) != block:
            raise ValueError(
                f"{source.name}: expected separate weights for two blocks of the vector, got a model that ties "
                f"{block_of[stored[block]]!r} and {block!r}"
            )
    return block_of


def merged_tensor(
    source: TensorSource,
    key: str,
    vector: HasFields,
    block_of: Mapping[str, str],
    scale: float,
    buffers: BufferPolicy,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One tensor of the merged model in ``dtype`` (default: the base's), with its own memory."""
    value = source.read(key)
    if key in block_of:
        return add_block(value, vector.blocks[block_of[key]], scale, repr(key), dtype)
    if buffers == "average" and is_statistic(key):
        return average_statistics(key, value, vector.statistics)
    return converted(value, dtype or value.dtype, repr(key))


def warn_about_statistics(source: TensorSource, vector: HasFields, buffers: BufferPolicy) -> None:
    """Warns when BatchNorm's statistics of the fine-tuned models differ from the base's, and the base's are kept."""
    if buffers != "keep" or not vector.statistics:
        return
    base = {key: source.read(key) for key in source.infos if is_statistic(key)}
    differing = differing_statistics(base, vector.statistics)
    if differing:
        warnings.warn(
            f"the fine-tuned models have other BatchNorm statistics than the base in {len(differing)} buffers "
            f'({differing[0]!r} first), and the merged model keeps the base\'s: consider buffers="recalibrate" with '
            'batches, or "average"',
            stacklevel=4,
        )


def _state_dict(base: Model, source: TensorSource, merged: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state_dict with the base's keys in its order, tied names sharing one tensor."""
    if isinstance(base, str | os.PathLike) or not isinstance(base, Mapping):
        return merged
    result: dict[str, Any] = copy.copy(base) if isinstance(base, dict) else dict(base)  # keeps OrderedDict._metadata
    for key in base:
        stored = source.aliases.get(key, key)
        if stored in merged:  # a module's extra state is not
            result[key] = merged[stored]
    result.update({key: tensor for key, tensor in merged.items() if key not in result})
    return result

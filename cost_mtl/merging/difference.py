"""θ − θ_pre, block by block: what a task vector is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cost_mtl.merging.adapter import adapter_blocks, adapter_origins, is_adapter
from cost_mtl.merging.adapter_layers import check_no_adapter
from cost_mtl.merging.blocks import LazyBlocks, compute_dtype, subtract
from cost_mtl.merging.fields import VectorFields
from cost_mtl.merging.fingerprint import BaseDigests
from cost_mtl.merging.keys import KeyPolicy, match_keys
from cost_mtl.merging.opening import open_source
from cost_mtl.merging.source import MappingSource, TensorInfo, TensorSource, origins_of

__all__ = ["difference"]


def difference(base: TensorSource, finetuned: Any, keys: KeyPolicy, exclude: Sequence[str], name: str) -> VectorFields:
    """The difference of two models, or of an adapter; arguments and errors as of TaskVector.

    A model in memory may change or go afterwards, so with one the blocks are computed at once. With files alone they
    are computed at each access.
    """
    check_no_adapter(base)
    if is_adapter(finetuned):
        lazy = adapter_blocks(base, finetuned, name, exclude)
        digests = BaseDigests(blocks=lazy, source=base)
        origins = origins_of(base) | adapter_origins(finetuned)
        if isinstance(base, MappingSource):
            return VectorFields(dict(lazy), digests.computed(), origins=origins)
        return VectorFields(lazy, digests, origins=origins)
    theta = open_source(finetuned, name)
    check_no_adapter(theta)
    matched = match_keys(base, theta, keys, exclude)
    stored = dict(matched.blocks)
    lazy = LazyBlocks(_infos(base, theta, stored, matched.added), lambda key: _block(base, theta, stored, key))
    digests = BaseDigests(blocks=stored, source=base)
    added = {key: theta.infos[key].dtype for key in matched.added}
    statistics = ({key: theta.read(other).clone() for key, other in matched.statistics},) if matched.statistics else ()
    origins = origins_of(base) | origins_of(theta)
    if isinstance(base, MappingSource) or isinstance(theta, MappingSource):
        return VectorFields(dict(lazy), digests.computed(), added, statistics, origins)
    return VectorFields(lazy, digests, added, statistics, origins)


def _infos(
    base: TensorSource, theta: TensorSource, stored: Mapping[str, str], added: Sequence[str]
) -> dict[str, TensorInfo]:
    dtypes = {
        key: compute_dtype(base.infos[key].dtype, theta.infos[other].dtype, label=f"{theta.name}, {key!r}")
        for key, other in stored.items()
    }
    infos = {key: TensorInfo(base.infos[key].shape, dtype) for key, dtype in dtypes.items()}
    for key in added:
        dtype = compute_dtype(theta.infos[key].dtype, label=f"{theta.name}, {key!r}")
        infos[key] = TensorInfo(theta.infos[key].shape, dtype)
    return infos


def _block(base: TensorSource, theta: TensorSource, stored: Mapping[str, str], key: str) -> Tensor:
    label = f"{theta.name}, {key!r}"
    if key in stored:
        return subtract(theta.read(stored[key]), base.read(key), label)
    value = theta.read(key)  # the base lacks it: it counts as zero there
    return subtract(value, torch.zeros((), dtype=value.dtype, device=value.device), label)

"""Merging checkpoints on disk: read, combine and write one tensor after the other, in the base's layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_mtl._version import __version__
from cost_mtl.merging.apply import block_keys, merged_tensor, warn_about_statistics
from cost_mtl.merging.blocks import checked_factor, compute_dtype, converted, shape_of
from cost_mtl.merging.checkpoint import INDEX_SUFFIX, CheckpointSource, ShardFile
from cost_mtl.merging.destination import Destination
from cost_mtl.merging.keys import KeyPolicy, is_statistic
from cost_mtl.merging.source import TensorInfo
from cost_mtl.merging.statistics import BufferPolicy, check_policy
from cost_mtl.merging.storage import is_saved_vector, write_checkpoint
from cost_mtl.merging.task_vector import TaskVector

__all__ = ["merge_checkpoint", "open_vectors"]

_COPIED = (".json", ".txt", ".model", ".jinja", ".py")
"""Suffixes of what stands beside the weights and belongs to a model: configuration, tokenizer, custom code."""


def open_vectors(
    base: CheckpointSource, models: Sequence[str | os.PathLike[str]], keys: KeyPolicy, exclude: Sequence[str] = ()
) -> list[TaskVector]:
    """The task vectors of checkpoints, adapters, or saved task vectors on disk; nothing but headers is read.

    Raises:
        ValueError, FileNotFoundError: see :class:`TaskVector` and :meth:`TaskVector.load`.

    Example:
        >>> for name, value in (("base", 0.0), ("tuned", 2.0)):
        ...     save_file({"w": torch.full((2,), value)}, f"{name}.safetensors")
        >>> base = CheckpointSource("base.safetensors", "base")
        >>> (tau,) = open_vectors(base, ["tuned.safetensors"], "strict")
        >>> tau.blocks["w"]
        tensor([2., 2.])
    """
    if not models:
        raise ValueError("models: expected at least one model, got none")
    return [
        TaskVector.load(path, base=base.path).select(lambda block: not any(fnmatchcase(block, p) for p in exclude))
        if is_saved_vector(path)
        else TaskVector(base, path, keys=keys, exclude=exclude, name=f"models[{number}] ({Path(path).name})")
        for number, path in enumerate(models)
    ]


def merge_checkpoint(
    base: CheckpointSource,
    vector: TaskVector,
    out: str | os.PathLike[str],
    *,
    scale: float = 1.0,
    buffers: BufferPolicy = "keep",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    note: str = "",
    on_tensor: Callable[[str], None] | None = None,
) -> None:
    """Writes base + scale τ in the base's layout: its shards, its order, its metadata, its tied weights stored once.

    In memory at a time: what one block of ``vector`` takes to compute, some four float32 copies of it for weighted
    sums. The output appears when it is whole; after an error, or Ctrl-C, nothing is there.

    Args:
        base: the base, opened.
        vector: what to add, from :func:`open_vectors` and what combines them.
        out: a folder, which also gets the base folder's configuration and tokenizer files; or, for a base in one file,
            a ``.safetensors`` file.
        scale: the factor.
        buffers: BatchNorm's running statistics: "keep" the base's or "average" the models'. To recalibrate them, load
            the result and call :func:`cost_mtl.merging.recalibrate_batchnorm`.
        dtype: that of the weights written, and what a copied ``config.json`` then names; default: the base's.
        overwrite: replace an earlier model at ``out``. What the merge reads (the base, the models, an adapter's base)
            is never replaced, nor is a folder that holds anything but a model.
        note: kept in the files' metadata, beside this package's version: how the merge was made.
        on_tensor: called with each key that is done, for a progress bar.

    Raises:
        ValueError, FileExistsError, FileNotFoundError: see the above; also a result that is not finite in ``dtype``.

    Example:
        >>> for name, value in (("base", 0.0), ("tuned", 2.0)):
        ...     save_file({"w": torch.full((2,), value)}, f"{name}.safetensors")
        >>> base = CheckpointSource("base.safetensors", "base")
        >>> (tau,) = open_vectors(base, ["tuned.safetensors"], "strict")
        >>> merge_checkpoint(base, tau, "merged.safetensors", scale=0.5)
        >>> CheckpointSource("merged.safetensors", "merged").read("w")
        tensor([1., 1.])
    """
    check_policy(buffers, ("keep", "average"))
    scale = checked_factor(scale, "scale")
    if dtype is not None:
        compute_dtype(dtype, label="dtype")
    target = Path(out)
    companions = {} if target.suffix == ".safetensors" else _companions(base, dtype)
    beside = {(base.folder / name).absolute() for name in companions}
    destination = Destination(target, overwrite, base.origins | vector.origins | beside, companions)
    destination.check()  # before any work
    if target.suffix == ".safetensors" and len(base.shards) > 1:
        raise ValueError(f"out: expected a folder for the base's {len(base.shards)} shards, got the file {target}")
    block_of = block_keys(base, vector)
    added = tuple(key for key in vector.added if key not in base.infos)
    warn_about_statistics(base, vector, buffers)

    def read(key: str) -> Tensor:
        if key in base.infos:
            tensor = merged_tensor(base, key, vector, block_of, scale, buffers, infos[key].dtype)
        else:
            tensor = converted(vector.blocks[key] * scale, infos[key].dtype, repr(key))
        if on_tensor is not None:
            on_tensor(key)
        return tensor

    infos = {
        key: TensorInfo(info.shape, dtype if dtype and _is_weight(base, key) else info.dtype)
        for key, info in base.infos.items()
    }
    infos |= {key: TensorInfo(shape_of(vector.blocks, key).shape, dtype or vector.added[key]) for key in added}
    for key in base.infos:
        if dtype is not None and _is_weight(base, key) and base.infos[key].dtype.itemsize > 1:
            compute_dtype(dtype, base.infos[key].dtype, label=f"dtype, {key!r}")
    provenance = {"cost_mtl": json.dumps({"version": __version__, "scale": scale, "note": note})}
    shards = [ShardFile(s.filename, s.keys, {**s.metadata, **provenance}) for s in base.shards]
    if added:
        shards[-1] = ShardFile(shards[-1].filename, shards[-1].keys + added, shards[-1].metadata)
    write_checkpoint(
        destination,
        shards,
        infos,
        read,
        index_name=base.index_name or None,
        index_metadata=_index_metadata(base, added),
    )


def _is_weight(base: CheckpointSource, key: str) -> bool:
    dtype = base.infos[key].dtype
    return (dtype.is_floating_point or dtype.is_complex) and not is_statistic(key)


def _index_metadata(base: CheckpointSource, added: Sequence[str]) -> dict[str, Any]:
    metadata = dict((base.index or {}).get("metadata") or {})
    if added:
        metadata.pop("total_parameters", None)  # no longer true
    return metadata


def _companions(base: CheckpointSource, dtype: torch.dtype | None) -> dict[str, Callable[[], bytes]]:
    """What stands beside the base's weights; the dtype that its configuration names becomes the one written."""
    files = [
        file
        for file in sorted(base.folder.iterdir())
        if file.is_file() and file.suffix in _COPIED and not file.name.endswith(INDEX_SUFFIX)
    ]
    content: dict[str, Callable[[], bytes]] = {file.name: file.read_bytes for file in files}
    if dtype is not None and "config.json" in content:
        content["config.json"] = partial(_config_in, base.folder / "config.json", str(dtype).removeprefix("torch."))
    return content


def _config_in(path: Path, dtype: str) -> bytes:
    """A transformers configuration that says ``dtype`` wherever it says one, or the file as it is if it is none."""
    raw = path.read_bytes()
    try:
        config = json.loads(raw)
        changed = _with_dtype(config, dtype)
    except (ValueError, RecursionError):
        return raw
    return raw if changed == config else (json.dumps(changed, indent=2) + "\n").encode()


def _with_dtype(config: Any, dtype: str) -> Any:
    # "torch_dtype" is the older name; a model of several parts has a configuration for each inside.
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else _with_dtype(value, dtype)
        for key, value in config.items()
    }

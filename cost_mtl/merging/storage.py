"""Writing checkpoints shard by shard, and task vectors with the digests of their base."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_mtl.merging.atomic import atomic_folder, atomic_path
from cost_mtl.merging.blocks import LazyBlocks, compute_dtype, converted, shape_of
from cost_mtl.merging.checkpoint import INDEX_SUFFIX, VECTOR_KIND, CheckpointSource, ShardFile
from cost_mtl.merging.destination import Destination
from cost_mtl.merging.fields import HasFields, VectorFields
from cost_mtl.merging.fingerprint import BaseDigests, check_base
from cost_mtl.merging.opening import open_source
from cost_mtl.merging.source import Model, TensorInfo
from cost_mtl.merging.writer import CODES, write_safetensors

__all__ = ["is_saved_vector", "load_vector", "plan_shards", "save_vector", "write_checkpoint"]

_STATISTICS = "__statistics__"


def plan_shards(infos: Mapping[str, TensorInfo], stem: str, limit: int, metadata: Mapping[str, str]) -> list[ShardFile]:
    """Splits tensors, in their order, into files of at most ``limit`` bytes each (a larger tensor has its own).

    The files are called ``stem-0000i-of-0000N.safetensors``, or ``stem.safetensors`` when there is one.
    """
    groups: list[list[str]] = [[]]
    room = limit
    for key, info in infos.items():
        if groups[-1] and info.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(key)
        room -= info.nbytes
    count = len(groups)
    names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    if count == 1:
        names = [f"{stem}.safetensors"]
    return [ShardFile(name, tuple(keys), metadata) for name, keys in zip(names, groups, strict=True)]


def write_checkpoint(
    destination: Destination,
    shards: Sequence[ShardFile],
    infos: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    *,
    index_name: str | None = None,
    index_metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes shards one after the other, tensor by tensor: what is in memory is what ``read`` works with.

    Args:
        destination: a file (``*.safetensors``, one shard) or a folder, and the files that go beside the shards there.
        shards: files, and the keys of each.
        infos: key -> shape and dtype of what is written.
        read: key -> tensor.
        index_name: the index's name; None writes none. Its ``total_size`` is counted here.
        index_metadata: further entries of the index's ``metadata``.

    Raises:
        FileExistsError, FileNotFoundError, ValueError: see :meth:`Destination.check`.
        Anything that ``read`` raises; nothing is left of the output then.
    """
    out = destination.path
    if out.suffix == ".safetensors":
        if len(shards) != 1:
            raise ValueError(f"out: expected a folder for {len(shards)} shards, got the file {out}")
        with atomic_path(out, destination.check) as staging:
            _write_shard(staging, shards[0], infos, read)
        return
    with atomic_folder(out, destination.check) as folder:
        sizes = [_write_shard(folder / shard.filename, shard, infos, read) for shard in shards]
        for name, content in destination.companions.items():
            (folder / name).write_bytes(content())
        if index_name is not None:
            index = {
                "metadata": {**(index_metadata or {}), "total_size": sum(sizes)},
                "weight_map": {key: shard.filename for shard in shards for key in shard.keys},
            }
            (folder / index_name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shard(path: Path, shard: ShardFile, infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> int:
    return write_safetensors(path, {key: infos[key] for key in shard.keys}, read, shard.metadata)


def save_vector(
    vector: HasFields,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 << 30,
    overwrite: bool = False,
) -> None:
    """Writes a task vector as safetensors.

    Args:
        vector: the vector.
        path: a ``.safetensors`` file, or a folder for shards.
        dtype: what to store it in; default: as computed (float32). bfloat16 halves the file, and rounds each value to
            8 bits, 0.2 % of it on average.
        shard_bytes: the largest shard in a folder; default 5 GiB, as large as hubs like their files.
        overwrite: replace an earlier task vector there.

    Raises:
        FileExistsError, FileNotFoundError: ``path`` exists, or its parent folder does not.
        ValueError: ``overwrite`` would replace something else than a task vector, or what the vector was read from.
    """
    if dtype is not None:
        compute_dtype(dtype, label="dtype")  # refuses integers and 8-bit floats
    out = Path(path)
    metadata = {
        "format": "pt",
        "kind": VECTOR_KIND,
        "base_hash": vector.base_digests.combined(),
        "base_digests": json.dumps(dict(vector.base_digests)),
        "added": json.dumps({block: str(added).removeprefix("torch.") for block, added in vector.added.items()}),
    }
    statistics = {
        f"{_STATISTICS}.{number}.{key}": tensor
        for number, entry in enumerate(vector.statistics)
        for key, tensor in entry.items()
    }
    stored = {block: shape_of(vector.blocks, block) for block in vector.blocks}
    infos = {block: TensorInfo(info.shape, dtype or info.dtype) for block, info in stored.items()}
    infos |= {key: TensorInfo(tuple(tensor.shape), tensor.dtype) for key, tensor in statistics.items()}
    for block, info in stored.items():
        compute_dtype(infos[block].dtype, info.dtype, label=f"dtype, {block!r}")
    single = out.suffix == ".safetensors"
    shards = plan_shards(
        infos, "task_vector", sum(i.nbytes for i in infos.values()) if single else shard_bytes, metadata
    )

    def read(key: str) -> Tensor:
        return statistics[key] if key in statistics else converted(vector.blocks[key], infos[key].dtype, repr(key))

    write_checkpoint(
        Destination(out, overwrite, vector.origins, vector=True),
        shards,
        infos,
        read,
        index_name="task_vector" + INDEX_SUFFIX if len(shards) > 1 else None,
    )


def load_vector(path: str | os.PathLike[str], *, base: Model | None) -> VectorFields:
    """Reads a task vector; its blocks stay on disk until they are used.

    Args:
        path: what :func:`save_vector` wrote.
        base: the model to which the vector belongs, checked by the digests of its weights; None skips the check.

    Raises:
        ValueError: the file holds no task vector or is not complete, or ``base`` is another model.
    """
    source = CheckpointSource(path, "task vector")
    if source.metadata.get("kind") != VECTOR_KIND:
        raise ValueError(f"path: expected a task vector that TaskVector.save wrote, got {path}")
    digests = BaseDigests(_names(source, "base_digests", path))
    added = _added(source, path)
    if base is not None:
        if not digests:
            raise ValueError(f"base: expected None for a vector saved after without_base(), got a base for {path}")
        check_base(digests, open_source(base, "base"), str(path))
    statistics: dict[str, dict[str, Tensor]] = {}
    blocks: dict[str, TensorInfo] = {}
    for key, info in source.infos.items():
        if key.startswith(_STATISTICS + "."):
            number, _, name = key.removeprefix(_STATISTICS + ".").partition(".")
            statistics.setdefault(number, {})[name] = source.read(key)
        else:
            blocks[key] = TensorInfo(info.shape, compute_dtype(info.dtype, label=f"{source.name}, {key!r}"))
    lazy = LazyBlocks(blocks, lambda block: source.read(block).to(blocks[block].dtype))
    return VectorFields(
        lazy,
        base_digests=digests,
        added=added,
        statistics=tuple(statistics.values()),
        origins=source.origins,
    )


def _names(source: CheckpointSource, field: str, path: str | os.PathLike[str]) -> dict[str, str]:
    """A field of a saved vector's metadata: a JSON object whose values are strings."""
    try:
        value = json.loads(source.metadata[field])
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(
            f"path: expected a readable {field} in the metadata of {path}, got {type(error).__name__}"
        ) from error
    if not isinstance(value, dict) or not all(isinstance(entry, str) for entry in value.values()):
        raise ValueError(f"path: expected {field} of {path} to map names to strings, got {str(value)[:80]}")
    return value


def _added(source: CheckpointSource, path: str | os.PathLike[str]) -> dict[str, torch.dtype]:
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in CODES.values()}
    names = _names(source, "added", path)
    for block, name in names.items():
        if block not in source.infos or name not in dtypes:
            raise ValueError(f"path: expected blocks of {path} and their dtypes in added, got {block!r} in {name!r}")
        compute_dtype(dtypes[name], source.infos[block].dtype, label=f"path: {path}, added, {block!r}")
    return {block: dtypes[name] for block, name in names.items()}


def is_saved_vector(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a safetensors file, or a folder of them, that :func:`save_vector` wrote."""
    target = Path(path)
    if target.is_dir():
        return (target / "task_vector.safetensors").is_file() or (target / ("task_vector" + INDEX_SUFFIX)).is_file()
    if target.suffix != ".safetensors" or not target.is_file():
        return False
    return CheckpointSource(target, str(target)).metadata.get("kind") == VECTOR_KIND

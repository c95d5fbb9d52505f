"""Reading safetensors checkpoints: one file, or shards with their index, as transformers writes them.

Every header is read, and checked against the index, when a checkpoint is opened: a file that is missing, truncated
or not what the index says is known before anything is computed or written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cost_mtl.merging.source import TensorInfo
from cost_mtl.merging.writer import CODES

__all__ = ["INDEX_SUFFIX", "VECTOR_KIND", "CheckpointSource", "ShardFile"]

INDEX_SUFFIX = ".safetensors.index.json"

VECTOR_KIND = "cost_mtl.task_vector"
"""What a saved task vector's metadata has under "kind"."""


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file: its name, its keys in the order of their values, and its free-form metadata."""

    filename: str
    keys: tuple[str, ...]
    metadata: Mapping[str, str]


class CheckpointSource:
    """A safetensors checkpoint as a source of tensors (see :class:`cost_mtl.merging.source.TensorSource`).

    The file is opened for each tensor and closed again (0.1 ms), so that pages of files read earlier do not stay
    mapped: the memory in use is that of the tensors in use.

    Args:
        path: a ``.safetensors`` file, an index (``*.safetensors.index.json``) or the folder of either.
        name: what errors call it.

    Raises:
        FileNotFoundError: there is no such path, no checkpoint in the folder, or a shard is missing.
        ValueError: a file is truncated or corrupt, index and shards disagree, or the folder is ambiguous.

    Example:
        >>> save_file({"w": torch.ones(2)}, "model.safetensors")
        >>> source = CheckpointSource("model.safetensors", "base")
        >>> source.infos["w"].shape, source.read("w")
        ((2,), tensor([1., 1.]))
    """

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.name = name
        self.path = Path(path)
        self.aliases: dict[str, str] = {}
        self.buffers: frozenset[str] = frozenset()
        self.infos: dict[str, TensorInfo] = {}
        self._file_of: dict[str, Path] = {}
        target = _find(self.path, name)
        self.folder = target.parent
        self.index: dict[str, Any] | None = None
        self.index_name = ""
        filenames = [target.name]
        if target.name.endswith(INDEX_SUFFIX):
            self.index, self.index_name = _read_index(target, name), target.name
            filenames = sorted(set(self.index["weight_map"].values()))
        self.shards = tuple(self._open(filename) for filename in filenames)
        if self.index is not None:
            self._check_index(self.index["weight_map"])
        if not self.infos:
            raise ValueError(f"{name}: expected at least one tensor, found none in {target}")

    def _open(self, filename: str) -> ShardFile:
        path = self.folder / filename
        with _opened(path, self.name) as file:
            keys = tuple(file.offset_keys())
            for key in keys:
                entry = file.get_slice(key)
                code = entry.get_dtype()
                if code not in CODES:
                    raise ValueError(
                        f"{self.name}: expected one of the dtypes {', '.join(CODES)}, got {code} of {key!r} in {path}"
                    )
                if key in self.infos:
                    raise ValueError(
                        f"{self.name}: expected {key!r} in one shard, got {self._file_of[key].name} and {filename}"
                    )
                self.infos[key] = TensorInfo(tuple(entry.get_shape()), CODES[code])
                self._file_of[key] = path
            return ShardFile(filename, keys, file.metadata() or {})

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        found = {key: path.name for key, path in self._file_of.items()}
        wrong = sorted(key for key in {*found, *weight_map} if found.get(key) != weight_map.get(key))
        if wrong:
            key = wrong[0]
            raise ValueError(
                f"{self.name}: expected shards that agree with {self.folder / self.index_name}, got {len(wrong)} "
                f"keys that disagree: {key!r} should be in {weight_map.get(key, 'no file')}, and is in "
                f"{found.get(key, 'none')}"
            )

    @property
    def origins(self) -> frozenset[Path]:
        """What is read: the path as it was given, and each file."""
        files = [self.folder / shard.filename for shard in self.shards]
        if self.index_name:
            files.append(self.folder / self.index_name)
        return frozenset(file.absolute() for file in (self.path, *files))

    @property
    def metadata(self) -> Mapping[str, str]:
        """The free-form metadata of the first file."""
        return self.shards[0].metadata

    def read(self, key: str) -> Tensor:
        path = self._file_of[key]
        with _opened(path, self.name) as file:
            tensor: Tensor = file.get_tensor(key)
            return tensor


@contextmanager
def _opened(path: Path, name: str) -> Iterator[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{name}: expected the file {path}, got no such file")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{name}: expected a complete safetensors file, got {path} ({error})") from error


def _find(path: Path, name: str) -> Path:
    """The safetensors file or the index that ``path`` means."""
    if path.is_file():
        if path.name.endswith((".safetensors", INDEX_SUFFIX)):
            return path
        raise ValueError(
            f"{name}: expected a .safetensors file, its {INDEX_SUFFIX[1:]} or a folder, got {path}; "
            "read another format by state = torch.load(path, weights_only=True), and pass it on or save it by "
            "safetensors.torch.save_file(state, 'model.safetensors')"
        )
    if not path.is_dir():
        raise FileNotFoundError(f"{name}: expected a file or folder, got {path}, which does not exist")
    if (path / "adapter_config.json").is_file():
        raise ValueError(f"{name}: expected a whole model, got the PEFT adapter {path}")
    indices = sorted(path.glob("*" + INDEX_SUFFIX))
    indexed = {file for index in indices for file in _read_index(index, name)["weight_map"].values()}
    candidates = indices + sorted(file for file in path.glob("*.safetensors") if file.name not in indexed)
    if not candidates:
        raise FileNotFoundError(f"{name}: expected a .safetensors file in the folder {path}, got none")
    if len(candidates) > 1:
        found = ", ".join(file.name for file in candidates[:5])
        raise ValueError(f"{name}: expected one checkpoint in the folder {path}, got several ({found}): name the file")
    return candidates[0]


def _read_index(path: Path, name: str) -> dict[str, Any]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{name}: expected a readable index, got {path} ({error})") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{name}: expected an index with a weight_map, got {path} without one")
    for key, filename in weight_map.items():
        # The same names are used for writing: one with a folder in it could leave the output folder.
        if not isinstance(filename, str) or Path(filename).name != filename:
            raise ValueError(f"{name}: expected the name of a file beside {path} for {key!r}, got {filename!r}")
    return dict(index)

"""Where tensors come from: one reading interface over modules, state_dicts and checkpoint files.

Everything in this package reads models through :class:`TensorSource`, one tensor at a time, so a merge never has to
hold a model that is on disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

__all__ = ["MappingSource", "Model", "TensorInfo", "TensorSource", "names_of", "origins_of"]

Model = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]
"""A module, a state_dict, or the path of a safetensors file, of a checkpoint's index or of a checkpoint's folder."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


@runtime_checkable
class TensorSource(Protocol):
    """Named tensors that are read one by one."""

    @property
    def name(self) -> str:
        """What errors call it, for example "base"."""
        ...

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """Key -> shape and dtype, each stored tensor once, in the model's order."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of tied tensors -> the key in ``infos`` that holds their values."""
        ...

    @property
    def buffers(self) -> frozenset[str]:
        """Keys known to be buffers; empty where that is unknown (plain state_dicts and files)."""
        ...

    def read(self, key: str) -> Tensor:
        """The values under ``key``, one of ``infos``."""
        ...


class MappingSource:
    """A state_dict as a source. Tied weights (two names, one memory) count once, under their first name.

    Args:
        tensors: the state_dict.
        name: what errors call it.
        module: the module that it is of, where there is one.
    """

    def __init__(self, tensors: Mapping[str, Tensor], name: str, module: nn.Module | None = None) -> None:
        self.name = name
        self.module = module
        self.aliases: dict[str, str] = {}
        self.infos: dict[str, TensorInfo] = {}
        self.buffers = (
            frozenset(key for key, _ in module.named_buffers(remove_duplicate=False)) if module else frozenset()
        )
        self._tensors: dict[str, Tensor] = {}
        seen: dict[tuple[object, ...], str] = {}
        for key, tensor in tensors.items():
            if not str(key).endswith("_extra_state"):  # a module's own, arbitrary object: no weight
                self._add(key, tensor, seen)
        if not self.infos:
            raise ValueError(f"{name}: expected at least one tensor, got an empty state_dict")

    def _add(self, key: str, tensor: Tensor, seen: dict[tuple[object, ...], str]) -> None:
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise TypeError(
                f"{self.name}: expected a state_dict (str -> Tensor), got {type(tensor).__name__} under {key!r}; "
                "if this is a training checkpoint, pass the state_dict inside it"
            )
        if tensor.is_meta or tensor.is_sparse or tensor.is_quantized:
            kind = "meta" if tensor.is_meta else "sparse" if tensor.is_sparse else "quantized"
            raise TypeError(f"{self.name}: expected dense tensors that hold values, got a {kind} tensor under {key!r}")
        tensor = tensor.detach()
        first = seen.setdefault(_memory(tensor), key) if tensor.numel() else key
        if first == key:
            self.infos[key] = TensorInfo(tuple(tensor.shape), tensor.dtype)
            self._tensors[key] = tensor
        elif _layout(self._tensors[first]) == _layout(tensor):
            self.aliases[key] = first
        else:
            raise ValueError(
                f"{self.name}: expected tied weights of one layout, got {first!r} and {key!r}, which share memory "
                f"(shapes {list(self._tensors[first].shape)} and {list(tensor.shape)}): clone one of them first"
            )

    def read(self, key: str) -> Tensor:
        return self._tensors[key]


def _memory(tensor: Tensor) -> tuple[object, ...]:
    # Same start and same number of elements: the same weight, whatever view of it. A slice of a flat buffer that only
    # starts where another tensor does has another number of elements, and is a weight of its own.
    return (tensor.device, tensor.data_ptr(), tensor.numel(), tensor.dtype)


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return (tuple(tensor.shape), tensor.stride())


def origins_of(source: TensorSource) -> frozenset[Path]:
    """Files and folders that a source reads, which must not be overwritten; none for a model in memory."""
    return frozenset(getattr(source, "origins", ()))


def names_of(source: TensorSource, key: str) -> list[str]:
    """All names of a stored tensor, its own first."""
    return [key, *(alias for alias, target in source.aliases.items() if target == key)]

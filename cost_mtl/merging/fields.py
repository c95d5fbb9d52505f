"""What a task vector consists of. What reads, writes and applies vectors needs no more than these fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from cost_mtl.merging.fingerprint import BaseDigests

__all__ = ["HasFields", "VectorFields"]


class HasFields(Protocol):
    """A task vector, or its fields; each is explained in :class:`cost_mtl.merging.TaskVector`."""

    @property
    def blocks(self) -> Mapping[str, Tensor]: ...
    @property
    def base_digests(self) -> BaseDigests: ...
    @property
    def added(self) -> Mapping[str, torch.dtype]: ...
    @property
    def statistics(self) -> tuple[Mapping[str, Tensor], ...]: ...
    @property
    def origins(self) -> frozenset[Path]: ...


@dataclass(frozen=True)
class VectorFields:
    """The fields of a :class:`cost_mtl.merging.TaskVector`."""

    blocks: Mapping[str, Tensor]
    base_digests: BaseDigests
    added: Mapping[str, torch.dtype] = field(default_factory=dict)
    statistics: tuple[Mapping[str, Tensor], ...] = ()
    origins: frozenset[Path] = frozenset()

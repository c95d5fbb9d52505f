"""Opening whatever a user hands over as a model: a module, a state_dict, a path."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import nn

from cost_mtl.merging.checkpoint import CheckpointSource
from cost_mtl.merging.source import MappingSource, Model, TensorSource

__all__ = ["open_source"]


def open_source(model: Model | TensorSource, name: str) -> TensorSource:
    """Opens a model for reading.

    Args:
        model: see :data:`Model`.
        name: what errors call it.

    Raises:
        TypeError: it is none of these, or the state_dict holds something else than dense tensors.
        FileNotFoundError, ValueError: the file or one of its shards is missing or not readable.
    """
    if isinstance(model, nn.Module):
        return MappingSource(model.state_dict(), name, model)
    if isinstance(model, Mapping):
        return MappingSource(model, name)
    if isinstance(model, str | os.PathLike):
        return CheckpointSource(model, name)
    if isinstance(model, TensorSource):
        return model
    raise TypeError(f"{name}: expected a module, a state_dict or a path, got {type(model).__name__}")

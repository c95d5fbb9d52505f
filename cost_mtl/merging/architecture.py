"""The layers of a base that is on disk: weights alone say neither what a layer is nor which weights are tied."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

__all__ = ["read_architecture", "submodule", "tied_names"]

_REASONS = (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError)
"""What a configuration that transformers can't build a model from leads to."""


def read_architecture(folder: Path) -> nn.Module | str:
    """The transformers model that ``config.json`` in a folder names, without weights, or why there is none.

    No code from the folder is run, and nothing is downloaded. Needs transformers, which peft needs too.
    """
    if not (folder / "config.json").is_file():
        return f"{folder} holds no config.json"
    import transformers  # heavy, and only adapters on a base from disk need it

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        names = config.architectures or [""]
        kind = getattr(transformers, names[0], None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            return f"{folder / 'config.json'} names no architecture of transformers"
        with torch.device("meta"):
            model = kind(config)
        model.tie_weights()
    except _REASONS as error:
        return f"transformers can't build the model of {folder / 'config.json'} ({str(error).splitlines()[:1]})"
    return model


def submodule(model: nn.Module | None, name: str) -> nn.Module | None:
    """The module of that name, or None where there is no such module."""
    try:
        return None if model is None else model.get_submodule(name)
    except AttributeError:
        return None


def tied_names(model: nn.Module) -> list[frozenset[str]]:
    """The groups of names under which a model reaches one parameter, groups of two names or more."""
    groups: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), set()).add(name)
    return [frozenset(names) for names in groups.values() if len(names) > 1]

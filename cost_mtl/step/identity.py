"""What tells one weighting, with its settings, from another one in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sized
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from cost_mtl.step.memory import caught, digest_of_code

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 4
"""How far down settings of settings are looked at."""

_MANY = 64
"""Longer containers, and objects with more attributes, are data: they count by their length alone."""


def identity(value: Any) -> str:
    """One string for two weightings exactly if they are of one kind with equal settings, as far as those have a meaning
    in another process.

    A function counts by module, name, code and what it has caught; an object by its class and attributes; a tensor, and
    what a module has learned, by its shape.
    """
    kind = value if isinstance(value, FunctionType) else type(value)
    digest = hashlib.sha256(repr(_described(value, _DEPTH)).encode()).hexdigest()[:16]
    return f"{kind.__module__}.{kind.__qualname__} {digest}"


def _described(value: Any, depth: int) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, type | BuiltinFunctionType):
        return value.__module__, value.__qualname__
    if depth == 0 or (isinstance(value, list | tuple | set | frozenset | Mapping) and len(value) > _MANY):
        return type(value).__module__, type(value).__qualname__, len(value) if isinstance(value, Sized) else None
    below = depth - 1
    if isinstance(value, FunctionType):
        content = _described(caught(value), below)
        return value.__module__, value.__qualname__, digest_of_code(value.__code__), content
    if isinstance(value, MethodType):
        return _described(value.__func__, below), _described(value.__self__, below)
    if isinstance(value, partial):
        return "partial", _described((value.func, value.args, value.keywords), below)
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_described(item, below) for item in value]
        return type(value).__qualname__, sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if isinstance(value, Mapping):
        return type(value).__qualname__, [(_described(k, below), _described(v, below)) for k, v in value.items()]
    return type(value).__module__, type(value).__qualname__, _described(_attributes(value), below)


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    found |= {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    if isinstance(value, nn.Module):
        return {k: v for k, v in found.items() if not k.startswith("_") or k in ("_parameters", "_modules")}
    return found

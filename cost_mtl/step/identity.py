"""What tells one weighting, with its settings, from another one in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from cost_mtl.step.memory import caught, digest_of_code

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_MANY = 64
"""Longer containers are data: they count by their length alone."""

_MOST, _DEEPEST = 1000, 32
"""Objects that are looked at, and how far down; what comes after them counts by its class."""


def identity(value: Any) -> str:
    """One string for two weightings exactly if they are of one kind with equal settings, as far as those have a meaning
    in another process.

    A function counts by module, name, code and what it has caught; an object by its class and attributes; a tensor, and
    what a module has learned, by its shape.
    """
    kind = value if isinstance(value, FunctionType) else type(value)
    digest = hashlib.sha256(repr(_described(value, {}, 0)).encode()).hexdigest()[:16]
    return f"{kind.__module__}.{kind.__qualname__} {digest}"


def _described(value: Any, seen: dict[int, Any], depth: int) -> Any:
    """A plain value in the place of any other; ``seen`` holds those that were looked at."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, type | BuiltinFunctionType):
        return value.__module__, value.__qualname__
    kind = type(value).__module__, type(value).__qualname__
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple | set | frozenset | Mapping) and len(value) > _MANY:
        return *kind, len(value)
    if id(value) in seen or len(seen) > _MOST or depth > _DEEPEST:
        return kind
    seen[id(value)] = value

    def below(part: Any) -> Any:
        return _described(part, seen, depth + 1)

    if isinstance(value, set | frozenset):
        return *kind, sorted(map(repr, map(below, value)))
    if isinstance(value, list | tuple):
        return *kind, [below(item) for item in value]
    if isinstance(value, Mapping):
        return *kind, [(below(key), below(item)) for key, item in value.items()]
    if isinstance(value, FunctionType):
        return value.__module__, value.__qualname__, digest_of_code(value.__code__), below(caught(value))
    if isinstance(value, MethodType):
        return below(value.__func__), below(value.__self__)
    if isinstance(value, partial):
        return *kind, below((value.func, value.args, value.keywords))
    return *kind, below(_attributes(value))


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    found |= {name: getattr(value, name) for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)}
    if isinstance(value, nn.Module):
        return {k: v for k, v in found.items() if not k.startswith("_") or k in ("_parameters", "_modules")}
    return found

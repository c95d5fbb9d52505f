"""State that goes by task name, read back from a checkpoint: looked at, and brought to today's form."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["numbers_by_task", "refuse_state", "same_keys", "vector"]


def refuse_state(key: str, expected: str, value: Any) -> NoReturn:
    """Raises ValueError; whoever knows where the state came from puts that in front."""
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__} {value!r}"
    raise ValueError(f"[{key!r}]: expected {expected}, got {got[:100]}")


def numbers_by_task(key: str, value: Any, known: Sequence[str], *, counts: bool = False) -> dict[str, Any]:
    """A mapping task name -> finite number (``counts``: integer >= 0), of known tasks alone."""
    if type(value) is not dict or not set(value) <= set(known):
        refuse_state(key, f"numbers by task name, of {list(known)}", value)
    for number in value.values():
        fits = type(number) is int and number >= 0 if counts else _is_finite(number)
        if not fits:
            refuse_state(key, "integers >= 0" if counts else "finite numbers", value)
    return dict(value)


def _is_finite(number: Any) -> bool:
    return type(number) in (int, float) and math.isfinite(number)


def vector(key: str, value: Any, length: int, *, or_none: bool = False) -> Tensor | None:
    """A tensor of so many finite numbers."""
    if value is None and or_none:
        return None
    fits = isinstance(value, Tensor) and value.is_floating_point() and value.shape == (length,)
    if not fits or not bool(torch.isfinite(value).all()):
        refuse_state(key, f"{length} finite numbers in a tensor{' or None' if or_none else ''}", value)
    tensor: Tensor = value
    return tensor


def same_keys(state: Any, keys: Sequence[str]) -> Mapping[str, Any]:
    """The state, which has these keys and no others."""
    if type(state) is not dict or set(state) != set(keys):
        raise ValueError(f": expected a dict with the keys {sorted(keys)}, got "
                         f"{sorted(map(str, state)) if isinstance(state, dict) else type(state).__name__}")  # fmt: skip
    return state

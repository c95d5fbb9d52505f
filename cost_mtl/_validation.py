"""Checks of arguments: each error names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real


def one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises ValueError unless ``value`` is among ``allowed``."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def at_least(name: str, value: object, least: int) -> None:
    """Raises ValueError unless ``value`` is an integer (not a bool) from ``least`` upwards."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")


def positive(name: str, value: object, *, or_none: bool = False) -> None:
    """Raises ValueError unless ``value`` is a number > 0 (not a bool, not NaN), or None where that is allowed."""
    if or_none and value is None:
        return
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > 0:
        raise ValueError(f"{name}: expected a number > 0{' or None' if or_none else ''}, got {value!r}")


def number(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a real number (not a bool, not NaN; infinite ones will do)."""
    if not isinstance(value, Real) or isinstance(value, bool) or math.isnan(float(value)):
        raise ValueError(f"{name}: expected a number, got {value!r}")


def non_negative(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a number >= 0 (not a bool, not NaN)."""
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) >= 0:
        raise ValueError(f"{name}: expected a number >= 0, got {value!r}")


def integer(name: str, value: object) -> None:
    """Raises TypeError unless ``value`` is an integer (not a bool)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an integer, got {value!r}")


def type_name(value: object) -> str:
    """What an error calls a value by: ``"the class X"`` for a class, else the name of its type."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__

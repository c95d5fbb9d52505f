"""Checks of arguments: each error names the argument, what was expected and what came.

All raise ValueError, for a wrong type as for a value out of range: a caller fixes both in the same place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import TypeGuard


def one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raises ValueError unless ``value`` is among ``allowed``, and of the same type (True is not 1)."""
    fits = any(isinstance(value, type(a)) and isinstance(value, bool) == isinstance(a, bool) and value == a
               for a in allowed)  # fmt: skip
    if not fits:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def boolean(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def integer(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is an integer (NumPy's included, not a bool)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}: expected an integer, got {value!r}")


def at_least(name: str, value: object, least: int) -> None:
    """Raises ValueError unless ``value`` is an integer (not a bool) from ``least`` upwards."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a real number (NumPy's included, not a bool)."""
    return isinstance(value, Real) and not isinstance(value, bool)


def positive(name: str, value: object, *, or_none: bool = False) -> None:
    """Raises ValueError unless ``value`` is a number > 0 (not a bool, not NaN), or None where that is allowed."""
    if or_none and value is None:
        return
    if not is_number(value) or not value > 0:
        raise ValueError(f"{name}: expected a number > 0{' or None' if or_none else ''}, got {value!r}")


def number(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a real number (not a bool, not NaN; infinite ones will do)."""
    if not isinstance(value, Real) or isinstance(value, bool) or math.isnan(float(value)):
        raise ValueError(f"{name}: expected a number, got {value!r}")


def non_negative(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a number >= 0 (not a bool, not NaN)."""
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value) >= 0:
        raise ValueError(f"{name}: expected a number >= 0, got {value!r}")


def type_name(value: object) -> str:
    """What an error calls a value by: ``"the class X"`` for a class, else the name of its type."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def finite(name: str, value: object, *, least: float = -math.inf, above: float = -math.inf) -> None:
    """Raises ValueError unless ``value`` is a finite number, and >= ``least``, and > ``above``."""
    fits = is_number(value) and math.isfinite(value) and value >= least and value > above
    if not fits:
        bound = f" >= {least:g}" if least > -math.inf else f" > {above:g}" if above > -math.inf else ""
        raise ValueError(f"{name}: expected a finite number{bound}, got {value!r}")


def share(name: str, value: object, *, zero: bool) -> None:
    """Raises ValueError unless ``value`` is a number in [0, 1], or in (0, 1] where ``zero`` is False."""
    if not is_number(value) or not 0 <= value <= 1 or (value == 0 and not zero):
        raise ValueError(f"{name}: expected a number in {'[' if zero else '('}0, 1], got {value!r}")

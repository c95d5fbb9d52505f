"""Settings and state of a base optimizer in a checkpoint: each of a kind that its next step can use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cost_mtl._torch.dtensor import local

__all__ = ["odd_setting", "odd_state"]

NEVER_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "acc_delta", "sum", "row_var", "col_var")
"""Sums and means of squares or sizes: roots are taken of them."""


def odd_setting(group: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first setting of a saved group that is of another kind than the optimizer's own, and what was expected.

    Settings that the optimizer does not have are passed over: schedulers leave some there.
    """
    for name, mine in own.items():
        if name in group and name != "params":
            expected = _expected(group[name], mine)
            if expected:
                return name, expected
    return None


def _expected(value: Any, mine: Any) -> str:
    """What should be there, or "" if it is."""
    if isinstance(mine, bool):
        return "" if value is None or isinstance(value, bool) else "True or False"
    if mine is None:  # foreach, fused, momentum_decay: a flag or number, or neither
        return "" if value is None or isinstance(value, bool) or _is_number(value) else "a number, True, False or None"
    if _is_real(mine):
        endless = isinstance(value, float) and isinstance(mine, float) and value == mine  # norm limits of infinity
        return "" if _is_number(value) or endless else "a finite number"
    if isinstance(mine, tuple | list):
        fits = isinstance(value, tuple | list) and len(value) == len(mine)
        fits = fits and all(not _expected(v, m) for v, m in zip(value, mine, strict=True))
        return "" if fits else f"{len(mine)} numbers"
    return "" if type(value) is type(mine) else f"a {type(mine).__name__}"


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float | Tensor) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """A finite real number, also as a tensor (a learning rate that a graph has captured)."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        return value.device.type == "meta" or math.isfinite(float(value))
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def odd_state(
    states: Mapping[Any, Any], params: Sequence[tuple[Any, Tensor]], group: Mapping[str, Any]
) -> tuple[Any, str] | None:
    """The first parameter of a group whose state torch's next step would stop at, and what is wrong with it.

    Args:
        params: key and parameter of the group's parameters.
    """
    seen: dict[bool, tuple[Any, set[str]]] = {}
    for key, p in params:
        state = states.get(key)
        if not state:
            continue
        if not all(isinstance(name, str) for name in state):
            return key, "expected names as keys"
        # Adafactor keeps other things of matrices than of vectors.
        first, names = seen.setdefault(p.dim() > 1, (key, set(state)))
        if set(state) != names:
            odd = sorted(set(state) ^ names)
            return key, f"expected what parameter {first!r} has, they differ in {odd}"
        if group.get("amsgrad") is True and "max_exp_avg_sq" not in state:
            return key, "expected 'max_exp_avg_sq', since its group has amsgrad=True"
        for name, value in state.items():
            if value is None and name != "momentum_buffer":
                return key, f"['{name}']: expected a tensor or a number, got None"
            if name in NEVER_NEGATIVE and _has_negatives(value):
                return key, f"['{name}']: expected numbers >= 0"
    return None


def _has_negatives(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.device.type == "meta" or value.is_complex():
        return False
    return bool((local(value) < 0).any())

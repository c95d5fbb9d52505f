"""Weights in float32 that leave the tasks the rates that float64 found for them.

Where a task's rate (M w)_i = g_i^T d is a small difference of large terms, half a unit in the last digit of each weight
changes it far more than it changes the weights. Which way the digits fall is chance; so of many multiples of w, all
within 3e-5 of it, the one is taken whose rounding hits the rates best.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["round_to_float32"]

_WIDTH = 3e-5
_MULTIPLES, _NUMBERS = 8000, 160_000
"""How many are tried, and how many weights are rounded for it at most: up to 5 ms."""

_HARMLESS = 5e-5


def round_to_float32(w: Tensor, M: Tensor, on_host: bool) -> Tensor:
    """w [K] in float32, from float64, with the largest relative change of a positive rate (M w)_i kept small.

    Plain rounding wherever that changes no rate by more than 5e-5. Otherwise the change falls below 1e-4 where one or
    a few rates are sensitive; with dozens of such tasks there is no cheap search for digits that suit them all. Off
    the host nothing may be read back, so the search is done in any case.
    """
    rates = M @ w
    plain = w.to(torch.float32)
    harm = _change(plain[:, None], M, rates)
    if on_host and not bool(harm > _HARMLESS):
        return plain
    multiples = 1 + _WIDTH * torch.linspace(
        -1, 1, min(_MULTIPLES, max(_NUMBERS // len(w), 2)), dtype=torch.float64, device=w.device
    )
    rounded = (w[:, None] * multiples).to(torch.float32)
    best = rounded.index_select(1, _change(rounded, M, rates).argmin().reshape(1)).squeeze(1)
    return torch.where(harm > _HARMLESS, best, plain)


def _change(W: Tensor, M: Tensor, rates: Tensor) -> Tensor:
    """Largest relative change of a positive rate, for each column of W [K, n]: [n]."""
    changes = (M @ W.to(torch.float64) / rates[:, None] - 1).abs()
    return changes.where(rates[:, None] > 0, 0.0).amax(0)

"""Weights in float32 that leave the tasks the rates that float64 found for them.

Where a task's rate (M w)_i = g_i^T d is a small difference of large terms, half a unit in the last digit of each weight
changes it far more than it changes the weights. Instead of rounding each weight by itself, they are rounded one after
the other, those that matter most first, each so that it makes up for the ones before (Babai's nearest plane). What the
last ones leave is chance, so this is done for many multiples of w, all within 3e-5 of it, and the best taken.
"""

from __future__ import annotations

import numpy as np

from cost_mtl.weighting._solvers.matrix import Array

__all__ = ["round_to_float32"]

_WIDTH = 3e-5
_MULTIPLES, _NUMBERS = 4000, 10_000
"""How many multiples are tried, and how many weights are rounded for it at most: 1 to 3 ms."""

_HARMLESS, _NEAR = 5e-5, 1e-4
"""Change of a rate that asks for no search; largest change of a weight that a search may come up with."""


def round_to_float32(w: Array, M: Array) -> Array:
    """w [K] >= 0 in float32 (NumPy arrays; M [K, K]), with the largest relative change of a positive rate (M w)_i kept
    small.

    Plain rounding wherever that changes no rate by more than 5e-5. Otherwise the best found within 1e-4 of w: good to
    1e-4 where the digits are there, which they are not if most rates are ten thousand times smaller than their terms.
    """
    plain = w.astype(np.float32)
    harm = _change(plain[:, None], w, M)[0]
    if not harm > _HARMLESS:
        return plain
    free = np.flatnonzero(plain > np.finfo(np.float32).tiny)
    multiples = 1 + _WIDTH * np.linspace(-1, 1, min(_MULTIPLES, 2 + _NUMBERS // len(w)))
    candidates = np.repeat(plain[:, None], len(multiples), axis=1)
    candidates[free] = _nearest_planes(w[free], multiples, M[np.ix_(free, free)], (M @ w)[free])
    near = (abs(candidates[free] / w[free, None] - 1) <= _NEAR).all(axis=0)
    changes = np.where(near, _change(candidates, w, M), np.inf)
    best = int(changes.argmin())
    return candidates[:, best] if changes[best] < harm else plain


def _nearest_planes(w: Array, multiples: Array, M: Array, rates: Array) -> Array:
    """Float32 numbers [K, n] near w [K] times each of the multiples [n]."""
    plain = w.astype(np.float32)
    digit = np.spacing(plain).astype(np.float64)
    # What one last digit of each weight changes, relative: the rates, and the weight itself.
    A = M * digit / np.where(rates > 0, rates, np.inf)[:, None] + np.diag(digit / w)
    order = np.linalg.norm(A, axis=0).argsort()
    R = np.asarray(np.linalg.qr(A[:, order], mode="r"))
    scale = np.where(R.diagonal() == 0, 1.0, R.diagonal())  # 0: this weight can't make up for anything
    wanted = ((w[:, None] * multiples - plain[:, None]) / digit[:, None])[order]
    steps: Array = np.zeros_like(wanted)
    for k in range(len(w) - 1, -1, -1):
        rest = wanted[k + 1 :] - steps[k + 1 :]
        steps[k] = np.rint(wanted[k] + R[k, k + 1 :] @ rest / scale[k])
    found = np.empty_like(steps)
    found[order] = steps
    return (plain[:, None] + found * digit[:, None]).astype(np.float32)


def _change(W: Array, w: Array, M: Array) -> Array:
    """Largest relative change of a positive rate in each column of W [K, n]: [n]."""
    rates = M @ w
    inside = rates > 0
    changes: Array = abs((M @ W.astype(np.float64))[inside] / rates[inside, None] - 1).max(axis=0, initial=0.0)
    return changes

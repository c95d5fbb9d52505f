"""Delta m and mean rank, as the papers define them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["delta_m", "delta_m_interval", "mean_and_error", "mean_rank", "mean_rank_interval"]

Array = NDArray[np.float64]


def delta_m(values: ArrayLike, baseline: ArrayLike, higher_is_better: Sequence[bool]) -> float:
    """Delta m in per cent: the mean over all metrics of the relative change from the baseline, signed so that lower
    is better (Maninis et al. 2019, as used by Nash-MTL and all papers after it).

    100/N sum_n (-1)^{d_n} (M_n - B_n)/B_n, with d_n = 1 where higher is better. LibMTL averages within each task
    first and has the opposite sign.

    Args:
        values: M [N].
        baseline: B [N] of the single-task networks, in the same order and units.
        higher_is_better: d [N].

    Raises:
        ValueError: if the lengths differ.
    """
    m, b, sign = _aligned(values, baseline, higher_is_better)
    return float(100 * np.mean(sign * (m - b) / b))


def delta_m_interval(
    values: ArrayLike,
    baseline: ArrayLike,
    higher_is_better: Sequence[bool],
    half_steps: ArrayLike,
) -> tuple[float, float]:
    """Smallest and largest Delta m that values rounded to ± ``half_steps`` [N] (both rows) can have come from."""
    m, b, sign = _aligned(values, baseline, higher_is_better)
    h = np.asarray(half_steps, np.float64)
    # (M - B)/B = M/B - 1 is monotone in M and in B for positive values: the corners are the extremes
    corners = np.stack([sign * ((m + i * h) / (b + j * h) - 1) for i in (-1, 1) for j in (-1, 1)])
    return float(100 * corners.min(0).mean()), float(100 * corners.max(0).mean())


def mean_rank(
    table: ArrayLike, higher_is_better: Sequence[bool], *, ties: Literal["min", "average", "max"] = "min"
) -> Array:
    """Mean over the metrics of each method's rank, 1 the best; leave the baseline out of ``table`` [methods, N].

    ``ties``: equal values share the smallest rank they span (FAMO's and later papers), the average one (Nash-MTL's
    CityScapes table) or the largest one.

    Raises:
        ValueError: if ``table`` does not have N columns.
    """
    values = np.asarray(table, np.float64)
    if values.ndim != 2 or values.shape[1] != len(higher_is_better):
        raise ValueError(f"table: expected [methods, {len(higher_is_better)}], got {values.shape}")
    loss = np.where(np.asarray(higher_is_better), -values, values)
    better = (loss[None] < loss[:, None]).sum(1)  # [i, n]: methods that beat i
    equal = (loss[None] == loss[:, None]).sum(1)  # itself included
    shift = {"min": 1.0 + 0 * equal, "average": (1 + equal) / 2, "max": 1.0 * equal}[ties]
    return (better + shift).mean(1)


def mean_rank_interval(table: ArrayLike, higher_is_better: Sequence[bool]) -> tuple[Array, Array]:
    """Smallest and largest mean rank of each method when ties in a rounded table may have been none before."""
    return mean_rank(table, higher_is_better, ties="min"), mean_rank(table, higher_is_better, ties="max")


def mean_and_error(values: ArrayLike) -> tuple[float, float]:
    """Mean and its standard error over seeds (sample standard deviation over the root of n; NaN for one seed)."""
    array = np.asarray(values, np.float64)
    error = array.std(ddof=1) / np.sqrt(array.size) if array.size > 1 else np.nan
    return float(array.mean()), float(error)


def _aligned(values: ArrayLike, baseline: ArrayLike, higher_is_better: Sequence[bool]) -> tuple[Array, Array, Array]:
    m, b = np.asarray(values, np.float64), np.asarray(baseline, np.float64)
    if not m.shape == b.shape == (len(higher_is_better),):
        raise ValueError(f"values, baseline: expected [{len(higher_is_better)}] each, got {m.shape} and {b.shape}")
    return m, b, np.where(np.asarray(higher_is_better), -1.0, 1.0)

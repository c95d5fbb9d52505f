"""What a move has to keep: each task's loss, or the mean loss alone (``Acceptance.invariance``)."""

from __future__ import annotations

import torch
from torch import Tensor


def kept_rows(rows: Tensor, invariance: str) -> Tensor:
    """What has to stay as it is, [C, ...] from one row per task [K, ...]: each row, or the mean of them alone."""
    return rows.mean(dim=0, keepdim=True) if invariance == "mean" else rows


def relative_change(before: Tensor, after: Tensor, invariance: str = "each") -> float:
    """Largest relative change of what has to be kept.

    ``"each"``: max_i |L_i' - L_i| / |L_i|. ``"mean"``: |mean_i (L_i' - L_i)| / mean_i |L_i|, so that losses of either
    sign which cancel do not matter. A reference that is exactly 0 has to stay so (else inf). NaN counts as inf.
    """
    change = kept_rows(after - before, invariance).abs()
    relative = torch.where(change == 0, 0.0, change / kept_rows(before.abs(), invariance))
    return float(torch.where(relative.isnan(), torch.inf, relative).max())


def mean_rise(before: Tensor, after: Tensor, invariance: str = "each") -> float:
    """Mean relative rise of what has to be kept: of each task's loss, or of the mean loss; references of 0 left out."""
    change, size = kept_rows(after - before, invariance), kept_rows(before.abs(), invariance)
    return float((change[size > 0] / size[size > 0]).mean()) if bool((size > 0).any()) else 0.0

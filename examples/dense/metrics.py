"""The metrics of the tables, pooled over all pixels of an epoch; ``faithful=True`` gives the public scripts' means.

==================  ============================================  ================================================
metric              here                                          public scripts (``faithful``)
==================  ============================================  ================================================
mIoU                mean over the classes seen in truth or        mean over all classes: NaN when one is absent
                    prediction
depth errors        mean over all valid pixels                    mean of the batches' means, whatever their size
normals: mean,      over all valid pixels                         mean of the batches' means (and of the batches'
median, shares                                                    medians, which is no median)
valid normals       any component non-zero                        components do not sum to zero
a task without      NaN, and the table shows it as "–"            NaN
valid pixel
==================  ============================================  ================================================

The public scripts also hand the training confusion matrix of one epoch on to the next with the test pixels in it; here
a meter lives for one pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dense.losses import VOID, depth_mask, normal_mask

__all__ = ["ConfusionMatrix", "DenseMeter", "DepthErrors", "NormalErrors"]

NAN = math.nan
_SHARES = (11.25, 22.5, 30.0)


class ConfusionMatrix:
    """Counts [C, C] (row: truth, column: prediction) on the predictions' device, without a host read per batch."""

    def __init__(self, classes: int, *, faithful: bool = False) -> None:
        self.classes, self.faithful = classes, faithful
        self._counts: Tensor | None = None

    def update(self, scores: Tensor, target: Tensor) -> None:
        """Scores [B, C, H, W] (the largest wins) against labels [B, H, W], void left out."""
        if self._counts is None:
            # one cell more, for the void pixels: no data-dependent shape, so no host read
            self._counts = torch.zeros(self.classes**2 + 1, dtype=torch.int64, device=scores.device)
        cell = target * self.classes + scores.argmax(1)
        cell = torch.where(target == VOID, self.classes**2, cell).flatten()
        self._counts.scatter_add_(0, cell, torch.ones_like(cell))

    @property
    def counts(self) -> Tensor:
        """[C, C] on the CPU."""
        if self._counts is None:
            return torch.zeros(self.classes, self.classes, dtype=torch.int64)
        return self._counts[:-1].reshape(self.classes, self.classes).cpu()

    def compute(self) -> dict[str, float]:
        """``mIoU`` and ``pix_acc`` in per cent; NaN without a labelled pixel."""
        counts = self.counts.double()
        hit, union = counts.diagonal(), counts.sum(0) + counts.sum(1) - counts.diagonal()
        iou = hit / union  # 0/0 = NaN for an absent class
        mean = iou.mean() if self.faithful else iou.nanmean()
        return {"mIoU": 100 * mean.item(), "pix_acc": 100 * (hit.sum() / counts.sum()).item()}


class DepthErrors:
    """Absolute and relative error over valid pixels."""

    def __init__(self, *, faithful: bool = False) -> None:
        self.faithful = faithful
        self._sums: list[Tensor] = []

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Both [B, 1, H, W]."""
        mask = depth_mask(target)
        error = torch.where(mask, (prediction.double() - target).abs(), 0.0)
        relative = torch.where(mask, error / target.abs(), 0.0)
        self._sums.append(torch.stack([error.sum(), relative.sum(), mask.sum().double()]))

    def compute(self) -> dict[str, float]:
        """``abs_err`` in the target's unit and ``rel_err``; NaN without a valid pixel."""
        if not self._sums:
            return {"abs_err": NAN, "rel_err": NAN}
        sums = torch.stack(self._sums).cpu()
        means = (sums[:, :2] / sums[:, 2:]).mean(0) if self.faithful else sums[:, :2].sum(0) / sums[:, 2].sum()
        return {"abs_err": means[0].item(), "rel_err": means[1].item()}


class NormalErrors:
    """Angle between predicted and true normals, in degrees. Keeps every valid angle (4 bytes a pixel, 290 MB for
    NYUv2's validation set) on the CPU, since a median cannot be had from sums."""

    def __init__(self, *, faithful: bool = False) -> None:
        self.faithful = faithful
        self._angles: list[Tensor] = []

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Both [B, 3, H, W]; the prediction at unit length."""
        mask = normal_mask(target, faithful=self.faithful)[:, 0]
        cosine = (prediction.double() * target).sum(1)[mask].clamp(-1, 1)
        self._angles.append(torch.rad2deg(torch.acos(cosine)).float().cpu())

    def compute(self) -> dict[str, float]:
        """``normal_mean``, ``normal_median`` in degrees, the shares ``within_*`` in per cent; NaN without pixels."""
        if self.faithful:
            rows = [_angle_statistics(angles) for angles in self._angles]
            return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]} if rows else _angle_statistics()
        return _angle_statistics(torch.cat(self._angles)) if self._angles else _angle_statistics()


def _angle_statistics(angles: Tensor | None = None) -> dict[str, float]:
    if angles is None or angles.numel() == 0:
        return dict.fromkeys(("normal_mean", "normal_median", *(f"within_{share:g}" for share in _SHARES)), NAN)
    result = {"normal_mean": angles.double().mean().item(), "normal_median": _median(angles)}
    for share in _SHARES:
        result[f"within_{share:g}"] = 100 * (angles < share).double().mean().item()
    return result


def _median(values: Tensor) -> float:
    """The mean of the two middle values for an even count, as NumPy has it (torch.median takes the lower one)."""
    upper = values.numel() // 2
    high = values.kthvalue(upper + 1).values.item()
    return high if values.numel() % 2 else (values.kthvalue(upper).values.item() + high) / 2


class DenseMeter:
    """All metrics of the given tasks over one pass."""

    def __init__(self, tasks: tuple[str, ...], classes: int, *, faithful: bool = False) -> None:
        makers = {
            "segmentation": lambda: ConfusionMatrix(classes, faithful=faithful),
            "depth": lambda: DepthErrors(faithful=faithful),
            "normal": lambda: NormalErrors(faithful=faithful),
        }
        self._meters: dict[str, ConfusionMatrix | DepthErrors | NormalErrors] = {task: makers[task]() for task in tasks}

    def update(self, output: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Add one batch."""
        for task, meter in self._meters.items():
            meter.update(output[task], target[task])

    def compute(self) -> dict[str, float]:
        """Metric name -> value."""
        return {name: value for meter in self._meters.values() for name, value in meter.compute().items()}

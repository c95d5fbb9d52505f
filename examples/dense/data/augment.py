"""The augmentation of the benchmarks: random zoom and crop, horizontal flip. Pure functions on one sample.

Two conventions, chosen by ``faithful``:

=================  ==========================================  =====================================================
what               public scripts (``faithful=True``)           right (default)
=================  ==========================================  =====================================================
disparity          divided by the zoom s, like a depth          multiplied by s: a thing s times closer has s times
                                                                the disparity
normals            bilinear values as they are                  brought back to unit length; a pixel stays valid when
                                                                at least half of its bilinear weight was valid
=================  ==========================================  =====================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["SCALES", "View", "apply_view", "draw_view", "flip", "zoom"]

SCALES = (1.0, 1.2, 1.5)
"""Zoom factors of MTAN's augmentation."""


@dataclass(frozen=True)
class View:
    """One draw of the augmentation.

    Attributes:
        scale: zoom s; the crop has 1/s of the height and width.
        top, left: corner of the crop in pixels.
        flipped: mirrored left to right.
    """

    scale: float
    top: int
    left: int
    flipped: bool


def draw_view(height: int, width: int, rng: np.random.Generator) -> View:
    """Draw zoom, crop and flip (p = 0.5) uniformly."""
    scale = SCALES[rng.integers(len(SCALES))]
    crop_h, crop_w = int(height / scale), int(width / scale)
    top, left = rng.integers(height - crop_h + 1), rng.integers(width - crop_w + 1)
    return View(scale, int(top), int(left), bool(rng.random() < 0.5))


def apply_view(
    sample: Mapping[str, Tensor], view: View, *, disparity: bool, faithful: bool = False
) -> dict[str, Tensor]:
    """Zoom, crop and flip a sample of ``image`` [3, H, W] and any of ``segmentation`` [H, W], ``depth`` [1, H, W] and
    ``normal`` [3, H, W]. See the module's table for ``disparity`` and ``faithful``."""
    zoomed = zoom(sample, view, disparity=disparity, faithful=faithful)
    return flip(zoomed) if view.flipped else zoomed


def zoom(sample: Mapping[str, Tensor], view: View, *, disparity: bool, faithful: bool = False) -> dict[str, Tensor]:
    """Crop and resize back to H x W: image and normals bilinear with aligned corners, label and depth nearest."""
    if view.scale == 1.0:
        return dict(sample)
    height, width = sample["image"].shape[-2:]
    crop_h, crop_w = int(height / view.scale), int(width / view.scale)
    result = {}
    for field, value in sample.items():
        crop = value[..., view.top : view.top + crop_h, view.left : view.left + crop_w]
        if field == "segmentation":
            result[field] = _nearest(crop[None].float(), (height, width))[0].to(value.dtype)
        elif field == "depth":
            factor = view.scale if disparity and not faithful else 1 / view.scale
            result[field] = _nearest(crop, (height, width)) * factor
        elif field == "normal" and not faithful:
            result[field] = _resize_normals(crop, (height, width))
        else:
            result[field] = _bilinear(crop, (height, width))
    return result


def flip(sample: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mirror left to right; the normals' x (channel 0) changes sign."""
    result = {field: value.flip(-1) for field, value in sample.items()}
    if "normal" in result:
        result["normal"] = result["normal"] * torch.tensor([-1.0, 1.0, 1.0]).view(3, 1, 1)
    return result


def _nearest(value: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(value[None], size, mode="nearest")[0]


def _bilinear(value: Tensor, size: tuple[int, int]) -> Tensor:
    return functional.interpolate(value[None], size, mode="bilinear", align_corners=True)[0]


def _resize_normals(normal: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear mean of the valid neighbours, at unit length; all-zero (invalid) where too few of them are valid."""
    valid = (normal != 0).any(0, keepdim=True).float()
    weight = _bilinear(valid, size)
    direction = _bilinear(normal, size)
    # Opposite neighbours can cancel out: such a pixel has no direction and is invalid too.
    kept = (weight >= 0.5) & (direction.norm(dim=0, keepdim=True) > 1e-3)
    return torch.where(kept, functional.normalize(direction, dim=0), torch.zeros_like(direction))

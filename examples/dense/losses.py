"""The three losses of the benchmarks, as pure functions of prediction and target.

Where a batch has no valid pixel the public scripts divide by zero and every parameter becomes NaN. Here such a loss is
exactly 0 and its gradient zero: the batch says nothing about this task.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["VOID", "dense_losses", "depth_loss", "depth_mask", "normal_loss", "normal_mask", "segmentation_loss"]

VOID = -1
"""Label of the pixels without a class."""


def depth_mask(target: Tensor) -> Tensor:
    """Valid pixels of a depth map [B, 1, H, W]: those that are not 0."""
    return target != 0


def normal_mask(target: Tensor, *, faithful: bool = False) -> Tensor:
    """Valid pixels [B, 1, H, W] of normals [B, 3, H, W]: those with a non-zero component.

    ``faithful``: those whose components do not *sum* to 0, as the scripts have it; (0.6, -0.6, 0) is lost to that.
    """
    if faithful:
        return target.sum(1, keepdim=True) != 0
    return (target != 0).any(1, keepdim=True)


def segmentation_loss(log_probs: Tensor, target: Tensor) -> Tensor:
    """Mean negative log-likelihood of log-probabilities [B, C, H, W] over the pixels of [B, H, W] that are not void."""
    total = functional.nll_loss(log_probs, target, ignore_index=VOID, reduction="sum")
    return total / (target != VOID).sum().clamp(min=1)


def depth_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """Mean absolute error over the valid pixels of [B, 1, H, W]."""
    mask = depth_mask(target)
    return _masked_mean((prediction - target).abs(), mask)


def normal_loss(prediction: Tensor, target: Tensor, *, faithful: bool = False) -> Tensor:
    """1 - mean cosine over the valid pixels; both [B, 3, H, W], the prediction at unit length."""
    mask = normal_mask(target, faithful=faithful)
    return _masked_mean(1 - (prediction * target).sum(1, keepdim=True), mask)


def dense_losses(
    output: Mapping[str, Tensor], target: Mapping[str, Tensor], *, faithful: bool = False
) -> dict[str, Tensor]:
    """The loss of every task in ``output``, by name and in its order."""
    losses = {}
    for task, prediction in output.items():
        prediction = prediction.float()  # sums over 1e5 pixels: not in half precision
        if task == "segmentation":
            losses[task] = segmentation_loss(prediction, target[task])
        elif task == "depth":
            losses[task] = depth_loss(prediction, target[task])
        elif task == "normal":
            losses[task] = normal_loss(prediction, target[task], faithful=faithful)
        else:
            raise ValueError(f"output: expected tasks 'segmentation', 'depth' or 'normal', got {task!r}")
    return losses


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    # where, not a product: an invalid pixel may hold inf or NaN and must not reach the sum
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)

"""Constant predictors: what a network must beat to have learnt anything from the image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dense.losses import VOID, depth_mask, normal_mask
from dense.problem import DenseProblem

__all__ = ["Constants", "fit_constants", "trivial_metrics"]

Constants = dict[str, Tensor]
"""``segmentation`` [C] log-frequencies, ``depth`` [1] mean, ``normal`` [3] unit mean of the training pixels."""


def fit_constants(problem: DenseProblem) -> Constants:
    """Majority class, mean depth and mean normal over the valid pixels of the training set, not augmented."""
    classes = torch.zeros(problem.spec.classes, dtype=torch.float64)
    depth, normal = torch.zeros(2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for batch in problem.eval_loader("train"):
        labels = batch["segmentation"]
        classes += torch.bincount(labels[labels != VOID], minlength=len(classes))
        depth += torch.stack([batch["depth"].double().sum(), depth_mask(batch["depth"]).sum().double()])
        if "normal" in batch:
            valid = normal_mask(batch["normal"])
            normal += torch.where(valid, batch["normal"].double(), 0.0).sum((0, 2, 3))
    constants = {"segmentation": (classes / classes.sum()).log(), "depth": depth[:1] / depth[1]}
    if "normal" in problem.tasks:
        constants["normal"] = functional.normalize(normal, dim=0)
    return {task: value.float() for task, value in constants.items()}


def trivial_metrics(problem: DenseProblem) -> dict[str, float]:
    """Validation metrics of the constants."""
    constants = fit_constants(problem)
    meter = problem.meter(problem.tasks)
    for batch in problem.eval_loader("val"):
        size, shape = len(batch["image"]), batch["image"].shape[-2:]
        output = {task: value.view(1, -1, 1, 1).expand(size, -1, *shape) for task, value in constants.items()}
        meter.update(output, batch)
    return meter.compute()

"""Prediction panels: image, truth and prediction of every task for a few validation images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dense.engine.plots import new_figure, save_figure
from dense.problem import DenseProblem
from dense.spec import DenseSpec

__all__ = ["plot_panels"]

_DEPTH_NAMES = {False: "depth", True: "disparity"}


@torch.no_grad()
def plot_panels(path: Path, problem: DenseProblem, model: nn.Module, device: str, *, count: int = 3) -> Path:
    """Draw ``count`` validation images, evenly spread over the set, one row each. Void and invalid pixels are white;
    truth and prediction share their colour scale.

    Args:
        path: of the PNG.
        problem: the data set.
        model: trained, on ``device``; left in evaluation mode.
        device: where it is.
        count: rows (fewer if the set is smaller).
    """
    dataset = problem.eval_loader("val").dataset
    picked = sorted({round(i) for i in np.linspace(0, len(dataset) - 1, count)})  # type: ignore[arg-type]
    samples = [dataset[i] for i in picked]
    model.eval()
    output = model(torch.stack([sample["image"] for sample in samples]).to(device))
    columns = 1 + 2 * len(problem.tasks)
    height, width = samples[0]["image"].shape[-2:]
    figure = new_figure(2.1 * columns, (2.1 * height / width + 0.08) * len(samples) + 0.75)
    axes = figure.subplots(len(samples), columns, squeeze=False)
    for number, sample in enumerate(samples):
        row = axes[number]
        row[0].imshow(sample["image"].permute(1, 2, 0).clamp(0, 1).numpy())
        for position, task in enumerate(problem.tasks):
            pair = row[1 + 2 * position : 3 + 2 * position]
            _draw_pair(pair, task, sample[task], output[task][number].float().cpu(), problem.spec)
    titles = ["image"]
    for task in problem.tasks:
        name = _DEPTH_NAMES[problem.spec.disparity] if task == "depth" else task
        titles += [f"{name}: truth", "prediction"]
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    for axis in axes.ravel():
        axis.set_axis_off()
    _class_legend(figure, problem.spec, samples)
    return save_figure(figure, path)


def _draw_pair(axes: Sequence[Any], task: str, truth: Tensor, prediction: Tensor, spec: DenseSpec) -> None:
    if task == "segmentation":
        palette = _palette(spec.classes)
        labels = truth.numpy()
        axes[0].imshow(np.where((labels >= 0)[..., None], palette[labels.clip(min=0)], 1.0))
        axes[1].imshow(palette[prediction.argmax(0).numpy()])
    elif task == "depth":
        measured = truth[0] != 0
        low, high = (float(truth[0][measured].quantile(q)) for q in (0.01, 0.99)) if measured.any() else (0.0, 1.0)
        scale = {"cmap": "magma" if spec.disparity else "viridis", "vmin": low, "vmax": high}
        axes[0].imshow(torch.where(measured, truth[0], torch.nan).numpy(), **scale)
        axes[1].imshow(prediction[0].numpy(), **scale)
    else:
        valid = (truth != 0).any(0)[..., None].numpy()
        axes[0].imshow(np.where(valid, (truth.permute(1, 2, 0).numpy() + 1) / 2, 1.0))
        axes[1].imshow((prediction.permute(1, 2, 0).clamp(-1, 1).numpy() + 1) / 2)


def _palette(classes: int) -> np.ndarray:
    from matplotlib import colormaps

    colours = np.asarray(colormaps["tab20"](np.arange(20)))[:, :3]
    # the strong colours first, the pale ones after them
    return np.concatenate([colours[0::2], colours[1::2]])[np.arange(classes) % 20]


def _class_legend(figure: Any, spec: DenseSpec, samples: Sequence[dict[str, Tensor]]) -> None:
    from matplotlib.patches import Patch

    seen = sorted({int(label) for sample in samples for label in sample["segmentation"].unique() if label >= 0})
    palette = _palette(spec.classes)
    handles = [Patch(color=palette[label], label=spec.class_names[label]) for label in seen]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(8, max(1, len(handles))), frameon=False, fontsize=8
    )

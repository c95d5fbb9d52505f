"""Curves of the metrics over the epochs. matplotlib is imported when a plot is drawn, without a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dense.engine.problem import EpochRow, Metric

__all__ = ["COLOURS", "new_figure", "plot_metrics", "save_figure"]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8C6D31", "#000000")
"""Okabe and Ito's palette: apart for colour-blind readers too."""
_MOST_TASKS = 8
"""With more tasks than this their training losses share one panel."""
_STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25}

Curves = Mapping[str, Sequence[Sequence[EpochRow]]]
"""Row label -> the history of each seed."""


def new_figure(width: float, height: float) -> Any:
    """A figure in inches that needs no display."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(_STYLE)
    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> Path:
    """Write a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def plot_metrics(
    path: Path,
    curves: Curves,
    metrics: Sequence[Metric],
    split: str,
    *,
    lines: Mapping[str, Mapping[str, float]] | None = None,
    title: str = "",
) -> Path:
    """One panel a metric: mean over seeds with a band of one standard error, and the mean training loss of each task.

    Args:
        path: of the PNG.
        curves: what is drawn.
        metrics: the panels.
        split: whose metrics.
        lines: name -> metric -> value, drawn as horizontal lines (single-task networks, a trivial predictor).
        title: above the panels.
    """
    tasks = list(dict.fromkeys(task for runs in curves.values() for run in runs for row in run for task in row.train))
    tasks = tasks if len(tasks) <= _MOST_TASKS else [f"mean of {len(tasks)} tasks"]
    panels = len(metrics) + len(tasks)
    columns = min(4, panels)
    rows = math.ceil(panels / columns)
    figure = new_figure(3.1 * columns, 2.35 * rows + 0.7)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, metric in zip(axes, metrics, strict=False):
        _curves(axis, curves, lambda row, name=metric.name: row.metrics.get(split, {}).get(name, math.nan))
        for style, (name, values) in zip(("--", ":", "-."), (lines or {}).items(), strict=False):
            if not math.isnan(values.get(metric.name, math.nan)):
                axis.axhline(values[metric.name], color="0.35", linestyle=style, linewidth=1.1, label=name)
        axis.set_title(metric.label)
    for axis, task in zip(axes[len(metrics) :], tasks, strict=False):
        _curves(axis, curves, lambda row, name=task: row.train.get(name, np.mean(list(row.train.values()))))
        axis.set_title(f"training loss: {task}")
        low, high = axis.get_ylim()
        if low > 0 and high > 5 * low:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}" if high < 20 * low else "")
    for axis in axes[panels:]:
        axis.set_axis_off()
    for axis in axes[max(0, panels - columns) : panels]:
        axis.set_xlabel("epoch")
    _legend(figure, axes)
    if title:
        figure.suptitle(title, fontsize=11)
    return save_figure(figure, path)


def _curves(axis: Any, curves: Curves, value: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, (label, runs) in enumerate(curves.items()):
        points = _by_epoch(runs, value)
        if not points:
            continue
        epochs = np.array(sorted(points))
        mean = np.array([np.mean(points[epoch]) for epoch in epochs])
        error = np.array([np.std(points[e], ddof=1) / math.sqrt(len(points[e])) if len(points[e]) > 1 else 0.0
                          for e in epochs])  # fmt: skip
        colour = COLOURS[number % len(COLOURS)]
        axis.plot(epochs, mean, color=colour, linewidth=1.4, marker="." if len(epochs) < 15 else "", label=label)
        if error.any():
            axis.fill_between(epochs, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)
    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.tick_params(labelsize=8)


def _by_epoch(runs: Sequence[Sequence[EpochRow]], value: Any) -> dict[int, list[float]]:
    points: dict[int, list[float]] = {}
    for run in runs:
        for row in run:
            number = value(row)
            if not math.isnan(number):
                points.setdefault(row.epoch, []).append(number)
    return points


def _legend(figure: Any, axes: Any) -> None:
    handles: dict[str, Any] = {}
    for axis in axes:
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    columns = min(6, len(handles))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)

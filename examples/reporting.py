"""What the small examples share to report their runs: delta_m, tables, files written whole, and a training plot."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

# ------------------------------------------------------------------------------------------------ numbers


def delta_m(values: ArrayLike, baseline: ArrayLike, higher_is_better: Sequence[bool] | None = None) -> float:
    """Delta_m in percent: the mean relative change for the worse against single-task nets; negative is better.

    100 * mean_j (-1)^(d_j) (M_j - B_j) / B_j with d_j = 1 where a higher metric is better (Maninis et al., CVPR 2019;
    the sign as in the CAGrad, Nash-MTL and FairGrad papers).

    Args:
        values: M [J], one metric per task (or several).
        baseline: B [J], the single-task nets' metrics.
        higher_is_better: [J]; by default no metric is (errors).

    Raises:
        ValueError: where the lengths differ or a baseline is 0.
    """
    metrics, base = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    signs = np.ones(base.shape) if higher_is_better is None else np.where(higher_is_better, -1.0, 1.0)
    if metrics.ndim != 1 or metrics.shape != base.shape or signs.shape != base.shape:
        raise ValueError(f"delta_m: expected vectors of one length, got {metrics.shape}, {base.shape}, {signs.shape}")
    if not base.all():
        raise ValueError(f"delta_m: expected baselines different from 0, got {base}")
    return float(100 * np.mean(signs * (metrics - base) / base))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error s / sqrt(n), s with n - 1 in the denominator; the error of one value is NaN."""
    if not values:
        raise ValueError("values: expected at least one, got none")
    if len(values) == 1:
        return float(values[0]), math.nan
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def with_error(values: Sequence[float], digits: int = 1) -> str:
    """``mean ± standard error``; the mean alone for a single value, a dash for none."""
    if not values:
        return "-"
    mean, error = mean_and_error(values)
    return f"{mean:.{digits}f}" if math.isnan(error) else f"{mean:.{digits}f} ± {error:.{digits}f}"


# ------------------------------------------------------------------------------------------------ files


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there completely or not at all, however the program ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary, 0o666 & ~_umask())  # as any other file: temporary ones are the owner's alone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Table:
    """Text cells: ``header`` [C], ``rows`` [R][C]."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """A Markdown table whose columns line up, the first to the left and the others to the right."""
        lines = [list(self.header), *(list(row) for row in self.rows)]
        widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(self.header))]
        rule = [("-" * widths[0]), *("-" * (width - 1) + ":" for width in widths[1:])]

        def render(cells: Sequence[str]) -> str:
            padded = [
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            return "| " + " | ".join(padded) + " |"

        return "\n".join([render(lines[0]), render(rule), *(render(line) for line in lines[1:])]) + "\n"

    def csv(self) -> str:
        """The same cells as CSV."""
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([self.header, *self.rows])
        return buffer.getvalue()


def save_table(stem: Path, table: Table, details: dict[str, Any]) -> None:
    """``stem.md`` and ``stem.csv`` with the table, ``stem.json`` with the numbers behind it."""
    write_whole(stem.with_suffix(".md"), table.markdown())
    write_whole(stem.with_suffix(".csv"), table.csv())
    write_whole(stem.with_suffix(".json"), json.dumps(details, indent=1) + "\n")


# ------------------------------------------------------------------------------------------------ plot


@dataclass(frozen=True)
class Jump:
    """One attempted teleport: its step, whether it was accepted, and the smallest cosine before it."""

    step: int
    accepted: bool
    before: float


@dataclass(frozen=True)
class Curves:
    """One run, for the plot.

    Attributes:
        label: of its row in the table; the runs of one label (its seeds) are drawn as one line with a band.
        losses: [E, K], per epoch and task.
        min_cosine: [S], per step: the smallest cosine of a task gradient with the mean gradient that the update was
            made from, so after the teleport where there was one.
        teleports: each attempt.
    """

    label: str
    losses: NDArray[np.float64]
    min_cosine: NDArray[np.float64]
    teleports: Sequence[Jump]


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean over the last ``window`` values (fewer at the start), of the same length."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    return (sums[stop] - sums[start]) / (stop - start)


def plot_training(path: Path, title: str, runs: Sequence[Curves], tasks: Sequence[str], loss_name: str) -> None:
    """Save a PNG: the losses of all rows, the losses per task of the last run, and its conflicts and teleports.

    Args:
        path: of the PNG.
        title: over the figure.
        runs: at least one; the last is the one shown in detail.
        tasks: their K names.
        loss_name: label of the losses' axes.
    """
    # Drawn through the object interface: importing pyplot would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplot_mosaic([["mean", "tasks"], ["cosine", "cosine"]], height_ratios=[1.15, 1])
    _draw_mean_losses(axes["mean"], runs, loss_name)
    _draw_task_losses(axes["tasks"], runs[-1], tasks, loss_name)
    _draw_conflicts(axes["cosine"], runs[-1])
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=130)
    write_whole(path, buffer.getvalue())


def _draw_mean_losses(axis: Any, runs: Sequence[Curves], loss_name: str) -> None:
    """The geometric mean over the tasks, in which each counts alike: the rows' means, and bands that span the seeds."""
    labels = list(dict.fromkeys(run.label for run in runs))
    methods = list(dict.fromkeys(label.removesuffix(" + COST") for label in labels))
    for label in labels:
        seeds = np.array([np.exp(np.log(run.losses).mean(axis=1)) for run in runs if run.label == label])
        epochs = np.arange(1, seeds.shape[1] + 1)
        method = label.removesuffix(" + COST")
        style = "-" if label == method else "--"
        (line,) = axis.plot(
            epochs, seeds.mean(axis=0), style, color=f"C{methods.index(method)}", label=f"{label} (n = {len(seeds)})"
        )
        axis.fill_between(epochs, seeds.min(axis=0), seeds.max(axis=0), color=line.get_color(), alpha=0.15, lw=0)
    axis.set(yscale="log", xlabel="epoch", ylabel=f"{loss_name}, geometric mean of the tasks", title="All runs")
    axis.legend(frameon=False, fontsize="small")


def _draw_task_losses(axis: Any, run: Curves, tasks: Sequence[str], loss_name: str) -> None:
    """One line for each task of one run."""
    from matplotlib import colormaps

    epochs = np.arange(1, len(run.losses) + 1)
    for index, task in enumerate(tasks):
        colour = colormaps["turbo"](0.05 + 0.9 * index / max(1, len(tasks) - 1))
        axis.plot(epochs, run.losses[:, index], color=colour, lw=1.2, label=task)
    axis.set(yscale="log", xlabel="epoch", ylabel=loss_name, title=f"Tasks: {run.label}, last seed")
    axis.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_conflicts(axis: Any, run: Curves) -> None:
    """The smallest cosine of every step, its running mean, and the teleports."""
    steps = np.arange(len(run.min_cosine))
    axis.axhline(0.0, color="0.3", lw=0.8)
    axis.plot(steps, run.min_cosine, color="C0", lw=0.4, alpha=0.5, label="each step")
    window = max(1, len(steps) // 30)
    axis.plot(steps, running_mean(run.min_cosine, window), color="C0", lw=1.6, label=f"mean of {window} steps")
    for accepted, face, name in ((True, "C3", "accepted"), (False, "none", "rejected")):
        jumps = [jump for jump in run.teleports if jump.accepted is accepted]
        if jumps:
            at = [jump.step for jump in jumps]
            label = f"teleport {name} ({len(jumps)}): before, after" if accepted else f"teleport {name} ({len(jumps)})"
            axis.vlines(at, [jump.before for jump in jumps], run.min_cosine[at], color="C3", lw=1.2)
            axis.plot(at, run.min_cosine[at], "^", ms=6, mfc=face, mec="C3", ls="none", label=label)
    axis.set(
        xlabel="step",
        ylabel="min$_i$ cos(g$_i$, g$_0$)",
        xlim=(0, max(1, len(steps) - 1)),
        title=f"Conflict with the mean gradient: {run.label}, last seed",
    )
    axis.legend(frameon=False, fontsize="small", ncols=4, loc="upper right")

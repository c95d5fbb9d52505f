"""The table and the plot of merge_digits.py."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from merge_digits_data import TASKS
from reporting import Table, with_error, write_whole

STARTS = ("task arithmetic", "anisotropic scaling")
CONTINUATIONS = (
    "equal epochs without DV-BASI",
    "DV-BASI",
    "DV-BASI, random directions",
    "DV-BASI, history",
    "DV-BASI, history with earlier points",
    "DV-BASI, entropy alone",
)
ROWS = (
    "pre-trained",
    "weight average",
    "TIES",
    "DARE",
    "Breadcrumbs",
    "task arithmetic",
    *(f"task arithmetic + {name}" for name in CONTINUATIONS),
    "rank pruning, entropy",
    "rank pruning, supervised",
    "anisotropic scaling, entropy",
    "anisotropic scaling",
    *(f"anisotropic scaling + {name}" for name in CONTINUATIONS),
    "task arithmetic, all weights tuned",
    "trained on all tasks jointly",
    "individually fine-tuned",
    "individually fine-tuned + DV-BASI",
)
"""The table's rows, in its order."""


def means(results: Sequence[dict[str, Any]], row: str) -> list[float]:
    """Mean accuracy over the tasks, for each seed."""
    return [float(np.mean(result["accuracy"][row])) for result in results]


def table(results: Sequence[dict[str, Any]]) -> Table:
    """Means over the seeds with their standard errors; gains are paired by seed."""
    tuned = np.array(means(results, "individually fine-tuned"))
    rows = []
    for row in ROWS:
        values = np.array(means(results, row))
        start = next((name for name in (*STARTS, "individually fine-tuned") if row.startswith(name + " + ")), None)
        gain = with_error(list(values - np.array(means(results, start))), 2) if start else ""
        tasks = np.mean([result["accuracy"][row] for result in results], axis=0)
        share = f"{float(np.mean(100 * values / tuned)):.1f}"
        rows.append([row, with_error(list(values)), gain, share, *(f"{task:.1f}" for task in tasks)])
    return Table(["test accuracy, %", "mean of the tasks", "gain over start", "% of fine-tuned", *TASKS], rows)


def plot(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Test accuracy over the iterations, mean and standard error over the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    *panels, last = figure.subplots(1, 3)
    for axis, start in zip(panels, STARTS, strict=True):
        for name in CONTINUATIONS[1:-1]:
            draw(axis, results, f"{start} + {name}", name)
        control = float(np.mean(means(results, f"{start} + {CONTINUATIONS[0]}")))
        axis.axhline(control, color="0.4", ls="--", lw=1, label=CONTINUATIONS[0])
        axis.set_title(f"from {start}")
    for start in STARTS:
        draw(last, results, f"{start} + {CONTINUATIONS[-1]}", f"from {start}")
    last.set_title(CONTINUATIONS[-1])
    for axis in (*panels, last):
        axis.set(xlabel="iteration", ylabel="mean test accuracy, %")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize="small")
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_whole(path, buffer.getvalue())


def draw(axis: Any, results: Sequence[dict[str, Any]], row: str, label: str) -> None:
    curves = np.array([result["curves"][row] for result in results])
    error = curves.std(axis=0, ddof=1) / math.sqrt(len(curves)) if len(curves) > 1 else 0 * curves[0]
    mean = curves.mean(axis=0)
    (line,) = axis.plot(mean, "o-", label=label)
    axis.fill_between(range(len(mean)), mean - error, mean + error, color=line.get_color(), alpha=0.12, lw=0)

"""The trade-offs of a teleport as curves: what is gained over what the losses drift, each curve a swept setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cost_mtl import Acceptance, LevelSet, LoRATeleporter, Penalty

ANY = {"min_angle": float("-inf"), "min_norm": float("-inf")}
UNBOUNDED = Acceptance(tolerance=1e9, tolerance_heldout=1e9, **ANY)
"""Every move is accepted, so that its drift and its gain are seen; a level-set step still keeps its own tolerances."""


def heldout(objective: str, tolerance: float) -> LoRATeleporter:
    return LoRATeleporter(objective=objective, acceptance=Acceptance(tolerance_heldout=tolerance, **ANY))


def constraints(batches: int) -> LoRATeleporter:
    return LoRATeleporter(objective="conflict", solver=LevelSet(constraints=batches), acceptance=Acceptance(**ANY))


def penalty(objective: str, steps: int) -> LoRATeleporter:
    return LoRATeleporter(objective=objective, solver=Penalty(steps=steps), acceptance=UNBOUNDED)


SWEEPS: dict[str, dict[str, LoRATeleporter]] = {
    "level set, conflict: held-out tolerance": {
        f"{t:.0%}": heldout("conflict", t) for t in (0.01, 0.02, 0.05, 0.1, 0.2)
    },
    "level set, norm: held-out tolerance": {f"{t:.0%}": heldout("norm", t) for t in (0.01, 0.02, 0.05, 0.1, 0.2)},
    "level set, conflict: constraint batches": {str(n): constraints(n) for n in (0, 1, 2, 3)},
    "penalty, conflict-exact: Adam steps": {str(n): penalty("conflict-exact", n) for n in (1, 3, 10, 30)},
    "penalty, norm-exact: Adam steps": {str(n): penalty("norm-exact", n) for n in (1, 3, 10, 30)},
    "penalty, sphere: Adam steps": {str(n): penalty("sphere", n) for n in (3, 10)},
}
"""Family -> value of the swept setting -> teleporter."""


def point(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the moments; a moment without a move counts as no drift and no gain."""

    def median(values: list[float]) -> float:
        return statistics.median(values)

    moved = [r if r["accepted"] else None for r in rows]
    return {
        "heldout": 100 * median([r["heldout"] if r else 0.0 for r in moved]),
        "cosine": median([r["cos_after"] - r["cos_before"] if r else 0.0 for r in moved]),
        "norm": 100 * (median([r["norm_ratio"] if r else 1.0 for r in moved]) - 1),
        "steps": median([r["steps"] for r in rows]),
    }


def plot(path: Path, results: Mapping[str, Mapping[str, Mapping[str, Sequence[dict[str, Any]]]]]) -> None:
    """One column a problem; rows: rise of the smallest cosine, of the gradient norms, and cost, over held-out drift."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(results), 11), layout="constrained")
    axes = figure.subplots(3, len(results), squeeze=False)
    rows = {"cosine": "rise of the smallest cosine", "norm": "rise of the gradient norms, %", "steps": "cost, steps"}
    for column, (problem, families) in enumerate(results.items()):
        for family, settings in families.items():
            points = [point(found) for found in settings.values()]
            for axis, quantity in zip(axes[:, column], rows, strict=True):
                x, y = [p["heldout"] for p in points], [p[quantity] for p in points]
                (line,) = axis.plot(x, y, "o-", ms=5, label=family)
                for label, a, b in zip(settings, x, y, strict=True):
                    axis.annotate(label, (a, b), textcoords="offset points", xytext=(4, 4), fontsize=7,
                                  color=line.get_color())  # fmt: skip
        for axis, name in zip(axes[:, column], rows.values(), strict=True):
            axis.set(xlabel="held-out drift of the losses, % (median)", ylabel=name, xscale="symlog", title=problem)
            axis.axvline(5, color="0.6", ls=":", lw=1)
            axis.axhline(0, color="0.6", lw=0.7)
            axis.spines[["top", "right"]].set_visible(False)
        axes[1, column].set_yscale("symlog")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    FigureCanvasAgg(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)

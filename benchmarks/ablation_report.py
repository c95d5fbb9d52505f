"""Tables and plot of ``ablation.py``: paired differences over seeds, with their standard errors."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ablation_arms import ARMS, MAIN
from ablation_problems import steps_per_epoch
from ablation_run import Settings
from reporting import Table, delta_m, mean_and_error, write_whole  # of examples/, which problems.py has put on the path

THRESHOLD_AT = 0.75
"""The fixed training loss is what the plain runs reach, on average, after this share of the epochs."""

NAMES = {"qm9": "QM9", "multimnist": "MultiMNIST", "cagrad": "CAGrad", "nashmtl": "Nash-MTL", "fairgrad": "FairGrad",
         "adam": "Adam", "sgd": "SGD"}  # fmt: skip

Setting = tuple[str, str, str]
"""(problem, weighting, optimizer)"""


@dataclass
class Results:
    """Records by setting, arm and seed.

    Attributes:
        runs: setting -> arm -> seed -> record.
        baselines: (problem, optimizer) -> test metrics [K] of single-task networks, mean over their seeds.
    """

    runs: dict[Setting, dict[str, dict[int, dict[str, Any]]]] = field(default_factory=dict)
    baselines: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]]) -> Results:
        results = cls()
        single: dict[tuple[str, str], list[list[float]]] = {}
        for record in records:
            s = Settings(**record["settings"])
            if s.weighting == "single":
                single.setdefault((s.problem, s.optimizer), []).append(record["test"])
                continue
            arms = results.runs.setdefault((s.problem, s.weighting, s.optimizer), {})
            seeds = arms.setdefault(s.arm, {})
            if s.seed in seeds:
                raise ValueError(f"records: two runs of {s.arm}, seed {s.seed}, that differ in their size or rate")
            seeds[s.seed] = record
        results.baselines = {
            key: [statistics.mean(column) for column in zip(*rows, strict=True)] for key, rows in single.items()
        }
        return results

    def delta_m(self, setting: Setting, arm: str) -> dict[int, float]:
        """Delta_m in percent of each seed whose training did not break down."""
        problem, _, optimizer = setting
        baseline = self.baselines[problem, optimizer]
        runs = self.runs[setting].get(arm, {})
        return {seed: delta_m(r["test"], baseline) for seed, r in runs.items() if not broke_down(r)}

    def threshold(self, setting: Setting) -> float:
        """The fixed training loss (geometric mean over tasks): see :data:`THRESHOLD_AT`."""
        curves = [r["train_loss"] for r in self.runs[setting]["plain"].values()]
        epoch = math.ceil(THRESHOLD_AT * max(map(len, curves))) - 1
        return math.exp(statistics.mean(math.log(curve[epoch]) for curve in curves if len(curve) > epoch))

    def steps_to(self, setting: Setting, arm: str) -> dict[int, float]:
        """Steps until the training loss is at the threshold; the whole training where it never is."""
        bound = self.threshold(setting)
        runs = self.runs[setting].get(arm, {})
        found = {}
        for seed, record in runs.items():
            s = record["settings"]
            reached = epochs_until(record["train_loss"], bound)
            epochs = s["epochs"] if reached is None else reached
            found[seed] = float(epochs * steps_per_epoch(s["problem"], smoke=s["smoke"]))
        return found

    def never(self, setting: Setting, arm: str) -> int:
        """Runs whose training loss never gets there."""
        bound = self.threshold(setting)
        runs = self.runs[setting].get(arm, {}).values()
        return sum(epochs_until(record["train_loss"], bound) is None for record in runs)


def broke_down(record: dict[str, Any]) -> bool:
    """Whether something was not finite, or the training loss ends above where it was in the first epoch."""
    return record["test"] is None or record["train_loss"][-1] > record["train_loss"][0]


def epochs_until(curve: Sequence[float], bound: float) -> float | None:
    """When a curve of epoch means first reaches a bound, in epochs; None if it never does.

    The mean of epoch e (from 0) stands at e + 1/2; between two of them the logarithm is taken as linear.
    """
    for epoch, value in enumerate(curve):
        if value <= bound:
            if epoch == 0:
                return 0.5
            before = math.log(curve[epoch - 1])
            return epoch - 0.5 + (before - math.log(bound)) / (before - math.log(value))
    return None


def paired(first: dict[int, float], second: dict[int, float]) -> list[float]:
    """second - first, for the seeds that both have."""
    return [second[seed] - first[seed] for seed in sorted(first.keys() & second.keys())]


def cell(differences: Sequence[float], digits: int = 2) -> str:
    """``mean ± standard error``, starred beyond two standard errors."""
    if not differences:
        return "–"
    mean, error = mean_and_error(differences)
    star = " *" if beyond(differences) else ""
    return f"{mean:+.{digits}f}" if math.isnan(error) else f"{mean:+.{digits}f} ± {error:.{digits}f}{star}"


def beyond(differences: Sequence[float]) -> bool:
    mean, error = mean_and_error(differences)
    return not math.isnan(error) and abs(mean) > 2 * error


def _label(setting: Setting) -> str:
    return ", ".join(NAMES[word] for word in setting)


# ------------------------------------------------------------------------------------------------ tables


def main_table(results: Results, kind: str) -> Table:
    """Differences from the plain runs of the same seeds, in Delta_m (``"delta_m"``, points) or in the time to the
    fixed training loss (``"steps"``, percent of the plain runs' mean)."""
    controls = [arm for arm in MAIN if arm != "plain"]
    unit = "Δm %" if kind == "delta_m" else "steps"
    rows = []
    for setting in results.runs:
        values = _values(results, setting, kind, MAIN)
        plain = values["plain"]
        scale = _scale(kind, plain)
        differences = [[scale * d for d in paired(plain, values[arm])] for arm in controls]
        against = [scale * d for d in paired(values["placebo"], values["cost"])]
        rows.append([_label(setting), str(len(differences[0])), f"{statistics.mean(plain.values()):.2f}",
                     *map(cell, differences), cell(against)])  # fmt: skip
    pooled = [cell(pool(results, kind, "plain", arm)) for arm in controls]
    rows.append(["mean of all", "", "", *pooled, cell(pool(results, kind, "placebo", "cost"))])
    return Table(["setting", "seeds", f"plain, {unit}", *controls, "cost − placebo"], rows)


def _values(results: Results, setting: Setting, kind: str, arms: Iterable[str]) -> dict[str, dict[int, float]]:
    of = results.delta_m if kind == "delta_m" else results.steps_to
    return {arm: of(setting, arm) for arm in arms}


def _scale(kind: str, plain: dict[int, float]) -> float:
    """What turns a difference into points (Delta_m) or percent of the plain runs' mean (steps)."""
    return 1.0 if kind == "delta_m" else 100 / statistics.mean(plain.values())


def pool(results: Results, kind: str, first: str, second: str) -> list[float]:
    """Per seed the mean over all settings of second - first (the settings of one seed share initial weights and
    batches, so the seeds are the independent units); seeds that lack a setting are left out."""
    sums: dict[int, list[float]] = {}
    for setting in results.runs:
        values = _values(results, setting, kind, {first, second, "plain"})
        scale = _scale(kind, values["plain"])
        for seed in values[first].keys() & values[second].keys():
            sums.setdefault(seed, []).append(scale * (values[second][seed] - values[first][seed]))
    return [statistics.mean(found) for _, found in sorted(sums.items()) if len(found) == len(results.runs)]


def teleport_table(results: Results, settings: Iterable[Setting], arms: Sequence[str]) -> Table:
    """What the teleports of each arm did and cost, means over the seeds."""
    header = ["setting", "arm", "tried", "accepted", "share of time", "length", "drift, held out", "cosine", "σ"]
    rows = []
    for setting in settings:
        for arm in arms:
            records = list(results.runs[setting].get(arm, {}).values())
            if records:
                rows.append([_label(setting), arm, *_means(records)])
    return Table(header, rows)


def _means(records: Sequence[dict[str, Any]]) -> list[str]:
    def mean(name: str, form: str) -> str:
        values = [r[name] for r in records if r[name] is not None]
        return format(statistics.mean(values), form) if values else "–"

    return [mean("tried", ".1f"), mean("accepted", ".1f"), mean("time_share", ".0%"), mean("length", ".2%"),
            mean("heldout", ".1%"), mean("cosine_gain", "+.3f"), mean("sigma", ".2f")]  # fmt: skip


def axes_table(results: Results, setting: Setting) -> Table:
    """Every arm of one setting: differences from plain and from COST's defaults, with what the teleports did."""
    arms = [arm for arm in ARMS if arm in results.runs[setting]]
    dm = _values(results, setting, "delta_m", arms)
    steps = _values(results, setting, "steps", arms)
    scale = _scale("steps", steps["plain"])
    rows = []
    for arm in arms:
        if arm == "plain":
            continue
        records = list(results.runs[setting][arm].values())
        rows.append([
            arm, ARMS[arm].text, str(len(records)), cell(paired(dm["plain"], dm[arm])),
            "" if arm == "cost" else cell(paired(dm["cost"], dm[arm])),
            cell([scale * d for d in paired(steps["plain"], steps[arm])]),
            " / ".join(_means(records)[:2]), *_means(records)[2:5],
        ])  # fmt: skip
    header = ["arm", "what", "seeds", "Δm − plain", "Δm − cost", "steps %", "tried / accepted", "share of time",
              "length", "drift, held out"]  # fmt: skip
    return Table(header, rows)


def axes_matrix(results: Results, kind: str) -> Table:
    """Every arm in every setting that has more than the main ones: differences from plain in Delta_m (points) or in
    steps (percent), and their mean over the settings."""
    settings = [s for s, arms in results.runs.items() if not set(arms) <= set(MAIN)]
    part = Results({s: results.runs[s] for s in settings}, results.baselines)
    rows = []
    for arm in ARMS:
        if arm == "plain" or not any(arm in results.runs[s] for s in settings):
            continue
        cells = []
        for s in settings:
            values = _values(results, s, kind, ("plain", arm))
            scale = _scale(kind, values["plain"])
            cells.append(cell([scale * d for d in paired(values["plain"], values[arm])]))
        rows.append([arm, *cells, cell(pool(part, kind, "plain", arm))])
    return Table(["arm", *map(_label, settings), "mean"], rows)


def summary(results: Results) -> str:
    """How many settings lie beyond two standard errors, on which side; chance alone puts 8 % of them there with ten
    seeds (Student's t, 9 degrees of freedom)."""
    rows = []
    for first, second in (*(("plain", arm) for arm in MAIN[1:]), ("placebo", "cost")):
        row = [f"{second} − {first}"]
        for kind in ("delta_m", "steps"):
            values = [_values(results, setting, kind, (first, second)) for setting in results.runs]
            found = [paired(v[first], v[second]) for v in values]
            signs = [math.copysign(1, statistics.mean(d)) for d in found if len(d) > 1 and beyond(d)]
            row += [str(signs.count(-1.0)), str(signs.count(1.0))]
        rows.append(row)
    header = [f"of {len(results.runs)} settings", "Δm better", "Δm worse", "steps fewer", "steps more"]
    return Table(header, rows).markdown()


def never(results: Results) -> str:
    """How many runs of each arm never reach the fixed loss."""
    counts = {arm: sum(results.never(setting, arm) for setting in results.runs) for arm in MAIN}
    text = ", ".join(f"{count} {arm}" for arm, count in counts.items())
    return f"Runs that never reach it, and count with the length of the training: {text}.\n"


def report(records: Sequence[dict[str, Any]], plot: Path | None = None) -> str:
    """Markdown of everything that the records allow."""
    results = Results.of(records)
    if not results.runs:
        raise ValueError("records: expected at least one finished run, got none; see `ablation.py run`")
    complete = {s: arms for s, arms in results.runs.items() if all(arms.get(arm) for arm in MAIN)}
    parts = []
    if complete:
        main = Results({s: {a: arms[a] for a in MAIN} for s, arms in complete.items()}, results.baselines)
        parts += [
            "Δm, difference from plain in points (lower is better):", main_table(main, "delta_m").markdown(),
            "Steps to the fixed training loss, difference from plain in percent:",
            main_table(main, "steps").markdown(), never(main), "Beyond two standard errors:", summary(main),
            "Teleports:", teleport_table(main, complete, ("cost", "placebo")).markdown(),
        ]  # fmt: skip
        if plot is not None:
            draw(main, plot)
    for setting, arms in results.runs.items():
        if "plain" in arms and "cost" in arms and not set(arms) <= set(MAIN):
            parts += [f"One part at a time, {_label(setting)}:", axes_table(results, setting).markdown()]
    if any(not set(arms) <= set(MAIN) for arms in results.runs.values()):
        parts += ["One part at a time, Δm − plain in points:", axes_matrix(results, "delta_m").markdown(),
                  "Steps − plain in percent:", axes_matrix(results, "steps").markdown()]  # fmt: skip
    broken = [
        f"{_label(setting)}, {arm}, seed {seed}"
        for setting, arms in results.runs.items()
        for arm, seeds in arms.items()
        for seed, record in seeds.items()
        if broke_down(record)
    ]
    codes = ", ".join(sorted({r["code"] for r in records}))
    parts.append(f"{len(records)} runs, {len(broken)} broke down ({'; '.join(broken) or 'none'}); code {codes}.")
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------ plot


def draw(results: Results, path: Path) -> None:
    """One row for each setting: mean paired difference and two standard errors, of COST and its controls."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = list(results.runs)
    figure = Figure(figsize=(11, 1.5 + 0.5 * len(settings)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, kind, text in ((axes[0], "delta_m", "Δm, points"), (axes[1], "steps", "steps to a fixed loss, %")):
        for offset, arm in zip((-0.22, 0.0, 0.22), MAIN[1:], strict=True):
            points = []
            for row, setting in enumerate(settings):
                values = _values(results, setting, kind, ("plain", arm))
                scale = _scale(kind, values["plain"])
                points.append(
                    (row + offset, *mean_and_error([scale * d for d in paired(values["plain"], values[arm])]))
                )
            rows, means, errors = zip(*points, strict=True)
            axis.errorbar(means, rows, xerr=[2 * e for e in errors], fmt="o", ms=4, capsize=2, label=arm)
        axis.axvline(0.0, color="0.3", lw=0.8)
        axis.set_title(f"difference from plain: {text}")
        axis.grid(alpha=0.25, axis="x")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(settings)), [_label(s) for s in settings])
    axes[0].invert_yaxis()
    axes[1].legend(frameon=False, title="± 2 standard errors")
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=120)
    write_whole(path, buffer.getvalue())

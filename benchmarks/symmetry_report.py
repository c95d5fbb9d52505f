"""The tables of ``symmetry.py``: paired differences with Holm's correction over all comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ablation import read
from symmetry import SEEDS, TUNING_SEEDS, Setting, chosen_rates
from symmetry_run import ARMS, Settings

Record = dict[str, Any]
PLACEBO = {"cosine": "cosine-random", "balance": "balance-random", "rates": "rates-random", "lora": "no-move"}
WINDOW = 20
"""Steps over which training losses are averaged."""

METRICS = ("Δm", "steps")


# ------------------------------------------------------------------------------------------------ figures of one run


def relative_change(test: Sequence[float], reference: Sequence[float]) -> float:
    """Δm in per cent: mean over the tasks of metric / reference - 1; lower is better."""
    return 100 * statistics.mean(value / ref - 1 for value, ref in zip(test, reference, strict=True))


def smoothed(curve: Sequence[float]) -> list[float]:
    """Means over the last :data:`WINDOW` steps; the first one is of steps 0 to WINDOW - 1."""
    return [statistics.mean(curve[k - WINDOW : k]) for k in range(WINDOW, len(curve) + 1)]


def steps_until(curve: Sequence[float], bound: float, total: int) -> int:
    """Steps until the smoothed curve is at most ``bound``; ``total`` where it never is."""
    return next((k + WINDOW for k, value in enumerate(smoothed(curve)) if value <= bound), total)


# ------------------------------------------------------------------------------------------------ one setting


@dataclass(frozen=True)
class Results:
    """One setting.

    Attributes:
        values: metric -> arm -> one figure for each seed.
        broken: arm -> seeds in which training broke down.
        rates: arm -> learning rate.
        runs: arm -> the records, by seed.
    """

    values: Mapping[str, Mapping[str, list[float]]]
    broken: Mapping[str, int]
    rates: Mapping[str, float]
    runs: Mapping[str, Mapping[int, Record]]


def results(setting: Setting, tuned: Sequence[Record], fresh: Sequence[Record]) -> Results | None:
    """None where arms or seeds are missing."""
    rates = {arm: lr for (_, arm), lr in chosen_rates(tuned).items()}
    runs: dict[str, dict[int, Record]] = {}
    for record in fresh:
        s = Settings(**record["settings"])
        runs.setdefault(s.arm, {})[s.seed] = record
    if any(set(runs.get(arm, {})) != set(SEEDS) for arm in ARMS):
        return None
    plain = [r for r in tuned if r["settings"]["arm"] == "plain" and r["settings"]["lr"] == rates["plain"]]
    assert len(plain) == len(TUNING_SEEDS)
    reference = [statistics.mean(column) for column in zip(*(r["test"] for r in plain), strict=True)]
    total = len(plain[0]["curve"])
    bound = statistics.mean(smoothed(r["curve"])[round(0.75 * total) - WINDOW] for r in plain)
    values: dict[str, dict[str, list[float]]] = {metric: {} for metric in METRICS}
    broken = {}
    for arm in ARMS:
        ordered = [runs[arm][seed] for seed in SEEDS]
        fine = [r for r in ordered if r["test"] is not None]
        broken[arm] = len(ordered) - len(fine)
        change = {id(r): relative_change(r["test"], reference) for r in fine}
        worst = max(change.values(), default=math.inf)
        values["Δm"][arm] = [change.get(id(r), worst) for r in ordered]
        values["steps"][arm] = [steps_until(r["curve"], bound, total) if id(r) in change else total for r in ordered]
    return Results(values, broken, rates, runs)


# ------------------------------------------------------------------------------------------------ statistics


@dataclass(frozen=True)
class Comparison:
    """A paired difference: arm minus ``other``, over the seeds."""

    setting: Setting
    metric: str
    arm: str
    other: str
    mean: float
    error: float
    p: float


def compare(setting: Setting, found: Results) -> list[Comparison]:
    """Each arm against its placebo and against plain, in both metrics."""
    comparisons = []
    for metric in METRICS:
        for arm, placebo in PLACEBO.items():
            for other in (placebo, "plain"):
                pairs = zip(found.values[metric][arm], found.values[metric][other], strict=True)
                mean, error, p = paired_t([a - b for a, b in pairs])
                comparisons.append(Comparison(setting, metric, arm, other, mean, error, p))
    return comparisons


def paired_t(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean, its standard error, and the two-sided p of Student's t test; p = 1 where all differences are 0."""
    from scipy.stats import t

    n = len(differences)
    mean, error = statistics.mean(differences), statistics.stdev(differences) / math.sqrt(n)
    if error == 0:
        return mean, 0.0, 1.0 if mean == 0 else 0.0
    return mean, error, 2 * float(t.sf(abs(mean / error), n - 1))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given."""
    order = sorted(range(len(p)), key=p.__getitem__)
    adjusted, least = [0.0] * len(p), 0.0
    for rank, k in enumerate(order):
        least = max(least, min(1.0, p[k] * (len(p) - rank)))
        adjusted[k] = least
    return adjusted


def verdicts(comparisons: Sequence[Comparison], planned: int) -> list[tuple[Setting, str, str]]:
    """(setting, metric, arm) of every yes: better than placebo and plain, both with a corrected p < 0.05.

    Args:
        planned: how many comparisons there are to be; those that are missing count as p = 1.
    """
    missing = [1.0] * (planned - len(comparisons))
    adjusted = holm([c.p for c in comparisons] + missing)[: len(comparisons)]
    better = {(c.setting, c.metric, c.arm, c.other) for c, p in zip(comparisons, adjusted, strict=True)
              if c.mean < 0 and p < 0.05}  # fmt: skip
    return [(s, m, a) for (s, m, a, other) in sorted(better) if other == "plain" and (s, m, a, PLACEBO[a]) in better]


# ------------------------------------------------------------------------------------------------ the page


def report(folder: Path, settings: Sequence[Setting]) -> str:
    """The tables in Markdown, of the settings that are complete."""
    whole: dict[Setting, Results] = {}
    for setting in settings:
        tuned, fresh = (read(_file(folder, setting, kind)) for kind in ("tune", "run"))
        found = results(setting, tuned, fresh)
        if found is not None:
            whole[setting] = found
    comparisons = [c for setting, found in whole.items() for c in compare(setting, found)]
    planned = len(settings) * len(METRICS) * 2 * len(PLACEBO)
    yes = verdicts(comparisons, planned)
    lines = [f"{len(whole)} of {len(settings)} settings are complete.", ""]
    for metric, unit in (("Δm", "points"), ("steps", "steps")):
        lines += [f"{metric}, difference in {unit} (lower is better), ten seeds, mean ± standard error:", ""]
        lines += [*_table(metric, whole, comparisons), ""]
    lines += ["Tuned rates, and runs that broke down (of ten):", "", *_rates(whole), ""]
    lines += ["Moves, medians over seeds and settings:", "", *_sizes(whole), ""]
    lines += [f"Yes: {', '.join(' '.join((*s, m, a)) for s, m, a in yes) or 'nowhere'}."]
    return "\n".join(lines)


def _file(folder: Path, setting: Setting, kind: str) -> Path:
    plain = folder / f"{'-'.join(setting)}-{kind}.jsonl"
    return plain if plain.exists() else plain.with_suffix(".jsonl.gz")


def _table(metric: str, whole: Mapping[Setting, Results], comparisons: Sequence[Comparison]) -> list[str]:
    kinds = [(arm, other) for arm, placebo in PLACEBO.items() for other in ("plain", placebo)]
    lines = ["| setting | plain | " + " | ".join(f"{a} − {o}" for a, o in kinds) + " |"]
    lines += ["| --- | ---: |" + " ---: |" * len(kinds)]
    by_kind = {(c.setting, c.arm, c.other): c for c in comparisons if c.metric == metric}
    for setting, found in whole.items():
        cells = [by_kind[setting, a, o] for a, o in kinds]
        level = statistics.mean(found.values[metric]["plain"])
        lines.append(
            f"| {', '.join(setting)} | {level:.1f} | " + " | ".join(_cell(c.mean, c.error) for c in cells) + " |"
        )
    if len(whole) > 1:
        means = [[by_kind[setting, a, o].mean for setting in whole] for a, o in kinds]
        pooled = [(statistics.mean(m), statistics.stdev(m) / math.sqrt(len(m))) for m in means]
        lines.append("| mean of the settings | | " + " | ".join(_cell(*p) for p in pooled) + " |")
    return lines


def _cell(mean: float, error: float) -> str:
    return f"{mean:+.1f} ± {error:.1f}".replace("-", "−") + (" *" if abs(mean) > 2 * error > 0 else "")


def _rates(whole: Mapping[Setting, Results]) -> list[str]:
    lines = ["| setting | " + " | ".join(ARMS) + " |", "| --- |" + " ---: |" * len(ARMS)]
    for setting, found in whole.items():
        cells = [f"{found.rates[a]:g}" + (f" ({found.broken[a]})" if found.broken[a] else "") for a in ARMS]
        lines.append(f"| {', '.join(setting)} | " + " | ".join(cells) + " |")
    return lines


def _sizes(whole: Mapping[Setting, Results]) -> list[str]:
    lines = ["| arm | root mean square of log s | smallest cosine before | after | log of the norm's change |",
             "| --- | ---: | ---: | ---: | ---: |"]  # fmt: skip
    for arm in ("cosine", "cosine-random", "balance", "balance-random"):
        moves = [run["moves"][0] for found in whole.values() for run in found.runs[arm].values() if run["moves"]]
        if moves:
            cells = (
                statistics.median(m[key] for m in moves) for key in ("rms", "cosine_before", "cosine_after", "norm")
            )
            lines.append(f"| {arm} | " + " | ".join(f"{v:.2f}" for v in cells) + " |")
    accepted = [run["accepted"] for found in whole.values() for run in found.runs["lora"].values()]
    share = sum(a is True for a in accepted) / max(1, len(accepted))
    return [*lines, "", f"lora: {100 * share:.0f} % of {len(accepted)} attempts accepted."]

"""Tables of ``default_scale.py``: paired differences from the plain sum at its own rate, with standard errors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from default_scale import RATES, RULES, WEIGHTINGS, Settings
from reporting import Table, delta_m, mean_and_error  # of examples/, which problems.py has put on the path

NAMES = {"qm9": "QM9", "multimnist": "MNIST", "yeast": "yeast", "rare": "rare", "rooms": "rooms",
         "sgd": "SGD", "adam": "Adam"}  # fmt: skip
FACTORS = {1 / 3: "a third", 1.0: "the sum's rate", 3.0: "three times"}

Setting = tuple[str, str]
"""(problem, optimizer)"""
Arm = tuple[str, str, float]
"""(weighting, rule, factor on the sum's rate)"""
SUM: Arm = ("sum", "raw", 1.0)


@dataclass(frozen=True)
class Results:
    """Records by setting, arm and seed. ``runs[setting][arm][seed]`` is a record."""

    runs: dict[Setting, dict[Arm, dict[int, dict[str, Any]]]]

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> Results:
        """Of the runs at one of the three rates and on the study's seeds; those that chose the rates are left out."""
        runs: dict[Setting, dict[Arm, dict[int, dict[str, Any]]]] = {}
        for record in records:
            s = Settings(**record["settings"])
            if s.seed >= 1000:
                continue
            quotient = s.lr / RATES[s.problem, s.optimizer]
            factor = min(FACTORS, key=lambda f: abs(f - quotient))
            arm = s.weighting, s.rule, factor
            seeds = runs.setdefault((s.problem, s.optimizer), {}).setdefault(arm, {})
            if s.seed in seeds:
                raise ValueError(f"records: two runs of {arm}, seed {s.seed}, on {s.problem} with {s.optimizer}")
            seeds[s.seed] = record
        return cls(runs)

    def settings(self) -> list[Setting]:
        return [setting for setting in RATES if setting in self.runs]

    def pairs(self, setting: Setting, arm: Arm) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """(run, the plain sum's run of the same seed at its own rate), for the runs that did not diverge."""
        arms = self.runs[setting]
        return [(run, arms[SUM][seed]) for seed, run in sorted(arms.get(arm, {}).items()) if not diverged(run)]

    def count(self, arm: Arm) -> tuple[int, int]:
        """Diverged runs and all runs, of every setting."""
        runs = [run for arms in self.runs.values() for run in arms.get(arm, {}).values()]
        return sum(map(diverged, runs)), len(runs)


def diverged(run: dict[str, Any]) -> bool:
    """It broke down, or ended with a mean training loss above that of its first step."""
    return run["loss"] is None or statistics.mean(run["loss"]) > run["first"]


def loss_change(run: dict[str, Any], reference: dict[str, Any]) -> float:
    """Of the mean training loss at the end, in percent of the reference's."""
    return 100 * (statistics.mean(run["loss"]) / statistics.mean(reference["loss"]) - 1)


def test_change(run: dict[str, Any], reference: dict[str, Any]) -> float:
    """Mean relative change of the test metrics, in percent; higher is worse."""
    return delta_m(run["test"], reference["test"])


Change = Callable[[dict[str, Any], dict[str, Any]], float]


def cell(results: Results, setting: Setting, arm: Arm, change: Change) -> str:
    """Mean ± standard error of the paired differences; ``n†`` before it counts the runs that diverged."""
    runs = results.runs[setting].get(arm, {})
    if not runs:
        return "–"
    broken = sum(map(diverged, runs.values()))
    mark = f"{broken}† " if broken else ""
    values = [change(*pair) for pair in results.pairs(setting, arm)]
    if not values:
        return mark.strip()
    if len(values) == 1:
        return f"{mark}{values[0]:+.1f}"
    mean, error = mean_and_error(values)
    return f"{mark}{mean:+.1f} ± {error:.1f}"


def changes(results: Results, arms: dict[str, Arm], change: Change) -> str:
    """One row an arm, one column a setting."""
    settings = results.settings()
    head = ["", *(f"{NAMES[p]}, {NAMES[o]}" for p, o in settings)]
    rows = [[name, *(cell(results, s, arm, change) for s in settings)] for name, arm in arms.items()]
    return Table(head, rows).markdown()


def summary(results: Results, arms: dict[str, Arm]) -> str:
    """Over all settings: diverged runs, mean and worst mean of the changes (of the runs that did not diverge), and
    least, median and largest ||d|| / ||g_sum|| of any step."""
    rows = []
    for name, arm in arms.items():
        broken, runs = results.count(arm)
        found = [f"{broken} of {runs}"]
        for change in (loss_change, test_change):
            pairs = [results.pairs(setting, arm) for setting in results.settings()]
            means = [statistics.mean(change(*pair) for pair in p) for p in pairs if p]
            found += [f"{statistics.mean(means):+.1f}", f"{max(means):+.1f}"] if means else ["–", "–"]
        rows.append([name, *found, *ratios(results, arm)])
    head = ["", "diverged", "loss: mean", "worst", "test: mean", "worst", "least ratio", "median", "largest"]
    return Table(head, rows).markdown()


def ratios(results: Results, arm: Arm) -> list[str]:
    found = [run["ratio"] for arms in results.runs.values() for run in arms.get(arm, {}).values()]
    least, medians, largest = zip(*found, strict=True)
    return [f"{v:.3g}" for v in (min(least), statistics.median(medians), max(largest))]


def outside(results: Results) -> str:
    """Runs with a step whose ||d|| is 1e3 times longer or shorter than ||g_sum||, by rule: of those that diverged, and
    of the others. Rules without such a step have no row."""
    counts: dict[str, list[int]] = {}
    for (weighting, rule, _), seeds in (item for arms in results.runs.values() for item in arms.items()):
        for run in seeds.values():
            row = counts.setdefault(f"{weighting}, {rule}", [0, 0, 0, 0])
            row[1 if diverged(run) else 3] += 1
            if run["ratio"][0] < 1e-3 or run["ratio"][2] > 1e3:
                row[0 if diverged(run) else 2] += 1
    rows = [[name, f"{a} of {b}", f"{c} of {d}"] for name, (a, b, c, d) in counts.items() if a or c]
    return Table(["", "diverged", "others"], rows).markdown()


def report(records: Iterable[dict[str, Any]]) -> str:
    """All tables, as Markdown."""
    results = Results.of(records)
    known = {arm for arms in results.runs.values() for arm in arms}

    def of(weightings: Iterable[str], factor: float) -> dict[str, Arm]:
        arms = [(w, rule, factor) for w in weightings for rule in RULES]
        name = "{1}" if tuple(weightings) == ("fairgrad",) else "{0}, {1}"
        return {name.format(*arm): arm for arm in arms if arm in known}

    rules = of(("fairgrad",), 1.0)
    others = of([w for w in WEIGHTINGS if w not in ("sum", "fairgrad")], 1.0)
    margins = {}
    for factor in (1 / 3, 3.0):
        every = {"the sum": ("sum", "raw", factor), **of(("fairgrad",), factor)}
        margins |= {f"{name}, {FACTORS[factor]}": arm for name, arm in every.items() if arm in known}
    parts = []
    for title, arms in (("FairGrad(2) at the sum's rate", rules), ("Other weightings at the sum's rate", others),
                        ("FairGrad(2) at other rates", margins)):  # fmt: skip
        if arms:
            parts += [f"## {title}", summary(results, arms)]
            parts += ["Training loss, % of the sum's:", changes(results, arms, loss_change)]
            parts += ["Test metrics, mean relative change in %, higher is worse:", changes(results, arms, test_change)]
    parts += ["## Runs with a step beyond 1e3 or below 1e-3 of the sum's", outside(results)]
    return "\n\n".join(part.strip() for part in parts)

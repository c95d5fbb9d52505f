"""The rows that the papers print, shipped in ``examples/published/``, and an audit that finds their misprints."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dense.engine.scores import delta_m, delta_m_interval, mean_rank_interval
from dense.errors import UserError

__all__ = [
    "BASELINES",
    "Finding",
    "PublishedRow",
    "PublishedTable",
    "audit",
    "audit_summaries",
    "load_celeba",
    "load_published",
]

FOLDER = Path(__file__).resolve().parents[2] / "published"
BASELINES = ("STL", "Independent")
"""What the papers call the single-task networks."""


@dataclass(frozen=True)
class PublishedRow:
    """One printed row: values in the order of the table's metrics (none where only MR and Delta m are printed)."""

    method: str
    values: tuple[float, ...]
    mean_rank: float | None
    delta_m: float | None
    delta_m_error: float | None
    source: str
    note: str


@dataclass(frozen=True)
class PublishedTable:
    """All rows of one file.

    Attributes:
        metrics: column names without the arrow suffix.
        higher_is_better: per metric.
        rows: in the file's order.
        decimals: source -> decimals printed per metric.
    """

    metrics: tuple[str, ...]
    higher_is_better: tuple[bool, ...]
    rows: tuple[PublishedRow, ...]
    decimals: dict[str, tuple[int, ...]]

    @property
    def baseline(self) -> PublishedRow:
        """The single-task row with the most decimals: what the published Delta m were computed from."""
        rows = [row for row in self.rows if row.method in BASELINES]
        return max(rows, key=lambda row: sum(self.decimals[row.source]))

    @property
    def sources(self) -> tuple[str, ...]:
        """Papers and tables, in the file's order."""
        return tuple(dict.fromkeys(row.source for row in self.rows))

    def of(self, source: str) -> list[PublishedRow]:
        """Rows of one printed table, the baseline left out."""
        return [row for row in self.rows if row.source == source and row.method not in BASELINES]

    def value(self, row: PublishedRow, metric: str) -> float:
        """A printed value; NaN where the table has no such column or the paper prints nothing."""
        return row.values[self.metrics.index(metric)] if metric in self.metrics and row.values else math.nan

    def delta_m(self, row: PublishedRow) -> float:
        """Delta m of a row, recomputed."""
        return delta_m(row.values, self.baseline.values, self.higher_is_better)


def load_published(name: str, folder: Path = FOLDER) -> PublishedTable:
    """Read ``nyuv2``, ``cityscapes`` or ``qm9_per_task``.

    Raises:
        UserError: if the file is not there.
    """
    raw = _read(folder / f"{name}.csv")
    columns = _metric_columns(raw[0])
    rows = tuple(
        PublishedRow(
            method=row["method"],
            values=tuple(float(row[column]) for column in columns),
            mean_rank=_number(row["MR"]),
            delta_m=_number(row["delta_m_pct"]),
            delta_m_error=_number(row.get("delta_m_std", "")),
            source=row["source"],
            note=row.get("note", ""),
        )
        for row in raw
    )
    decimals = {
        source: tuple(max(_decimals(row[column]) for row in raw if row["source"] == source) for column in columns)
        for source in dict.fromkeys(row.source for row in rows)
    }
    names = tuple(column.removesuffix("_up").removesuffix("_down") for column in columns)
    return PublishedTable(names, tuple(column.endswith("_up") for column in columns), rows, decimals)


def load_celeba(attributes: Sequence[str], folder: Path = FOLDER) -> PublishedTable:
    """CelebA: the two rows whose F1 per attribute are known (with their mean as a last column), and the summary rows.

    Args:
        attributes: the 40 names, in the order of ``list_attr_celeba.txt``.
        folder: of the CSV files.
    """
    per_attribute = _read(folder / "celeba_f1_per_attribute.csv")
    rows = []
    for method in ("STL", "FairGrad"):
        values = [float(row[f"{method.lower()}_test_f1"]) for row in per_attribute]
        source = "F1 per attribute, " + per_attribute[0]["source"]
        rows.append(PublishedRow(method, (*values, sum(values) / len(values)), None, None, None, source, ""))
    rows += [
        PublishedRow(
            row["method"], (), _number(row["MR"]), _number(row["delta_m_pct"]), _number(row["delta_m_std"]),
            row["source"], row["note"],
        )
        for row in _read(folder / "celeba_qm9_summary.csv")
        if row["dataset"] == "CelebA"
    ]  # fmt: skip
    metrics = (*attributes, "f1")
    decimals = {row.source: (7,) * len(metrics) for row in rows}
    return PublishedTable(metrics, (True,) * len(metrics), tuple(rows), decimals)


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; copy examples/published together with the scripts")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True)
class Finding:
    """Something in the printed tables that cannot be right.

    Attributes:
        kind: ``"delta_m"`` or ``"mean_rank"`` (printed value outside what the printed metrics allow), ``"duplicate"``
            (two different methods with the same numbers), ``"disagreement"`` (one method, one task set, numbers that
            differ between papers by more than rounding).
        method, source: the row.
        detail: what was printed and what was expected, or the other row.
    """

    kind: str
    method: str
    source: str
    detail: str


def audit(table: PublishedTable) -> list[Finding]:
    """Check every row against its own numbers and against the other rows."""
    return [*_audit_delta_m(table), *_audit_ranks(table), *_audit_pairs(table)]


def audit_summaries(folder: Path = FOLDER) -> list[Finding]:
    """Pairs of papers that print another Delta m for one method on CelebA or QM9; their metrics are not printed."""
    rows = _read(folder / "celeba_qm9_summary.csv")
    findings = []
    for first, second in itertools.combinations(rows, 2):
        same = all(first[key] == second[key] for key in ("dataset", "method"))
        if same and float(first["delta_m_pct"]) != float(second["delta_m_pct"]):
            detail = (
                f"{first['dataset']}: printed {first['delta_m_pct']}, {second['delta_m_pct']} in {second['source']}"
            )
            findings.append(Finding("disagreement", first["method"], first["source"], detail))
    return findings


def _audit_delta_m(table: PublishedTable) -> list[Finding]:
    findings = []
    for row in table.rows:
        if row.delta_m is None or row.method in BASELINES:
            continue
        half = 0.5 * 10.0 ** -np.array(table.decimals[row.source])
        baseline = next((b for b in table.rows if b.method in BASELINES and b.source == row.source), table.baseline)
        # The Delta m of a table may have been computed from the rounded or from the exact baseline: allow both.
        low, high = delta_m_interval(row.values, table.baseline.values, table.higher_is_better, half)
        own_low, own_high = delta_m_interval(row.values, baseline.values, table.higher_is_better, half)
        low, high = min(low, own_low), max(high, own_high)
        step = 0.5 * 10.0 ** -_decimals(str(row.delta_m))
        if not low - step <= row.delta_m <= high + step:
            detail = f"printed {row.delta_m:g}, its numbers give {low:.2f} to {high:.2f}"
            findings.append(Finding("delta_m", row.method, row.source, detail))
    return findings


def _audit_ranks(table: PublishedTable) -> list[Finding]:
    findings = []
    for source in table.sources:
        rows = table.of(source)
        if len(rows) < 10:  # an excerpt: its ranks are among rows that are not here
            continue
        low, high = mean_rank_interval([row.values for row in rows], table.higher_is_better)
        # one unit of the last printed decimal, since Nash-MTL's QM9 table cuts off instead of rounding
        unit = 1.01 * 10.0 ** -max(_decimals(str(row.mean_rank)) for row in rows)
        for row, a, b in zip(rows, low, high, strict=True):
            if row.mean_rank is not None and not a - unit <= row.mean_rank <= b + unit:
                detail = f"printed {row.mean_rank:g}, its table gives {a:.2f} to {b:.2f}"
                findings.append(Finding("mean_rank", row.method, source, detail))
    return findings


def _audit_pairs(table: PublishedTable) -> list[Finding]:
    findings = []
    rows = [row for row in table.rows if row.method not in BASELINES]
    for i, first in enumerate(rows):
        for second in rows[i + 1 :]:
            if first.source == second.source or not set(_aliases(first)).isdisjoint(_aliases(second)):
                continue
            if _agree(table, first, second):
                detail = f"same numbers as {second.method} in {second.source}"
                findings.append(Finding("duplicate", first.method, first.source, detail))
        for second in rows[i + 1 :]:
            if first.method == second.method and not _agree(table, first, second):
                detail = f"other numbers than in {second.source}"
                findings.append(Finding("disagreement", first.method, first.source, detail))
    return findings


def _aliases(row: PublishedRow) -> tuple[str, ...]:
    """Names under which the papers print the same run: IMTL is IMTL-G, and COST is FairGrad + COST with LoRA."""
    same = {
        "IMTL": "IMTL-G",
        "FairGrad+COST": "COST",
        "COST-LoRA": "COST",
    }
    return (row.method, same.get(row.method, row.method))


def _agree(table: PublishedTable, first: PublishedRow, second: PublishedRow) -> bool:
    """Equal up to the coarser rounding of the two tables."""
    coarse = np.minimum(table.decimals[first.source], table.decimals[second.source])
    gap = np.abs(np.array(first.values) - np.array(second.values))
    return bool((gap <= 0.5 * 10.0**-coarse * 1.0001).all())


def _metric_columns(row: dict[str, str]) -> list[str]:
    """The columns between the method and the mean rank."""
    names = list(row)
    return names[names.index("method") + 1 : names.index("MR")]


def _decimals(text: str) -> int:
    return len(text.partition(".")[2])


def _number(text: str) -> float | None:
    return float(text) if text else None

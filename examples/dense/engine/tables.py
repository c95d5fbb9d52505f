"""The table of a set of runs in the papers' format, beside the published rows, as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dense.engine.problem import Metric
from dense.engine.published import BASELINES, PublishedTable
from dense.engine.scores import delta_m, mean_and_error, mean_rank

__all__ = ["Reference", "Result", "Table", "build_table"]

OWN = "this run"


@dataclass(frozen=True)
class Result:
    """All seeds of one method.

    Attributes:
        label: row name.
        seeds: seed -> metric -> value.
        kind: ``"mtl"`` is ranked; ``"stl"`` is what Delta m is relative to; ``"trivial"`` is a constant predictor.
        teleports: accepted and attempted, over all seeds; None without COST.
    """

    label: str
    seeds: Mapping[int, Mapping[str, float]]
    kind: str = "mtl"
    teleports: tuple[int, int] | None = None

    def values(self, name: str) -> list[float]:
        """One metric over the seeds; NaN where a seed lacks it."""
        return [float(metrics.get(name, math.nan)) for metrics in self.seeds.values()]


@dataclass(frozen=True)
class Reference:
    """What Delta m is measured against: a name for the caption, and metric -> value."""

    name: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Cell:
    """A mean with its standard error (NaN for one seed or a published value)."""

    mean: float
    error: float = math.nan

    def text(self, digits: int) -> str:
        if math.isnan(self.mean):
            return "–"
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"


@dataclass(frozen=True)
class Line:
    """One row: its metrics in the table's order, mean rank, Delta m, and where it comes from."""

    method: str
    cells: tuple[Cell, ...]
    rank: float
    delta: Cell
    source: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Own rows and published rows with the same columns."""

    metrics: tuple[Metric, ...]
    own: tuple[Line, ...]
    published: tuple[Line, ...] = ()
    caption: tuple[str, ...] = field(default=())

    def markdown(self) -> str:
        """Own rows first, the published ones in a table of their own below."""
        parts = ["\n".join(self.caption), self._markdown(self.own)]
        if self.published:
            parts += ["Published rows, with their sources:", self._markdown(self.published)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _markdown(self, lines: Sequence[Line]) -> str:
        head = ["Method", *(metric.label for metric in self.metrics), "MR ↓", "Δm % ↓", "Source"]
        body = [
            [
                line.method,
                *(cell.text(metric.digits) for metric, cell in zip(self.metrics, line.cells, strict=True)),
                "–" if math.isnan(line.rank) else f"{line.rank:.2f}",
                line.delta.text(2),
                line.source + (f"; {line.note}" if line.note else ""),
            ]
            for line in lines
        ]
        widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
        left = {0, len(head) - 1}
        rule = ["-" * width if i in left else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
        rows = [
            [text.ljust(w) if i in left else text.rjust(w) for i, (text, w) in enumerate(zip(row, widths, strict=True))]
            for row in [head, rule, *body]
        ]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)

    def csv(self) -> str:
        """One line a row, unrounded, with a ``_se`` column behind each metric of the own rows."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        names = [name for metric in self.metrics for name in (metric.name, f"{metric.name}_se")]
        writer.writerow(["method", *names, "MR", "delta_m_pct", "delta_m_pct_se", "source", "note"])
        for line in (*self.own, *self.published):
            numbers = [value for cell in (*line.cells,) for value in (cell.mean, cell.error)]
            numbers += [line.rank, line.delta.mean, line.delta.error]
            texts = ["" if math.isnan(number) else repr(float(number)) for number in numbers]
            writer.writerow([line.method, *texts, line.source, line.note])
        return out.getvalue()


def build_table(
    metrics: Sequence[Metric],
    results: Sequence[Result],
    *,
    shown: Sequence[Metric] | None = None,
    published: PublishedTable | None = None,
    comparable: bool = True,
    caption: Sequence[str] = (),
) -> Table:
    """Means ± standard errors over seeds, MR among the multi-task rows, Delta m against the own single-task row.

    Args:
        metrics: what MR and Delta m are made of.
        results: own rows, in order.
        shown: the columns, where they are not ``metrics`` (CelebA has 40 of those).
        published: rows of the papers, or None.
        comparable: the runs used the published data set; otherwise the published single-task row is no stand-in for
            a missing own one, and the caption says that the rows cannot be compared.
        caption: lines above the table.
    """
    columns = tuple(metrics if shown is None else shown)
    reference = _reference(metrics, results, published if comparable else None)
    ranks = _ranks(metrics, results)
    own = tuple(
        Line(
            result.label,
            tuple(Cell(*mean_and_error(result.values(column.name))) for column in columns),
            ranks.get(result.label, math.nan),
            _delta(metrics, result, reference),
            OWN,
            _note(result),
        )
        for result in results
    )
    lines = [*caption]
    if reference is not None:
        lines.append(f"Δm relative to {reference.name}. MR among the multi-task rows of this table.")
    if any(len(result.seeds) > 1 for result in results):
        lines.append("Mean ± standard error over seeds.")
    if published is not None and not comparable:
        lines.append("**The data are not the papers': these rows cannot be compared with the published ones.**")
    return Table(columns, own, _published(columns, published), tuple(lines))


def _reference(
    metrics: Sequence[Metric], results: Sequence[Result], published: PublishedTable | None
) -> Reference | None:
    for result in results:
        if result.kind == "stl":
            means = {metric.name: float(np.mean(result.values(metric.name))) for metric in metrics}
            return Reference("the single-task networks of this run", means)
    if published is None:
        return None
    row = published.baseline
    return Reference(
        f"the published single-task row ({row.source})", dict(zip(published.metrics, row.values, strict=True))
    )


def _delta(metrics: Sequence[Metric], result: Result, reference: Reference | None) -> Cell:
    if reference is None or result.kind == "stl":
        return Cell(math.nan)
    signs = [metric.higher_is_better for metric in metrics]
    baseline = [reference.values[metric.name] for metric in metrics]
    seeds = [[row.get(metric.name, math.nan) for metric in metrics] for row in result.seeds.values()]
    return Cell(*mean_and_error([delta_m(values, baseline, signs) for values in seeds]))


def _ranks(metrics: Sequence[Metric], results: Sequence[Result]) -> dict[str, float]:
    ranked = [result for result in results if result.kind == "mtl"]
    if len(ranked) < 2:
        return {}
    means = [[float(np.mean(result.values(metric.name))) for metric in metrics] for result in ranked]
    ranks = mean_rank(means, [metric.higher_is_better for metric in metrics])
    return {result.label: float(rank) for result, rank in zip(ranked, ranks, strict=True)}


def _note(result: Result) -> str:
    seeds = f"{len(result.seeds)} seed" + ("s" if len(result.seeds) != 1 else "")
    if result.kind == "trivial":
        return "constant prediction"
    return seeds + ("" if result.teleports is None else ", {} of {} teleports accepted".format(*result.teleports))


def _published(metrics: Sequence[Metric], table: PublishedTable | None) -> tuple[Line, ...]:
    if table is None:
        return ()
    return tuple(
        Line(
            row.method,
            tuple(Cell(table.value(row, metric.name)) for metric in metrics),
            math.nan if row.mean_rank is None else row.mean_rank,
            Cell(
                math.nan if row.delta_m is None or row.method in BASELINES else row.delta_m,
                math.nan if row.delta_m_error is None else row.delta_m_error,
            ),
            row.source,
            row.note,
        )
        for row in table.rows
    )

"""Delta_m, tables, whole files and the plot (examples/reporting.py)."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

import reporting


def test_delta_m_by_hand() -> None:
    # 10 % more error and 10 % less accuracy are 10 % worse each
    assert reporting.delta_m([1.1, 45.0], [1.0, 50.0], [False, True]) == pytest.approx(10.0)
    assert reporting.delta_m([0.5, 2.0, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(-50 / 3)


def test_delta_m_of_a_published_row() -> None:
    """LS on CityScapes as the CAGrad paper prints it; its depth errors are rounded to 0.4 %, so Delta_m is to 0.1."""
    baseline, row = [74.01, 93.16, 0.0125, 27.77], [75.18, 93.49, 0.0155, 46.77]
    assert reporting.delta_m(row, baseline, [True, True, False, False]) == pytest.approx(22.60, abs=0.1)


def test_delta_m_refuses_what_it_cannot_compare() -> None:
    with pytest.raises(ValueError, match="expected vectors of one length"):
        reporting.delta_m([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="expected baselines different from 0"):
        reporting.delta_m([1.0, 2.0], [1.0, 0.0])


def test_standard_error_is_scipys() -> None:
    values = [3.0, 4.5, 1.0, 7.25]
    mean, error = reporting.mean_and_error(values)
    assert mean == pytest.approx(np.mean(values))
    assert error == pytest.approx(scipy.stats.sem(values))
    assert math.isnan(reporting.mean_and_error([2.0])[1])
    assert reporting.with_error([2.0]) == "2.0"
    assert reporting.with_error([1.0, 3.0]) == "2.0 ± 1.0"
    assert reporting.with_error([]) == "-"
    with pytest.raises(ValueError, match="expected at least one"):
        reporting.mean_and_error([])


def test_tables_read_back(tmp_path: Path) -> None:
    table = reporting.Table(["method", "a, b"], [["LS", "1.0"], ["FairGrad + COST", '2 "x"']])
    reporting.save_table(tmp_path / "deep" / "results", table, {"rows": {"LS": 1.0}})
    with (tmp_path / "deep" / "results.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [list(table.header), *map(list, table.rows)]
    lines = (tmp_path / "deep" / "results.md").read_text().splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "--" not in line] == [
        list(table.header),
        *map(list, table.rows),
    ]
    assert len({len(line) for line in lines}) == 1
    assert json.loads((tmp_path / "deep" / "results.json").read_text()) == {"rows": {"LS": 1.0}}


def test_whole_files_survive_a_failing_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    reporting.write_whole(path, "old")

    def fail(source: str, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reporting.os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        reporting.write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_running_mean_is_the_plain_one() -> None:
    values = np.random.default_rng(0).normal(size=20)
    expected = [values[max(0, index - 3) : index + 1].mean() for index in range(20)]
    np.testing.assert_allclose(reporting.running_mean(values, 4), expected)


def test_plot_is_a_png(tmp_path: Path) -> None:
    from matplotlib.image import imread

    rng = np.random.default_rng(0)
    jumps = [reporting.Jump(10, True, -0.1), reporting.Jump(40, False, -0.2)]
    runs = [
        reporting.Curves(label, rng.random((5, 3)) + 0.1, rng.normal(size=50), jumps)
        for label in ("LS", "LS", "LS + COST")
    ]
    reporting.plot_training(tmp_path / "plot.png", "title", runs, ["a", "b", "c"], "loss")
    image = imread(tmp_path / "plot.png")
    assert image.shape == (975, 1560, 4)
    assert image.std() > 0.05  # something is drawn

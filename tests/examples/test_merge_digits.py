"""examples/merge_digits.py: its smallest size from the command line, its data, its table."""

from __future__ import annotations

import csv
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

import merge_digits
import merge_digits_data as data
import merge_digits_report as report


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The output folder of a ``--smoke`` run, and the processor time it took."""
    out = tmp_path_factory.mktemp("digits")
    began = time.process_time()
    assert merge_digits.main(["--smoke", "--out", str(out)]) == 0
    return out, time.process_time() - began


def test_a_smoke_run_writes_table_numbers_and_plot(smoke):
    out, seconds = smoke
    assert seconds < 30  # a few on an idle machine
    assert (out / "iterations.png").read_bytes().startswith(b"\x89PNG")
    with (out / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["test accuracy, %"] for row in rows] == list(report.ROWS)
    (result,) = json.loads((out / "table.json").read_text())["results"]
    for row in rows:
        accuracy = result["accuracy"][row["test accuracy, %"]]
        assert float(row["mean of the tasks"]) == pytest.approx(np.mean(accuracy), abs=0.051)
        assert [float(row[task]) for task in data.TASKS] == pytest.approx(accuracy, abs=0.051)
    markdown = (out / "table.md").read_text().splitlines()
    assert len(markdown) == 2 + len(rows)


def test_dvbasi_is_never_worse_than_its_start_on_the_selection_images(smoke):
    (result,) = json.loads((smoke[0] / "table.json").read_text())["results"]
    assert len(result["selection_loss"]) == 10
    for before, after in result["selection_loss"].values():
        assert after <= before


def test_learning_happened(smoke):
    (result,) = json.loads((smoke[0] / "table.json").read_text())["results"]
    mean = {row: float(np.mean(values)) for row, values in result["accuracy"].items()}
    assert mean["pre-trained"] > 20  # chance is 10
    assert mean["individually fine-tuned"] > mean["pre-trained"] + 10


def test_controls_get_the_epochs_of_the_iteration(smoke):
    """A curve has the start and each iteration, and the control's budget is the sum of the iterations' epochs."""
    (result,) = json.loads((smoke[0] / "table.json").read_text())["results"]
    for curve in result["curves"].values():
        assert len(curve) == data.SMOKE["iterations"] + 1
    for start in report.STARTS:
        assert 0 < result["epochs"][f"{start} + DV-BASI"] <= data.SMOKE["iterations"] * data.SMOKE["max_epochs"]


def test_a_finished_seed_is_not_run_again(smoke, monkeypatch):
    out, _ = smoke
    monkeypatch.setattr(merge_digits.Experiment, "run", lambda self: pytest.fail("it ran again"))
    before = (out / "table.csv").read_text()
    assert merge_digits.main(["--smoke", "--out", str(out)]) == 0
    assert (out / "table.csv").read_text() == before


def test_a_stop_keeps_what_is_done(tmp_path):
    run = merge_digits.Run(data.Sizes(**data.SMOKE), 0, tmp_path)
    assert merge_digits.execute(run, lambda text, count: None, lambda: True) is None
    assert not run.file.exists()


def test_ctrl_c_before_the_first_seed_is_done(tmp_path, monkeypatch, capsys):
    """Exit status 130, and no table that claims anything."""
    real = merge_digits.Experiment.add

    def interrupted(self, name, model):
        os.kill(os.getpid(), signal.SIGINT)
        real(self, name, model)

    monkeypatch.setattr(merge_digits.Experiment, "add", interrupted)
    assert merge_digits.main(["--smoke", "--out", str(tmp_path / "out")]) == 130
    assert "no seed was finished" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_splits_are_disjoint_and_depend_on_the_seed():
    parts = data.split(data.Sizes(), 0)
    images = torch.cat([part[0].flatten(1) for part in parts.values()])
    assert len(images) == 1797
    assert len(torch.unique(images, dim=0)) == len(
        torch.unique(data.transformed(data.load("digits")[0]).flatten(1), dim=0)
    )
    other = data.split(data.Sizes(), 1)
    assert not torch.equal(parts["fit"][1], other["fit"][1])
    assert torch.equal(parts["fit"][0], data.split(data.Sizes(), 0)["fit"][0])


def test_the_tasks_are_rearrangements_of_the_pixels():
    images = torch.rand(3, 8, 8)
    views = data.transformed(images)
    assert views.shape == (3, len(data.TASKS), 64)
    assert torch.equal(views[:, 0], images.flatten(1))
    for task, name in enumerate(data.TASKS):
        pixels = 1 - views[:, task] if name == "inverted" else views[:, task]
        torch.testing.assert_close(pixels.sort(dim=1).values, images.flatten(1).sort(dim=1).values)
    assert all(not torch.equal(views[:, 0], views[:, task]) for task in range(1, len(data.TASKS)))


def test_gains_are_paired_by_seed():
    """Two seeds of different difficulty and the same gain: its standard error is zero."""
    accuracy = {row: [50.0] * 6 for row in report.ROWS}
    results = []
    for level in (60.0, 70.0):
        shifted = {**accuracy, "task arithmetic": [level] * 6, "task arithmetic + DV-BASI": [level + 2] * 6}
        results.append({"accuracy": shifted})
    rows = {row[0]: row for row in report.table(results).rows}
    assert rows["task arithmetic"][1:3] == ["65.0 ± 5.0", ""]
    assert rows["task arithmetic + DV-BASI"][1:3] == ["67.0 ± 5.0", "2.00 ± 0.00"]


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--jobs", "0"], ["--data", "faces"]])
def test_wrong_usage(words):
    with pytest.raises(SystemExit) as caught:
        merge_digits.main(words)
    assert caught.value.code == 2


def test_an_output_that_is_a_file_is_known_before_anything_is_trained(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        merge_digits.main(["--smoke", "--out", str(tmp_path / "file")])
    assert "--out: expected a folder" in capsys.readouterr().err

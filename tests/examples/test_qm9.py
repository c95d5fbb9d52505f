"""Training, resuming and reporting of examples/qm9.py."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

import qm9
import qm9_train
import run_pool
from qm9_data import Data, DataSettings, load, split

SMALL: dict[str, Any] = {"epochs": 4, "data": DataSettings(molecules=200), "batch": 25}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As the command itself does: two threads on networks this small only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cached features of 200 molecules."""
    path = tmp_path_factory.mktemp("data")
    load(SMALL["data"], path)
    return path


@pytest.fixture(scope="module")
def data(folder: Path) -> Data:
    return split(load(SMALL["data"], folder), seed=0)


def quiet(text: str, epochs: int) -> None:
    """No progress bar."""


def stop_after(epochs: int) -> Callable[[], bool]:
    """A ``stopped`` that says yes once that many epochs are done (it is asked before and after each)."""
    asked: list[None] = []

    def stopped() -> bool:
        asked.append(None)
        return len(asked) >= 2 * epochs

    return stopped


# ------------------------------------------------------------------------------------------------ training


def test_batches_visit_every_row_once_and_depend_on_seed_and_epoch() -> None:
    first = torch.cat(list(qm9_train.batches(60, 20, seed=0, epoch=3)))
    assert sorted(first.tolist()) == list(range(60))
    assert torch.cat(list(qm9_train.batches(60, 20, seed=0, epoch=3))).equal(first)
    for other in ({"seed": 1, "epoch": 3}, {"seed": 0, "epoch": 4}):
        assert not torch.cat(list(qm9_train.batches(60, 20, **other))).equal(first)
    assert [len(rows) for rows in qm9_train.batches(59, 20, 0, 0)] == [20, 20]
    assert [len(rows) for rows in qm9_train.batches(7, 20, 0, 0)] == [7]


def test_stacked_single_task_networks_train_as_separate_ones_do(data: Data) -> None:
    run = qm9_train.RunSettings("stl", False, 3, **SMALL)
    stacked = qm9_train.SingleTaskLearner(run, 140, steps_per_epoch=6)
    for epoch in range(2):
        for rows in qm9_train.batches(150, 25, run.seed, epoch):
            stacked.step(data.train.inputs[rows], data.train.targets[rows])
    for task in (0, 10):
        torch.manual_seed(run.seed * 11 + task)
        net = qm9_train.MultiTaskNet(140, 1)
        start = net(data.test.inputs)[0].detach()
        adam = torch.optim.Adam(net.parameters(), lr=1e-3)
        for epoch in range(2):
            for rows in qm9_train.batches(150, 25, run.seed, epoch):
                adam.zero_grad()
                errors = net(data.train.inputs[rows])[0] - data.train.targets[rows][:, task]
                errors.square().mean().backward()
                adam.step()
        alone, together = net(data.test.inputs)[0], stacked.predict(data.test.inputs)[:, task]
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
        assert (alone - start).abs().max() > 0.05  # it did train


def test_errors_are_in_usual_units(data: Data) -> None:
    """A network that always predicts the training mean errs by the mean absolute deviation from it."""

    class Constant:
        def predict(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(inputs), 11)

    errors = qm9_train.absolute_errors(Constant(), data.test, data.unit)  # type: ignore[arg-type]
    np.testing.assert_allclose(errors, (data.test.targets.abs().mean(0) * data.unit).tolist(), rtol=1e-6)
    assert 300 < errors[2] < 900  # HOMO energies spread over about 600 meV


@pytest.mark.parametrize(("method", "cost"), [("fairgrad", True), ("nashmtl", False), ("stl", False)])
def test_resuming_ends_where_an_undisturbed_run_does(data: Data, tmp_path: Path, method: str, cost: bool) -> None:
    run = qm9_train.RunSettings(method, cost, 0, **(SMALL | {"epochs": 6}))
    undisturbed = qm9_train.train(run, data, tmp_path / "a", quiet, lambda: False)
    assert qm9_train.train(run, data, tmp_path / "b", quiet, stop_after(2)) is None
    saved = torch.load(tmp_path / "b", weights_only=True)["history"]
    assert len(saved["train_loss"]) == 2
    resumed = qm9_train.train(run, data, tmp_path / "b", quiet, lambda: False)
    assert undisturbed is not None
    assert resumed is not None
    if cost:
        assert saved["teleports"], "the part before the stop should have a teleport to remember"
        assert len(undisturbed["teleports"]) > len(saved["teleports"])
    for history in (undisturbed, resumed):
        del history["seconds"]
        for teleport in history["teleports"]:
            del teleport["seconds"]
    assert resumed == undisturbed  # every loss, error and cosine, bit for bit


def test_finished_runs_are_not_trained_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = qm9_train.RunSettings("stl", False, 0, **SMALL)
    first = qm9_train.execute(run, quiet, lambda: False, (folder, tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    monkeypatch.setattr(qm9_train, "train", lambda *arguments: pytest.fail("trained again"))
    assert qm9_train.execute(run, quiet, lambda: False, (folder, tmp_path)) == first


def test_any_other_setting_is_another_run() -> None:
    run = qm9_train.RunSettings("fairgrad", True, 0)
    others = [
        qm9_train.RunSettings("fairgrad", False, 0),
        qm9_train.RunSettings("fairgrad", True, 1),
        qm9_train.RunSettings("fairgrad", True, 0, epochs=26),
        qm9_train.RunSettings("fairgrad", True, 0, data=DataSettings(6001)),
        qm9_train.RunSettings("fairgrad", True, 0, start=0.5),
    ]
    assert len({run.key, *(other.key for other in others)}) == 6


# ------------------------------------------------------------------------------------------------ several runs


def square(number: int, progress: Callable[[str, int], None], stopped: Callable[[], bool]) -> int:
    """A "training" that fails on 13."""
    if number == 13:
        raise ArithmeticError("13 does not converge")
    progress(str(number), 1)
    return number**2


def test_pool_keeps_the_order() -> None:
    assert run_pool.run_all([3, 1, 2], square, epochs=3, jobs=1) == run_pool.Outcome([9, 1, 4], stopped=False)


@pytest.mark.parametrize("jobs", [1, 2])
def test_pool_passes_errors_on(jobs: int) -> None:
    with pytest.raises(ArithmeticError, match="13 does not converge"):
        run_pool.run_all([3, 13], square, epochs=2, jobs=jobs)


SLEEPERS = """
import os, sys, time
sys.path.insert(0, {folder!r})
import run_pool

def sleep(number, progress, stopped):
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    run_pool.run_all([1, 2], sleep, epochs=2, jobs=2)
"""


def test_killed_command_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "sleepers.py"
    script.write_text(SLEEPERS.format(folder=str(Path(run_pool.__file__).parent)))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert len({int(process.stdout.readline()) for _ in range(2)} - {process.pid}) == 2
    process.kill()
    # ends once nobody holds the other end of the pipe any more: the command, and both of its processes
    process.communicate(timeout=120)


def test_seeds_are_a_count_or_a_list() -> None:
    assert qm9.parse_seeds("3") == (0, 1, 2)
    assert qm9.parse_seeds("4,7") == (4, 7)
    assert qm9.parse_seeds("4,") == (4,)
    for wrong in ("0", "-1", "a", "1,b", "", ",", "-1,2"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a count such as 3"):
            qm9.parse_seeds(wrong)


def test_plan_follows_the_command_line() -> None:
    def labels(*arguments: str) -> list[tuple[str, int]]:
        return [(run.label, run.seed) for run in qm9.plan(qm9.parse_arguments(arguments))]

    assert labels("--seeds", "4,") == [("STL", 4), ("FairGrad", 4), ("FairGrad + COST", 4)]
    assert labels("--seeds", "1", "--no-cost", "--no-stl", "--method", "ls", "cagrad") == [("LS", 0), ("CAGrad", 0)]
    assert labels("--seeds", "2", "--cost", "--no-stl") == [("FairGrad + COST", 0), ("FairGrad + COST", 1)]
    runs = qm9.plan(qm9.parse_arguments(["--seeds", "3"]))
    assert {run.data for run in runs} == {DataSettings()}  # one split for all seeds: no test molecule is trained on


# ------------------------------------------------------------------------------------------------ the command


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, qm9.__file__, *map(str, arguments)]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}


def test_smoke_command(folder: Path, tmp_path: Path) -> None:
    arguments = command("--smoke", "--jobs", "2", "--data-dir", folder, "--out", tmp_path)
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "smoke"
    assert (out / "results.md").read_text(encoding="utf-8") in done.stdout
    assert (out / "results.csv").read_text(encoding="utf-8").count("\n") == 4
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    details = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(details["rows"]) == ["STL", "FairGrad", "FairGrad + COST"]
    baseline = np.array(details["rows"]["STL"]["mae_per_seed"]["0"])
    for label in ("FairGrad", "FairGrad + COST"):
        row = details["rows"][label]
        expected = 100 * np.mean(np.array(row["mae_per_seed"]["0"]) / baseline - 1)
        assert row["delta_m"]["mean"] == pytest.approx(expected)
        # two epochs: the mean of the last five is the mean of both
        run = json.loads(next((out / "runs").glob(f"fairgrad{'-cost' if 'COST' in label else ''}-seed0-*")).read_text())
        np.testing.assert_allclose(row["mae_per_seed"]["0"], np.mean(run["test_mae"], axis=0))
    assert details["rows"]["FairGrad"]["teleports_per_seed"]["0"] == []


def test_interrupt_prints_what_is_done_and_a_rerun_goes_on(folder: Path, tmp_path: Path) -> None:
    epochs = 120
    arguments = command("--molecules", "200", "--epochs", str(epochs), "--seeds", "1", "--jobs", "1", "--no-cost",
                        "--data-dir", folder, "--out", tmp_path)  # fmt: skip
    process = subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    runs, deadline = tmp_path / "runs", time.monotonic() + 180
    while not list(runs.glob("fairgrad*.ckpt")):
        assert time.monotonic() < deadline, "no checkpoint within three minutes"
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 130, errors
    assert "| STL" in output
    assert "FairGrad" not in output
    done = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "| FairGrad" in done.stdout
    (result,) = runs.glob("fairgrad*.json")
    assert len(json.loads(result.read_text())["train_loss"]) == epochs
    assert not list(runs.glob("*.ckpt"))

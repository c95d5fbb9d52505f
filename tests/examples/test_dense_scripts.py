"""nyuv2.py and cityscapes.py as a user runs them: smoke size, SIGKILL and resume, and errors in one line."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

import cityscapes
import nyuv2
from dense.data.synthetic import SyntheticSettings, write_synthetic
from dense.engine.recorder import read_log
from dense.errors import UserError, run_main
from dense.spec import NYUV2

EXAMPLES = Path(nyuv2.__file__).parent
ROWS = ["STL", "LS", "CAGrad", "Nash-MTL", "FairGrad", "FairGrad + COST"]


def arguments(folder: Path, out: str, *options: str) -> list[str]:
    return ["--data", "synthetic", "--smoke", "--cache", str(folder / "data"), "--out", str(folder / out), *options]


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield  # --smoke sets one
    torch.set_num_threads(before)


def kill_when(predicate: Any, process: subprocess.Popen[bytes]) -> None:
    """SIGKILL as soon as the predicate holds."""
    deadline = time.monotonic() + 120
    while not predicate():
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "seconds"}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b or (a != a and b != b)


def check_outputs(out: Path, metrics: int) -> None:
    rows = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    own = [row for row in rows if row["source"] == "this run"]
    assert [row["method"] for row in own] == ["constant", *ROWS]
    assert len(json.loads((out / "results.json").read_text())["FairGrad"]["0"]) == metrics
    assert all(row["delta_m_pct"] for row in own if row["method"] not in ("STL",))
    text = (out / "table.md").read_text()
    assert "cannot be compared with the published ones" in text
    assert "COST (NeurIPS 2025)" in text
    for name in ("metrics.png", "panels-fairgrad+cost.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"


def test_cityscapes_smoke_survives_sigkill_bit_for_bit(tmp_path: Path) -> None:
    assert cityscapes.main(arguments(tmp_path, "whole")) == 0
    check_outputs(tmp_path / "whole", 4)
    teleports = [t for row in read_log(tmp_path / "whole/fairgrad+cost/seed0/log.jsonl") for t in row.teleports]
    assert teleports  # COST did something

    argv = arguments(tmp_path, "cut", "--preset", "fairgrad+cost")
    process = subprocess.Popen([sys.executable, str(EXAMPLES / "cityscapes.py"), *argv], stderr=subprocess.DEVNULL)
    kill_when((tmp_path / "cut/fairgrad+cost/seed0/checkpoint.pt").exists, process)
    assert not (tmp_path / "cut/table.md").exists()
    assert cityscapes.main(argv) == 0  # another process than the killed one
    name = "fairgrad+cost/seed0/checkpoint.pt"
    whole, cut = (without_times(torch.load(tmp_path / n / name, weights_only=True)) for n in ("whole", "cut"))
    assert len(cut["history"]) == 2
    assert_same(whole, cut)


def test_nyuv2_smoke_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nyuv2.main(arguments(tmp_path, "out", "--model", "mtan")) == 0
    assert "| FairGrad + COST |" in capsys.readouterr().out
    check_outputs(tmp_path / "out", 9)


def test_a_second_call_trains_nothing_and_more_seeds_only_the_new_ones(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "out", "--preset", "ls", "fairgrad")
    assert nyuv2.main(argv) == 0
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("checkpoint.pt")}
    assert nyuv2.main([*argv, "--seeds", "0", "1"]) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    rows = list(csv.DictReader((tmp_path / "out/table.csv").read_text().splitlines()))
    ls = next(row for row in rows if row["method"] == "LS")
    seeds = [values["mIoU"] for values in json.loads((tmp_path / "out/results.json").read_text())["LS"].values()]
    assert float(ls["mIoU"]) == pytest.approx(np.mean(seeds))
    assert float(ls["mIoU_se"]) == pytest.approx(np.std(seeds, ddof=1) / 2**0.5)


def real_set(root: Path) -> Path:
    return write_synthetic(root / "set", NYUV2, SyntheticSettings(2, 2, 32, 32), progress=False)


def test_smoke_takes_the_first_images_of_a_real_set(tmp_path: Path) -> None:
    root = write_synthetic(tmp_path / "set", NYUV2, SyntheticSettings(6, 3, 32, 32), progress=False)
    (root / "train/image/5.npy").write_bytes(b"never read")
    words = ["--data", str(root), "--smoke", "--epochs", "1", "--preset", "ls", "--out", str(tmp_path / "out")]
    assert nyuv2.main(words) == 0
    assert "4 training and 2 validation images" in (tmp_path / "out/table.md").read_text()
    with pytest.raises(UserError, match=r"5\.npy: truncated"):
        nyuv2.main([word for word in words if word != "--smoke"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere"], "nowhere: no such folder"),
        (["--data", "{set}", "--preset", "sgd"], "sgd: expected one of"),
        (["--data", "{set}", "--device", "cuda:77"], "--device cuda:77"),
        (["--data", "{set}", "--epochs", "0"], "--epochs: expected at least 1"),
        (["--data", "synthetic", "--size", "33", "64", "--cache", "{set}"], "multiples of 32"),
        (["--data", "synthetic", "--data-seed", "-1"], "--data-seed: expected at least 0"),
        (["--data", "synthetic", "--cache", "{set}/train/image/0.npy/x"], "0.npy"),
        (["--data", "{set}", "--out", "{set}/train/image/0.npy"], "0.npy"),
        (["--data", "{set}", "--seeds", "0", "-1"], "--seeds: expected at least 0, got -1"),
        (["--data", "{set}", "--batch-size", "0"], "--batch-size: expected at least 1, got 0"),
        (["--data", "{set}", "--workers", "-1"], "--workers: expected at least 0"),
        (["--data", "{set}", "--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--data", "{set}", "--eval-every", "0"], "--eval-every: expected at least 1"),
        (["--data", "{set}", "--cost-start", "-1"], "--cost-start: expected at least 0"),
        (["--data", "{set}", "--lr", "nan"], "--lr: expected a number > 0"),
        (["--data", "{set}", "--lr", "0"], "--lr: expected a number > 0"),
        (["--data", "{set}", "--width", "nan"], "--width: expected a number > 0"),
    ],
    ids=lambda value: " ".join(value[2:]) or "path" if isinstance(value, list) else "",
)
def test_user_errors_are_one_line_and_exit_code_2(
    tmp_path: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    root = real_set(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run_main(lambda: nyuv2.main(["--smoke", *(word.format(set=root) for word in options)]))
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert message in lines[-1]


def test_scenes_are_not_drawn_with_other_label_sets(tmp_path: Path) -> None:
    for classes in ("2", "19"):
        with pytest.raises(UserError, match="the synthetic scenes have 7 classes"):
            cityscapes.main(arguments(tmp_path, "out", "--classes", classes))


def exit_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    """What run_main prints for ``error``."""

    def fail() -> int:
        raise error

    with pytest.raises(SystemExit) as stopped:
        run_main(fail)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_messages_of_several_lines_become_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_line(UserError("a.npy: bad (first\nsecond)"), capsys) == "error: a.npy: bad (first second)\n"
    wrapped = "Caught UserError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File\n"
    wrapped += "dense.errors.UserError: b.npy: bad (first\nsecond)"
    assert exit_line(UserError(wrapped), capsys) == "error: b.npy: bad (first second)\n"


def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SystemExit) as stopped:
        run_main(lambda: nyuv2.main(arguments(tmp_path, "out", "--preset", "ls", "--tensorboard")))
    assert stopped.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "tensorboard" in line
    assert "pip install" in line


def test_faults_of_the_program_keep_their_traceback() -> None:
    def fail() -> int:
        raise BrokenPipeError("no file in it")

    with pytest.raises(BrokenPipeError):
        run_main(fail)


def test_a_bad_label_that_only_a_worker_sees_is_one_line_too(tmp_path: Path) -> None:
    root = real_set(tmp_path)
    path = root / "train/label/1.npy"
    np.save(path, np.load(path) + 50)
    words = ["--data", str(root), "--check", "headers", "--workers", "1", "--width", "0.02", "--epochs", "1",
             "--out", str(tmp_path / "out"), "--preset", "ls"]  # fmt: skip
    done = subprocess.run([sys.executable, str(EXAMPLES / "nyuv2.py"), *words], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {path}: expected labels from -1 (void) to 12")


@pytest.mark.parametrize(
    ("main", "words"),
    [(nyuv2.main, []), (cityscapes.main, []), (nyuv2.main, ["prepare"]), (cityscapes.main, ["prepare"])],
)
def test_help(main: Any, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    assert "--out" in capsys.readouterr().out


def test_faithful_metrics_of_absent_classes_are_dashes_in_table_and_nulls_in_json(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "out", "--preset", "ls", "--faithful", "--no-augment")
    assert nyuv2.main(argv) == 0
    text = (tmp_path / "out/table.md").read_text()
    assert "as in the public scripts (--faithful)" in text
    line = next(line for line in text.splitlines() if line.startswith("| LS "))
    assert [cell.strip() for cell in line.split("|")][2] == "–"  # two tiny images do not show all 13 classes
    assert json.loads((tmp_path / "out/results.json").read_text())["LS"]["0"]["mIoU"] is None

"""gpu_check.py and gpu_check.sh as far as they go without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not installed packages
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_check
from dense.spec import CITYSCAPES


@pytest.fixture(autouse=True)
def _torch_as_before() -> Iterator[None]:
    threads, cudnn, matmul = torch.get_num_threads(), torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    cudnn.allow_tf32, matmul.allow_tf32 = before


def test_a_device_that_agrees_passes_and_one_that_does_not_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = {"losses": torch.ones(3), "Gramian": torch.eye(3), "weights": torch.ones(3), "parameters": torch.ones(9)}
    off = {name: value * (1.01 if name == "Gramian" else 1) for name, value in exact.items()}
    monkeypatch.setattr(gpu_check, "one_step", lambda device: exact if device == "cpu" else off)
    monkeypatch.setattr(gpu_check, "time_methods", lambda *args: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu"])
    assert gpu_check.main() == 0
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "meta"])
    assert gpu_check.main() == 1
    assert "meta and cpu disagree" in capsys.readouterr().err


def test_what_a_step_leaves_behind_is_finite_and_has_three_tasks() -> None:
    found = gpu_check.one_step("cpu")
    assert [tuple(found[name].shape) for name in ("losses", "Gramian", "weights")] == [(3,), (3, 3), (3,)]
    assert all(torch.isfinite(value).all() for value in found.values())
    assert found["parameters"].std() > 0


def test_every_row_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_check.time_methods(CITYSCAPES, (8, 8, 8, 8, 8), (32, 32), "cpu", 1)
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[2:] == [
        "Adam on the sum",
        "COST, LS",
        "COST, CAGrad",
        "COST, Nash-MTL",
        "COST, FairGrad",
        "one teleport (LoRA, rank 5)",
        "FairGrad + COST",
    ]


def test_a_slow_device_gets_fewer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(3 * tick) for tick in range(1000))  # every call takes three seconds
    monkeypatch.setattr(gpu_check.time, "perf_counter", lambda: next(clock))
    calls = []
    assert gpu_check.timed(lambda: calls.append(1), "cpu", 20) == 3
    assert len(calls) == 2 + 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 2
    assert capsys.readouterr().err == "error: no CUDA device here\n"


def test_the_shell_script_parses() -> None:
    subprocess.run(["bash", "-n", str(Path(gpu_check.__file__).with_suffix(".sh"))], check=True)

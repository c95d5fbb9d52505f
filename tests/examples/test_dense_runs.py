"""Whole runs of the training loop: interrupted and resumed, teleports, mixed precision, evaluation, panels."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.baselines import fit_constants, trivial_metrics
from dense.data.layout import open_split, save_array
from dense.data.synthetic import SyntheticSettings, write_synthetic
from dense.engine.checkpoint import seed_everything
from dense.engine.loop import Run, evaluate
from dense.engine.methods import Row
from dense.engine.recorder import read_log
from dense.engine.settings import TrainSettings, check_device
from dense.errors import UserError
from dense.panels import plot_panels
from dense.problem import DenseOptions, DenseProblem
from dense.spec import CITYSCAPES, NYUV2

import cost_mtl

FILTERS = (4, 4, 8, 8, 8)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> DenseProblem:
    root = write_synthetic(
        tmp_path_factory.mktemp("data") / "city", CITYSCAPES, SyntheticSettings(6, 2, 32, 32), progress=False
    )
    splits = {name: open_split(root, CITYSCAPES, name) for name in ("train", "val")}
    return DenseProblem(CITYSCAPES, splits, DenseOptions(batch_size=3, filters=FILTERS))


def settings(**changes: Any) -> TrainSettings:
    base = {"epochs": 3, "lr": 3e-3, "cost_start": 0, "teleporter": "dense", "trigger": "always"}
    return TrainSettings(**{**base, **changes})


# ------------------------------------------------------------------------------------------------ runs


def state_of(folder: Path) -> dict[str, Any]:
    content = torch.load(folder / "checkpoint.pt", weights_only=True)
    for row in content["history"]:
        row.pop("seconds")
        for teleport in row["teleports"]:
            teleport.pop("seconds")
    return content


def assert_same(a: Any, b: Any, where: str = "checkpoint") -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif where.endswith(".seconds"):
        return
    else:
        assert a == b or (a != a and b != b), where


@pytest.mark.parametrize(
    "row", [Row("fairgrad", cost=True), Row("uw", official=False), Row("stl")], ids=lambda r: r.key
)
def test_an_interrupted_run_goes_on_bit_for_bit(
    problem: DenseProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    tasks = problem.tasks if row.word != "stl" else ("depth",)
    expected = Run(problem, row, tasks, settings(), tmp_path / "whole", {}).train()

    original, calls = cost_mtl.COST.step, 0

    def stop(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:  # in the middle of the second epoch
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(cost_mtl.COST, "step", stop)
    with pytest.raises(KeyboardInterrupt):
        Run(problem, row, tasks, settings(), tmp_path / "cut", {}).train()
    monkeypatch.setattr(cost_mtl.COST, "step", original)
    seed_everything(99)
    found = Run(problem, row, tasks, settings(), tmp_path / "cut", {}).train()
    assert found == expected
    assert_same(state_of(tmp_path / "whole"), state_of(tmp_path / "cut"))
    assert [r.epoch for r in read_log(tmp_path / "cut" / "log.jsonl")] == [1, 2, 3]


def test_teleports_are_tried_once_an_epoch_and_logged(problem: DenseProblem, tmp_path: Path) -> None:
    Run(problem, Row("fairgrad", cost=True), problem.tasks, settings(cost_start=1), tmp_path, {}).train()
    tried = [len(row.teleports) for row in read_log(tmp_path / "log.jsonl")]
    assert tried[0] == 0
    assert max(tried) == 1
    assert sum(tried) >= 1
    record = next(row.teleports[0] for row in read_log(tmp_path / "log.jsonl") if row.teleports)
    assert {"step", "accepted", "reason", "drift", "cosine_before", "cosine_after"} <= record.keys()


def test_a_checkpoint_of_other_settings_is_refused(problem: DenseProblem, tmp_path: Path) -> None:
    Run(problem, Row("ls"), problem.tasks, settings(epochs=1), tmp_path, {"data": "a"}).train()
    with pytest.raises(UserError, match=r"made with lr=0\.003, now 0\.1"):
        Run(problem, Row("ls"), problem.tasks, settings(epochs=1, lr=0.1), tmp_path, {"data": "a"}).train()
    with pytest.raises(UserError, match="made with data='a', now 'b'"):
        Run(problem, Row("ls"), problem.tasks, settings(epochs=1), tmp_path, {"data": "b"}).train()
    Run(problem, Row("ls"), problem.tasks, settings(epochs=1, lr=0.1, resume=False), tmp_path, {}).train()


def test_the_learning_rate_is_halved_half_way(problem: DenseProblem, tmp_path: Path) -> None:
    Run(problem, Row("ls"), problem.tasks, settings(epochs=4), tmp_path, {}).train()
    assert [row.lr for row in read_log(tmp_path / "log.jsonl")] == [3e-3, 3e-3, 1.5e-3, 1.5e-3]


@pytest.mark.parametrize(("epochs", "before"), [(1, 1), (3, 2), (25, 13), (200, 100)])
def test_the_learning_rate_is_halved_once_whatever_the_number_of_epochs(
    problem: DenseProblem, epochs: int, before: int
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = problem.scheduler(optimizer, epochs)
    rates = []
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [1.0] * before + [0.5] * (epochs - before)


def test_two_evaluations_agree_and_training_does_not_reach_the_meter(problem: DenseProblem, tmp_path: Path) -> None:
    run = Run(problem, Row("ls"), problem.tasks, settings(epochs=1), tmp_path, {})
    first = evaluate(problem, run.model, problem.tasks, "val", run.settings)
    assert evaluate(problem, run.model, problem.tasks, "val", run.settings) == first


def test_bf16_autocast_trains_with_float32_weights(problem: DenseProblem, tmp_path: Path) -> None:
    run = Run(problem, Row("fairgrad"), problem.tasks, settings(epochs=1, amp="bf16"), tmp_path / "bf16", {})
    metrics = run.train()
    assert all(p.dtype == torch.float32 for p in run.model.parameters())
    assert all(math.isfinite(value) for value in metrics.values())
    plain = Run(problem, Row("fairgrad"), problem.tasks, settings(epochs=1), tmp_path / "plain", {}).train()
    assert metrics["abs_err"] != plain["abs_err"]
    assert metrics["abs_err"] == pytest.approx(plain["abs_err"], rel=0.1)


class PassThrough(torch.nn.Module):
    """Stands in for what torch.compile returns; building real kernels takes minutes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module, self.modes = module, []

    def forward(self, image: torch.Tensor) -> Any:
        self.modes.append(self.module.training)
        return self.module(image)


def test_training_and_evaluation_go_through_the_compiled_forward(
    problem: DenseProblem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Run(problem, Row("ls"), problem.tasks, settings(epochs=1), tmp_path / "plain", {}).train()
    monkeypatch.setattr(torch, "compile", PassThrough)
    run = Run(problem, Row("ls"), problem.tasks, settings(epochs=1, compile=True), tmp_path / "compiled", {})
    assert run.train() == plain
    assert isinstance(run.forward, PassThrough)
    assert run.forward.modes == [True, True, False]  # two training batches, one of validation


def test_settings_that_make_no_sense_are_named() -> None:
    with pytest.raises(UserError, match="--epochs"):
        settings(epochs=0)
    with pytest.raises(UserError, match="fp16"):
        settings(amp="fp16")
    with pytest.raises(UserError, match="--device"):
        check_device("no-such-device")
    assert settings(epochs=30, eval_every=7).evaluates(21)
    assert [e for e in range(1, 31) if settings(epochs=30, eval_every=50).evaluates(e)] == list(range(21, 31))


# ------------------------------------------------------------------------------------------------ constants, panels


def test_constants_are_the_training_sets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(3):
            base = tmp_path / split
            save_array(base / "image" / f"{i}.npy", rng.random((32, 32, 3)).astype(np.float32))
            save_array(base / "label" / f"{i}.npy", rng.choice([-1, 4, 4, 7], (32, 32)).astype(np.float32))
            save_array(base / "depth" / f"{i}.npy", rng.choice([0, 1.0, 3.0], (32, 32, 1)).astype(np.float32))
            normal = np.zeros((32, 32, 3), np.float32)
            normal[:16] = [0, 0.6, -0.8]
            save_array(base / "normal" / f"{i}.npy", normal)
    splits = {name: open_split(tmp_path, NYUV2, name) for name in ("train", "val")}
    problem = DenseProblem(NYUV2, splits, DenseOptions(batch_size=2, filters=FILTERS))
    constants = fit_constants(problem)
    assert constants["segmentation"].argmax().item() == 4
    depth = np.concatenate([np.load(tmp_path / f"train/depth/{i}.npy").ravel() for i in range(3)])
    assert constants["depth"].item() == pytest.approx(depth[depth > 0].mean(), rel=1e-6)
    torch.testing.assert_close(constants["normal"], torch.tensor([0, 0.6, -0.8]))
    result = trivial_metrics(problem)
    labels = np.concatenate([np.load(tmp_path / f"val/label/{i}.npy").ravel() for i in range(3)])
    assert result["pix_acc"] == pytest.approx(100 * (labels == 4).sum() / (labels >= 0).sum())
    assert result["normal_mean"] == pytest.approx(0, abs=0.1)


def test_panels_are_drawn_for_both_data_sets(problem: DenseProblem, tmp_path: Path) -> None:
    path = plot_panels(tmp_path / "p.png", problem, problem.model(problem.tasks), "cpu", count=2)
    assert path.read_bytes()[:4] == b"\x89PNG"

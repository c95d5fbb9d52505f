"""The training loop's parts: rows and recipes, checkpoints, logs, tables and plots."""

from __future__ import annotations

import csv
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.engine.checkpoint import load_checkpoint, restore_rng, rng_state, save_checkpoint, seed_everything
from dense.engine.methods import WORDS, Row, adam, parse_rows, recipe
from dense.engine.plots import plot_metrics
from dense.engine.problem import EpochRow, Metric, mean_of_last
from dense.engine.published import load_published
from dense.engine.recorder import Recorder, read_log, row_from_json, row_to_json
from dense.engine.tables import Result, build_table
from dense.errors import UserError
from dense.spec import CITYSCAPES, NYUV2

import cost_mtl

# ------------------------------------------------------------------------------------------------ rows, recipes


def test_rows_are_read_from_the_command_line() -> None:
    rows = parse_rows(["stl", "fairgrad+cost"], ["fairgrad"], None)
    assert rows == [Row("stl"), Row("fairgrad", cost=True), Row("fairgrad", official=False)]
    assert [row.key for row in rows] == ["stl", "fairgrad+cost", "fairgrad-plain"]
    assert [row.label for row in rows] == ["STL", "FairGrad + COST", "FairGrad (cost_mtl defaults)"]
    assert parse_rows(["stl", "ls"], [], True) == [Row("stl"), Row("ls", cost=True)]
    assert parse_rows(["ls+cost"], [], False) == [Row("ls")]


@pytest.mark.parametrize("words", [["adam"], ["ls+turbo"], ["stl+cost"], ["+cost"]])
def test_an_unknown_row_is_named(words: list[str]) -> None:
    with pytest.raises(UserError, match=words[0].replace("+", r"\+")):
        parse_rows(words, [], None)


def test_a_method_without_a_preset_is_refused_as_preset() -> None:
    with pytest.raises(UserError, match="--method mgda"):
        parse_rows(["mgda"], [], None)


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(3, 4)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(3))

    def losses(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.trunk(x).tanh()
        return [100 ** (i - 1) * (head(h) - i - 1).square().mean() for i, head in enumerate(self.heads)]


def gradients(word: str) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Shared gradient, head gradients of one step of the official recipe; G and the heads' own gradients."""
    model, x = TwoHeads(), torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    losses = model.losses(x)
    trunk = list(model.trunk.parameters())
    G = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(loss, trunk, retain_graph=True)])
                     for loss in losses])  # fmt: skip
    own = [torch.autograd.grad(loss, head.weight, retain_graph=True)[0]
           for loss, head in zip(losses, model.heads, strict=True)]  # fmt: skip
    made = recipe(Row(word), 3)
    optimizer = cost_mtl.COST(
        torch.optim.SGD(model.parameters(), lr=0.0), model, weighting=made.weighting, heads=made.heads,
        max_norm=made.max_norm, teleporter=None,
    )  # fmt: skip
    optimizer.step(model.losses, x)
    shared = torch.cat([p.grad.flatten() for p in trunk])
    return shared, [head.weight.grad for head in model.heads], G, own


def test_official_ls_is_the_gradient_of_the_sum() -> None:
    shared, heads, G, own = gradients("ls")
    torch.testing.assert_close(shared, G.sum(0))
    torch.testing.assert_close(heads, own)


def test_official_nash_clips_to_one_and_weights_the_heads() -> None:
    shared, heads, G, own = gradients("nashmtl")
    # M w = 1/w: g_i . d = 1/w_i, so that the norm is the root of K = 3 before the clip
    assert shared.norm().item() == pytest.approx(1, rel=1e-4)
    w = 1 / (G @ (shared * 3**0.5))
    torch.testing.assert_close((G.T @ w) / 3**0.5, shared, rtol=1e-3, atol=1e-4)
    for head, gradient, weight in zip(heads, own, w, strict=True):
        torch.testing.assert_close(head, weight * gradient, rtol=1e-3, atol=1e-5)


def test_official_fairgrad_has_alpha_two_clips_to_one_and_leaves_the_heads_alone() -> None:
    shared, heads, G, own = gradients("fairgrad")
    assert shared.norm().item() == pytest.approx(1, rel=1e-4)
    # M w = w^(-1/2): g_i . d = w_i^(-1/2) up to the scale that the clip took away
    w = (G @ shared) ** -2.0
    direction = G.T @ w
    torch.testing.assert_close(direction / direction.norm(), shared, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(heads, own)


def test_official_cagrad_is_k_times_the_direction_over_one_plus_c_squared() -> None:
    shared, heads, G, own = gradients("cagrad")
    c, g0 = 0.4, G.mean(0)
    # d = K/(1 + c^2) (g_0 + c |g_0| g_w/|g_w|): what is left after g_0 has length c |g_0|, and lies in the cone of G
    rest = shared * (1 + c**2) / 3 - g0
    assert rest.norm().item() == pytest.approx(c * g0.norm().item(), rel=1e-3)
    torch.testing.assert_close(heads, own)


def test_official_fairgrad_is_k_times_the_solution_before_the_clip() -> None:
    M = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
    torch.testing.assert_close(recipe(Row("fairgrad"), 2).weighting(M), 2 * cost_mtl.FairGrad(alpha=2.0)(M))


@pytest.mark.parametrize("word", WORDS)
def test_every_word_trains_with_cost_mtls_defaults(word: str) -> None:
    model = TwoHeads()
    made = recipe(Row(word, official=False), 3)
    optimizer = cost_mtl.COST(
        adam(model, made.weighting, 1e-3), model, weighting=made.weighting, heads=made.heads, teleporter=None
    )
    before = [p.clone() for p in model.parameters()]
    for step in range(2):
        losses = optimizer.step(model.losses, torch.randn(8, 3, generator=torch.Generator().manual_seed(step)))
        assert torch.isfinite(losses).all()
    assert all((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


# ------------------------------------------------------------------------------------------------ checkpoints, logs


def test_all_random_streams_come_back(tmp_path: Path) -> None:
    seed_everything(3)
    random.gauss(0, 1)
    np.random.normal()
    save_checkpoint(tmp_path / "c.pt", {"model": {}, "rng": rng_state()})

    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.normal()), torch.rand(()).item()]

    expected = draw()
    seed_everything(4)
    restore_rng(load_checkpoint(tmp_path / "c.pt", "cpu")["rng"])
    assert draw() == expected


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"model": {"a": torch.ones(1)}})

    def fail(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(path, {"model": {}})
    assert load_checkpoint(path, "cpu")["model"]["a"].item() == 1


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    save_checkpoint(path, {"model": {}})
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"c\.pt: damaged"):
        load_checkpoint(path, "cpu")


def epoch_row(epoch: int, value: float = 1.0) -> EpochRow:
    return EpochRow(epoch, 1e-3, {"depth": value}, {"val": {"abs_err": value}}, 0.5, [], {"train": 1.0})


def test_the_log_survives_nan_and_a_resume_writes_no_epoch_twice(tmp_path: Path) -> None:
    rows = [epoch_row(1), epoch_row(2, math.nan), epoch_row(3)]
    recorder = Recorder(tmp_path)
    for row in rows:
        recorder.add(row)
    recorder.close()
    assert [row.epoch for row in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]
    assert math.isnan(read_log(tmp_path / "log.jsonl")[1].metrics["val"]["abs_err"])
    Recorder(tmp_path, rows[:2]).add(rows[2])  # the checkpoint was one epoch behind the log
    assert [row.epoch for row in read_log(tmp_path / "log.jsonl")] == [1, 2, 3]
    assert row_from_json(json.loads(json.dumps(row_to_json(rows[0])))) == rows[0]


def test_tensorboard_gets_the_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorder = Recorder(tmp_path, tensorboard=True)
    recorder.add(epoch_row(1, 2.5))
    recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("val/abs_err")[0].value == 2.5
    assert events.Scalars("train/depth")[0].step == 1


def test_the_result_is_the_mean_of_the_last_ten_evaluated_epochs() -> None:
    history = [epoch_row(i, float(i)) for i in range(1, 26)]
    history[20].metrics = {}  # an epoch that was not evaluated
    expected = np.mean([i for i in range(15, 26) if i != 21])
    assert mean_of_last(history, "val") == {"abs_err": pytest.approx(expected)}
    assert mean_of_last(history[:2], "val") == {"abs_err": 1.5}


# ------------------------------------------------------------------------------------------------ tables, plots

METRICS = (Metric("acc", "Acc ↑", True, 1, "a"), Metric("err", "Err ↓", False, 2, "b"))


def example_results() -> list[Result]:
    return [
        Result("STL", {0: {"acc": 50.0, "err": 1.0}, 1: {"acc": 50.0, "err": 3.0}}, "stl"),
        Result("A", {0: {"acc": 55.0, "err": 2.0}, 1: {"acc": 45.0, "err": 2.4}}),
        Result("B", {0: {"acc": 60.0, "err": 2.2}, 1: {"acc": 60.0, "err": 2.2}}, teleports=(3, 4)),
    ]


def test_table_has_mean_error_rank_and_delta_m() -> None:
    table = build_table(METRICS, example_results())
    stl, a, b = table.own
    assert (a.cells[0].mean, a.cells[0].error) == pytest.approx((50.0, 10 / 2**0.5 / 2**0.5))
    # against the mean single-task row (50, 2): A: seed 0 (-10 + 0)/2, seed 1 (10 + 20)/2
    assert a.delta.mean == pytest.approx((-5 + 15) / 2)
    assert a.delta.error == pytest.approx(np.std([-5, 15], ddof=1) / 2**0.5)
    assert (b.delta.mean, b.delta.error) == pytest.approx(((-20 + 10) / 2, 0))
    assert math.isnan(stl.delta.mean)
    assert (a.rank, b.rank) == (1.5, 1.0)  # A: second in acc, tied first in err
    assert "3 of 4 teleports" in table.markdown()


def test_markdown_and_csv_say_the_same(tmp_path: Path) -> None:
    table = build_table(METRICS, example_results(), caption=("a caption",))
    text = table.markdown()
    assert text.startswith("a caption\nΔm relative to the single-task networks of this run.")
    line = next(line for line in text.splitlines() if line.startswith("| A "))
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["50.0 ± 5.0", "2.20 ± 0.20"]
    rows = list(csv.DictReader(table.csv().splitlines()))
    assert float(rows[1]["err"]) == pytest.approx(2.2)
    assert float(rows[1]["err_se"]) == pytest.approx(0.2)
    assert rows[0]["delta_m_pct"] == ""


def test_published_rows_stand_beside_and_are_flagged_where_they_cannot_be_compared() -> None:
    values = dict(zip((m.name for m in NYUV2.metrics), load_published("nyuv2").baseline.values, strict=True))
    results = [Result("LS", {0: values})]
    real = build_table(NYUV2.metrics, results, published=load_published("nyuv2"))
    assert real.own[0].delta.mean == pytest.approx(0)  # against the published single-task row
    assert len(real.published) == len(load_published("nyuv2").rows)
    assert "| FairGrad+COST " in real.markdown()
    synthetic = build_table(NYUV2.metrics, results, published=load_published("nyuv2"), comparable=False)
    assert math.isnan(synthetic.own[0].delta.mean)  # no single-task row of its own, and no stand-in
    assert "cannot be compared" in synthetic.markdown()


def test_a_missing_value_is_a_dash() -> None:
    table = build_table(METRICS, [Result("A", {0: {"acc": math.nan, "err": 1.0}})])
    assert "–" in next(line for line in table.markdown().splitlines() if line.startswith("| A "))


def test_curves_are_drawn(tmp_path: Path) -> None:
    history = [epoch_row(i, 1 / i) for i in range(1, 5)]
    path = plot_metrics(tmp_path / "m.png", {"A": [history, history]}, CITYSCAPES.metrics, "val",
                        lines={"STL": {"abs_err": 0.3}}, title="t")  # fmt: skip
    assert path.read_bytes()[:4] == b"\x89PNG"

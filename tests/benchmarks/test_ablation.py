"""benchmarks/ablation.py: controls that are what they claim to be, pairing, resuming, and the arithmetic of tables."""

from __future__ import annotations

import copy
import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not an installed package

import ablation
import ablation_arms
import ablation_branch
import ablation_report
import ablation_run
from ablation_arms import NoMove, Placebo, cost_move, random_move
from ablation_problems import Study, load, steps_per_epoch
from ablation_report import Results, cell, epochs_until, paired
from ablation_run import Settings, build, train

import cost_mtl

SMALL = Settings("multimnist", "fairgrad", "adam", "plain", 0, 3e-3, 3, smoke=True)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return load("multimnist", smoke=True, data_dir=tmp_path_factory.mktemp("data"))


def with_arm(arm: str, **changes: Any) -> Settings:
    return Settings(**{**vars(SMALL), "arm": arm, **changes})


# ------------------------------------------------------------------------------------------------ controls


class Spy:
    """Looks at the problem of each attempt with ``look`` and proposes nothing."""

    def __init__(self, look: Any) -> None:
        self.look, self.seen = look, []

    def propose(self, problem: Any) -> cost_mtl.Move:
        self.seen.append(self.look(problem))
        return cost_mtl.Move(torch.zeros_like(problem.gradients[0]), "none")


def moments(
    study: Study, teleporters: list[Any], count: int = 4
) -> list[list[tuple[cost_mtl.TeleportReport, torch.Tensor]]]:
    """At ``count`` points of one run, what each teleporter does from there: its report and the change of the trunk."""
    problem, found = study.problem, []
    model = problem.model(0)
    opt = build(with_arm("cost", epochs=1000), model, problem.steps_per_epoch)
    stream = problem.batches(0)
    for _ in range(count):
        for _ in range(6):
            opt.step(problem.losses, model, *next(stream))
        batch, outcomes = next(stream), []
        for teleporter in teleporters:
            # The memory of batches goes with the copy; the teleporter is exchanged in the controller of the copy.
            twin, optimizer = copy.deepcopy((model, opt))
            object.__setattr__(optimizer._controller, "teleporter", teleporter)
            before = torch.cat([p.detach().flatten() for p in twin.trunk.parameters()])
            report = optimizer.teleport(problem.losses, twin, *batch)
            outcomes.append((report, torch.cat([p.detach().flatten() for p in twin.trunk.parameters()]) - before))
        found.append(outcomes)
    return found


def test_controls_judge_costs_move_as_the_transaction_does(study: Study) -> None:
    strict = cost_mtl.LoRATeleporter(acceptance=cost_mtl.Acceptance(min_angle=1.5, min_norm=10.0))
    for teleporter in (cost_mtl.LoRATeleporter(), strict):
        spy = Spy(lambda problem, t=teleporter: cost_move(problem, t))
        verdicts = []
        for (report, change), (_, still) in moments(study, [teleporter, spy], count=3):
            assert not still.any()
            found = spy.seen[len(verdicts)]
            verdicts.append(found is not None)
            assert verdicts[-1] == report.accepted
            if found is not None:
                torch.testing.assert_close(found[0].delta, change, rtol=0, atol=1e-6)
                after = cost_mtl.gramian(found[1], dtype=torch.float64)
                torch.testing.assert_close(after.diagonal().sqrt(), report.norms_after, rtol=1e-4, atol=0)
        assert any(verdicts) == (teleporter is not strict)


def test_placebo_is_as_long_as_costs_move_keeps_the_losses_and_points_elsewhere(study: Study) -> None:
    compared = 0
    for (cost, move), (placebo, random) in moments(study, [cost_mtl.LoRATeleporter(), Placebo()]):
        assert placebo.objective == "none"
        if not cost.accepted:
            assert not placebo.accepted
        if placebo.accepted:
            compared += 1
            assert placebo.length == pytest.approx(cost.length, rel=0.1)
            assert placebo.drift <= 0.01
            assert float(torch.cosine_similarity(move, random, dim=0).abs()) < 0.2
    assert compared >= 2


def test_random_moves_are_at_right_angles_to_every_task_gradient_they_are_fitted_on(study: Study) -> None:
    def look(problem: Any) -> None:
        plain = cost_mtl.LoRATeleporter(solver=cost_mtl.LevelSet(corrections=0, heldout_corrections=0))
        first, second = (random_move(problem, length, plain) for length in (0.3, 0.1))
        assert first.used == (0, 1)[: len(first.used)]
        assert [float(m.delta.norm()) for m in (first, second)] == pytest.approx([0.3, 0.1], rel=1e-4)
        assert float(torch.cosine_similarity(first.delta, second.delta, dim=0).abs()) < 0.2  # two draws
        for move in (first, second):
            for batch in move.used:
                G = problem.evaluate_gradients(batch)[1]
                assert float(torch.cosine_similarity(G, move.delta[None]).abs().max()) < 1e-4

    spy = Spy(look)
    moments(study, [spy], count=2)
    assert len(spy.seen) == 2


def test_no_move_without_its_sigma_is_the_plain_run_bit_for_bit(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoSigma(NoMove):
        def propose(self, problem: Any) -> cost_mtl.Move:
            move = super().propose(problem)
            sigmas.append(self.sigma)
            self.sigma = None
            return move

    sigmas: list[float | None] = []
    still = ablation_arms.Arm("", NoSigma)
    monkeypatch.setitem(ablation_run.ARMS, "no-move", still)
    plain, control = train(SMALL, study), train(with_arm("no-move"), study)
    assert control["tried"] > 0
    assert control["accepted"] == 0
    assert any(s is not None for s in sigmas)
    assert (control["train_loss"], control["test"]) == (plain["train_loss"], plain["test"])


def test_no_move_hands_its_sigma_to_htr(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    original = cost_mtl.history.reuse_trajectory_
    monkeypatch.setattr(
        cost_mtl.history, "reuse_trajectory_", lambda *a, **k: (given.append(a[2]), original(*a, **k))[1]
    )
    assert train(with_arm("no-move"), study)["tried"] >= len(given) > 0
    assert all(0.0 <= sigma <= 1.0 for sigma in given)


# ------------------------------------------------------------------------------------------------ pairing, resuming


def test_arms_share_weights_and_batches_until_the_first_attempt(study: Study) -> None:
    """Attempts start in the second of the epochs here."""
    runs = {arm: train(with_arm(arm, epochs=4), study) for arm in ablation_arms.MAIN}
    first = {run["train_loss"][0] for run in runs.values()}
    assert len(first) == 1
    assert runs["cost"]["accepted"] > 0
    assert runs["cost"]["train_loss"][-1] != runs["plain"]["train_loss"][-1]
    assert train(with_arm("plain", seed=1, epochs=4), study)["train_loss"][0] not in first


def test_a_second_command_does_only_what_is_missing(
    tmp_path: Path, study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "load", lambda name, **kwargs: study)
    path = tmp_path / "records.jsonl"
    ablation.execute([SMALL], path, tmp_path)
    first = path.read_bytes()
    path.write_bytes(first + b'{"settings": {"prob')  # killed while writing
    assert len(ablation.read(path)) == 1
    ablation.execute([SMALL, with_arm("plain", seed=1)], path, tmp_path)
    assert path.read_bytes().startswith(first)
    assert [r["settings"]["seed"] for r in ablation.read(path)] == [0, 1]
    packed = tmp_path / "records.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert ablation.read(packed) == ablation.read(path)
    ablation.execute([SMALL], packed, tmp_path)
    with pytest.raises(ValueError, match="decompress"):
        ablation.execute([with_arm("plain", seed=2)], packed, tmp_path)
    path.write_text("{broken\n" + first.decode())
    with pytest.raises(ValueError, match="line 1"):
        ablation.read(path)


def test_any_other_setting_is_another_run() -> None:
    other = {"problem": "qm9", "weighting": "cagrad", "optimizer": "sgd", "arm": "cost", "seed": 1, "lr": 1e-4,
             "epochs": 9, "smoke": False, "start": 0.5}  # fmt: skip
    assert other.keys() == vars(SMALL).keys()
    keys = {SMALL.key, *(Settings(**{**vars(SMALL), name: value}).key for name, value in other.items())}
    assert len(keys) == 1 + len(other)


def test_a_stop_leaves_whole_seeds() -> None:
    settings = [("qm9", "fairgrad", "adam"), ("multimnist", "cagrad", "sgd")]
    order = list(ablation.plan([(s, ("plain", "cost")) for s in settings], range(3), smoke=True))
    seeds = [s.seed for s in order if s.weighting != "single"]
    assert seeds == sorted(seeds)
    assert seeds.count(0) == 4
    assert {(s.problem, s.optimizer) for s in order if s.weighting == "single"} == {(p, o) for p, _, o in settings}


def test_training_that_breaks_down_is_recorded_as_such(study: Study) -> None:
    run = train(with_arm("plain", optimizer="sgd", lr=1e6), study)
    assert run["test"] is None
    assert json.loads(json.dumps(run)) == run


# ------------------------------------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("name", ["qm9", "multimnist"])
def test_steps_per_epoch_are_those_of_the_data(name: str, tmp_path: Path) -> None:
    problem = load(name, smoke=True, data_dir=tmp_path).problem
    assert steps_per_epoch(name, smoke=True) == problem.steps_per_epoch


def test_time_to_a_loss_is_exact_on_an_exponential() -> None:
    """L(t) = exp(-t), sampled at the middle of each epoch, is at exp(-2.2) after 2.2 epochs."""
    curve = [math.exp(-(e + 0.5)) for e in range(6)]
    assert epochs_until(curve, math.exp(-2.2)) == pytest.approx(2.2)
    assert epochs_until(curve, math.exp(-2.5)) == pytest.approx(2.5)
    assert epochs_until(curve, 1.0) == 0.5
    assert epochs_until(curve, 1e-9) is None


def record(
    arm: str, seed: int, test: list[float] | None, curve: list[float], weighting: str = "cagrad"
) -> dict[str, Any]:
    settings = Settings("qm9", weighting, "adam", arm, seed, 1e-3, len(curve))
    teleports = dict.fromkeys(("length", "drift", "heldout", "sigma", "cosine_gain"), None)
    counts = {"tried": 2, "accepted": 1, "time_share": 0.1, "seconds": 1.0}
    return {"settings": vars(settings), "test": test, "train_loss": curve, **teleports, **counts, "code": "x"}


def synthetic(weighting: str = "cagrad") -> list[dict[str, Any]]:
    """Four seeds; COST is better than plain by exactly 1, 2, 3 and 4 points of Delta_m."""
    records = [record("plain", s, [1.0, 2.0], [1.0], "single") for s in (100, 101)]
    for seed in range(4):
        curve = [math.exp(-(e + 0.5)) for e in range(4)]
        for arm in ablation_arms.MAIN:
            shift = 0.01 * (seed + 1) * (arm == "cost")
            test = [1.1 + seed / 10 - shift, 2 * (1.1 + seed / 10 - shift)]
            faster = [v ** (2.0 if arm == "cost" else 1.0) for v in curve]
            records.append(record(arm, seed, test, faster, weighting))
    return records


def test_differences_are_paired() -> None:
    """The seeds differ by ten points each, the pairs by one: unpaired, nothing would show."""
    results = Results.of(synthetic())
    setting = ("qm9", "cagrad", "adam")
    differences = paired(results.delta_m(setting, "plain"), results.delta_m(setting, "cost"))
    assert differences == pytest.approx([-1, -2, -3, -4])
    error = np.std(differences, ddof=1) / 2
    assert cell(differences) == f"-2.50 ± {error:.2f} *"
    assert paired({0: 1.0, 2: 5.0}, {1: 1.0, 2: 7.0}) == [2.0]
    text = ablation_report.report(synthetic())
    assert cell(differences) in text
    counts = {row.split("|")[1].strip(): row.split("|")[2:6] for row in text.splitlines() if " − " in row}
    assert [int(n) for n in counts["cost − plain"]] == [1, 0, 1, 0]
    assert [int(n) for n in counts["placebo − plain"]] == [0, 0, 0, 0]


def test_time_to_the_fixed_loss_is_set_by_the_plain_runs() -> None:
    """Plain reaches the loss of its third epoch of four after 2.5 epochs; twice the rate takes half of that."""
    results = Results.of(synthetic())
    setting = ("qm9", "cagrad", "adam")
    assert results.threshold(setting) == pytest.approx(math.exp(-2.5))
    assert list(results.steps_to(setting, "plain").values()) == pytest.approx([2.5 * 45] * 4)
    assert list(results.steps_to(setting, "cost").values()) == pytest.approx([1.25 * 45] * 4)
    results.runs[setting]["cost"][0]["train_loss"] = [9.0] * 4
    assert results.steps_to(setting, "cost")[0] == 4 * 45
    assert [results.never(setting, arm) for arm in ("plain", "cost")] == [0, 1]


def test_pooled_differences_count_seeds_not_runs() -> None:
    results = Results.of([*synthetic(), *synthetic("fairgrad")[2:]])
    pooled = ablation_report.pool(results, "delta_m", "plain", "cost")
    assert pooled == pytest.approx([-1, -2, -3, -4])
    del results.runs["qm9", "fairgrad", "adam"]["cost"][2]
    assert ablation_report.pool(results, "delta_m", "plain", "cost") == pytest.approx([-1, -2, -4])


def test_runs_of_two_sizes_are_not_mixed() -> None:
    other = record("plain", 0, [1.0, 2.0], [1.0, 0.5])
    with pytest.raises(ValueError, match="differ in their size"):
        Results.of([*synthetic(), other])


def test_the_rate_with_the_lowest_validation_error_is_taken() -> None:
    records = []
    for lr, validation in ((0.1, None), (0.01, [1.0, 4.0]), (0.001, [1.5, 1.5])):
        settings = Settings(**{**vars(SMALL), "lr": lr})
        records.append({"settings": vars(settings), "validation": validation})
    best, tried = ablation.choose_rates(records)["multimnist", "fairgrad", "adam"]
    assert best == 0.001
    assert tried == {0.1: math.inf, 0.01: pytest.approx(2.0), 0.001: pytest.approx(1.5)}


def test_smoke_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablation, "BASELINE_SEEDS", (2000,))
    common = ["--smoke", "--out", str(tmp_path / "r.jsonl"), "--data-dir", str(tmp_path)]
    chosen = ["--problems", "multimnist", "--weightings", "nashmtl", "--optimizers", "sgd", "--seeds", "2"]
    ablation.main(["run", *common, *chosen])
    ablation.main(["report", *common, "--plot", str(tmp_path / "p.png")])
    assert "MultiMNIST, Nash-MTL, SGD" in capsys.readouterr().out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------ branches


def test_losses_of_the_training_set_are_those_of_its_chunks_and_leave_the_model_alone(study: Study) -> None:
    """Two chunks of 40 of 96 pairs; the remaining 16 are left out."""
    model = study.problem.model(0)
    before = copy.deepcopy(model.state_dict())
    losses = ablation_branch.whole_losses(study.problem, model, chunk=40)
    expected = 0.0
    for rows in (slice(0, 40), slice(40, 80)):
        parts = study.problem.losses(copy.deepcopy(model), *(t[rows] for t in study.problem.train))
        expected = expected + torch.stack(list(parts.values())).detach().double() / 2
    torch.testing.assert_close(losses, expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_points_lie_on_the_plain_run_and_branching_there_does_not_change_it(study: Study) -> None:
    settings = with_arm("cost", epochs=6, seed=2)
    ends, counts = [], []
    for tried in (False, True):
        counts.append(0)
        for point in ablation_branch.points(settings, study, every=2, ahead=2):
            counts[-1] += 1
            if tried:
                ablation_branch.branch(point, study.problem, "cost", (0, 1))
            model = point[0]
        ends.append([p.detach().clone() for p in model.parameters()])
    assert counts[0] == counts[1] > 0
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_branch_without_a_teleport_is_the_run_itself(study: Study) -> None:
    problem = study.problem
    for model, optimizer, batches in ablation_branch.points(with_arm("cost", epochs=6, seed=2), study, 2, ahead=2):
        gain, found = ablation_branch.branch((model, optimizer, batches), problem, "plain", (0, 1, 3))
        twin, own = copy.deepcopy((model, optimizer))
        expected = [ablation_branch.whole_losses(problem, twin)]
        for step, batch in enumerate(batches):
            own.step(problem.losses, twin, *batch)
            if step in (0, 2):
                expected.append(ablation_branch.whole_losses(problem, twin))
        assert gain == 0.0
        torch.testing.assert_close(found[:, 0].exp(), torch.stack(expected))
        break
    else:
        pytest.fail("no moment of conflict")


def test_branch_table_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ablation_branch.main(
        ["--smoke", "--problems", "multimnist", "--arms", "cost", "no-move", "--seeds", "2", "3", "--every", "1",
         "--data-dir", str(tmp_path)]
    )  # fmt: skip
    rows = {row.split("|")[1].strip(): row for row in capsys.readouterr().out.splitlines() if row.startswith("|")}
    assert {"cost", "no-move"} < rows.keys()
    assert rows["no-move"].split("|")[4].strip().startswith("+0.00 ±")  # right after: nothing moved


def test_a_run_whose_training_loss_ends_above_its_first_epoch_is_left_out_and_counted() -> None:
    records = synthetic()
    diverged = next(r for r in records if r["settings"]["arm"] == "cost" and r["settings"]["seed"] == 1)
    setting = tuple(diverged["settings"][k] for k in ("problem", "weighting", "optimizer"))
    diverged["train_loss"] = [1.0, 0.5, 1.1]
    assert 1 not in Results.of(records).delta_m(setting, "cost")
    assert "1 broke down" in ablation_report.report(records)
    diverged["train_loss"] = [1.0, 0.5, 0.9]
    assert 1 in Results.of(records).delta_m(setting, "cost")
    assert "0 broke down (none)" in ablation_report.report(records)

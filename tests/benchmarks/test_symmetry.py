"""benchmarks/symmetry*.py: moves that change no output, gradients by the formula, placebos of the same size."""

from __future__ import annotations

import copy
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not an installed package

import ablation
import symmetry_moves as moves
import symmetry_report
from ablation_problems import MultiMNIST
from default_scale_problems import Labels, load
from problems import QM9
from symmetry import GRID, SEEDS, TUNING_SEEDS, chosen_rates
from symmetry_run import ARMS, Settings, train

import cost_mtl


def made(name: str, seed: int = 0) -> tuple[Any, nn.Module, tuple[Tensor, ...]]:
    """Problem, network and a batch of random numbers."""
    g = torch.Generator().manual_seed(seed)
    if name == "multimnist":
        digits = [torch.randint(10, (24,), generator=g) for _ in range(2)]
        batch = (torch.rand(24, 1, 18, 18, generator=g), *digits, torch.rand(24, 49, generator=g))
    elif name == "qm9":
        batch = (torch.randn(24, 140, generator=g), torch.randn(24, 11, generator=g))
    else:
        batch = (torch.randn(24, 103, generator=g), (torch.rand(24, 14, generator=g) > 0.5).float())
    kind = {"multimnist": MultiMNIST, "qm9": QM9, "yeast": Labels}[name]
    problem = kind(name, batch, batch, 24, 1e-3)
    return problem, problem.model(seed), batch


def shared(model: nn.Module) -> dict[str, Tensor]:
    return {f"trunk.{name}": p for name, p in model.trunk.named_parameters()}


def some_log_s(name: str, seed: int = 0, size: float = 0.7) -> Tensor:
    n = sum(layer.units for layer in moves.layers_of(name))
    return size * torch.randn(n, generator=torch.Generator().manual_seed(seed))


NAMES = ("multimnist", "qm9", "yeast")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_no_loss_changes(name: str, dtype: torch.dtype, tolerance: float) -> None:
    problem, model, batch = made(name)
    model, batch = model.to(dtype), tuple(t.to(dtype) if t.is_floating_point() else t for t in batch)
    before = problem.losses(model, *batch)
    moves.move_(model, torch.optim.SGD(model.parameters(), lr=0.1), moves.layers_of(name), some_log_s(name).to(dtype))
    after = problem.losses(model, *batch)
    for task in before:
        assert abs(after[task].item() / before[task].item() - 1) < tolerance, task


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_divided_by_the_factors(name: str) -> None:
    problem, model, batch = made(name)
    model, batch = model.double(), tuple(t.double() if t.is_floating_point() else t for t in batch)
    layers, log_s = moves.layers_of(name), some_log_s(name).double()
    G = cost_mtl.task_gradients(problem.losses(model, *batch), shared(model).values())
    predicted = G * (-moves.flat_log_factors(layers, log_s, shared(model))).exp()
    moves.move_(model, torch.optim.SGD(model.parameters(), lr=0.1), layers, log_s)
    found = cost_mtl.task_gradients(problem.losses(model, *batch), shared(model).values())
    M, expected = cost_mtl.gramian(found), cost_mtl.gramian(predicted)
    torch.testing.assert_close(M, expected, rtol=1e-6, atol=1e-9 * float(expected.diagonal().max()))
    assert float((found - G).norm() / G.norm()) > 0.1


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_move_is_a_choice_of_learning_rates(kind: str) -> None:
    """Moved once and trained on equals not moved, with rates lr / f² (SGD) or lr / f (Adam) for every entry."""
    problem, model, batch = made("qm9")
    model, batch = model.double(), tuple(t.double() for t in batch)
    layers, log_s = moves.layers_of("qm9"), some_log_s("qm9", size=0.3).double()
    twin = copy.deepcopy(model)

    def base(of: nn.Module) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(of.parameters(), lr=0.02, momentum=0.9)
        return torch.optim.Adam(of.parameters(), lr=1e-3, eps=1e-14)  # eps is no part of the symmetry

    first, second = base(model), base(twin)
    f = {
        n: v.exp()
        for n, v in moves.log_factors(layers, log_s, {n: p.shape for n, p in twin.named_parameters()}).items()
    }
    for step in range(8):
        if step == 3:
            moves.move_(model, first, layers, log_s)
        for network, optimizer in ((model, first), (twin, second)):
            optimizer.zero_grad()
            torch.stack(list(problem.losses(network, *batch).values())).sum().backward()
            before = {n: p.detach().clone() for n, p in network.named_parameters()}
            optimizer.step()
            if network is twin and step >= 3:
                with torch.no_grad():
                    for n, p in network.named_parameters():
                        if n in f:
                            p.copy_(before[n] + (p - before[n]) / f[n] ** (2 if kind == "sgd" else 1))
    a, b = (torch.stack(list(problem.losses(network, *batch).values())) for network in (model, twin))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=0)


def test_the_balance_makes_both_sides_as_long_and_the_sum_of_squares_least() -> None:
    _, model, _ = made("multimnist")
    layers, params = moves.layers_of("multimnist"), dict(model.named_parameters())
    log_s = moves.for_balance(layers, params, sweeps=60)

    def squares(at: Tensor) -> Tensor:
        log_f = moves.log_factors(layers, at, {n: p.shape for n, p in params.items()})
        return sum((params[n].detach() * v.exp()).square().sum() for n, v in log_f.items())

    at = log_s.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(squares(at), at)
    assert float(slope.norm()) < 1e-3 * float(squares(log_s))
    assert float(squares(log_s)) < float(squares(torch.zeros_like(log_s)))


@pytest.mark.parametrize("name", NAMES)
def test_the_placebo_has_the_size_and_the_norm_of_the_move(name: str) -> None:
    problem, model, batch = made(name)
    layers, params = moves.layers_of(name), shared(model)
    G = cost_mtl.task_gradients(problem.losses(model, *batch), params.values())[None]
    spread = lambda log_s: moves.flat_log_factors(layers, log_s, params)  # noqa: E731
    g = torch.Generator().manual_seed(1)
    n = sum(layer.units for layer in layers)
    chosen = moves.for_cosine(G, spread, n, g)
    before, after = (float(moves.smallest_cosine(G, spread(s))) for s in (torch.zeros(n), chosen))
    assert after > before + 0.02
    assert float(chosen.abs().max()) <= 0.6932
    placebo = moves.random_like(chosen, G.mean(dim=(0, 1)), spread, g)
    assert float(placebo.norm()) == pytest.approx(float(chosen.norm()), rel=1e-5)
    ratios = [float(moves.log_norm_ratio(G.mean(dim=(0, 1)), spread(s))) for s in (chosen, placebo)]
    assert ratios[1] == pytest.approx(ratios[0], abs=1e-4)
    assert abs(float(placebo @ chosen) / float(chosen.norm() ** 2)) < 0.9


# ------------------------------------------------------------------------------------------------ runs


def test_an_arm_that_moves_nothing_is_plain_and_every_arm_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = load("yeast", smoke=True, data_dir=tmp_path)
    plain = train(Settings("yeast", "fairgrad", "sgd", "plain", 0, 0.03, smoke=True), study)
    records = {arm: train(Settings("yeast", "fairgrad", "sgd", arm, 0, 0.03, smoke=True), study) for arm in ARMS}
    assert records["plain"] == plain
    quarter = len(plain["curve"]) // 4
    for arm, record in records.items():
        assert record["curve"][:quarter] == plain["curve"][:quarter], arm
        assert len(record["test"]) == 14
    assert [len(records[arm]["moves"]) for arm in ("plain", "cosine", "balance", "rates")] == [0, 1, 1, 3]
    monkeypatch.setattr(moves, "for_balance", lambda layers, params: torch.zeros(sum(x.units for x in layers)))
    resting = train(Settings("yeast", "fairgrad", "sgd", "balance", 0, 0.03, smoke=True), study)
    assert (resting["test"], resting["curve"]) == (plain["test"], plain["curve"])


def test_rates_are_chosen_for_each_arm_by_validation_data_alone() -> None:
    setting = ("yeast", "sum", "adam")

    def record(arm: str, lr: float, seed: int, value: float | None) -> dict[str, Any]:
        validation = None if value is None else [value, value]
        return {
            "settings": vars(Settings(*setting, arm, seed, lr)),
            "validation": validation,
            "test": [1 / (value or 1)],
        }

    records = [
        record(arm, lr, seed, 1.0) for arm in ("plain", "cosine") for lr in GRID["adam"] for seed in TUNING_SEEDS
    ]
    records[2]["validation"] = records[3]["validation"] = [0.5, 0.5]  # plain, the second rate
    records[-1]["validation"] = None  # cosine, the last rate: one of two runs broke down
    records[-3]["validation"] = [0.9, 0.9]
    assert chosen_rates(records) == {(setting, "plain"): GRID["adam"][1], (setting, "cosine"): GRID["adam"][-2]}
    assert chosen_rates(records[:-1]) == {(setting, "plain"): GRID["adam"][1]}  # not yet complete


# ------------------------------------------------------------------------------------------------ the report


def test_holm_and_the_t_test_by_hand() -> None:
    # Holm: sorted 0.01, 0.02, 0.03, 0.5 times 4, 3, 2, 1, then made monotone.
    assert symmetry_report.holm([0.02, 0.5, 0.01, 0.03]) == pytest.approx([0.06, 0.5, 0.04, 0.06])
    differences = [0.3, -0.1, 0.5, 0.2, 0.6]
    mean, error, p = symmetry_report.paired_t(differences)
    reference = scipy.stats.ttest_1samp(differences, 0.0)
    assert (mean, mean / error, p) == pytest.approx((0.3, reference.statistic, reference.pvalue))
    assert symmetry_report.paired_t([0.0] * 4) == (0.0, 0.0, 1.0)


def test_steps_until_a_loss_and_relative_change() -> None:
    falling = [float(100 - k) for k in range(100)]
    # The mean of steps k - 20 to k - 1 is 100 - k + 10.5: at most 60 from step 51 on (59.5).
    assert symmetry_report.steps_until(falling, 60.0, 100) == 51
    assert symmetry_report.steps_until(falling, -1.0, 100) == 100
    assert symmetry_report.relative_change([1.1, 4.0], [1.0, 5.0]) == pytest.approx(-5.0)


def planted(tmp_path: Path, gain: float, seed: int = 0) -> str:
    """The report on records in which "balance" is better by ``gain`` than all other arms, beside noise of 1 %."""
    rng, setting = random.Random(seed), ("yeast", "sum", "adam")
    for kind, seeds in (("tune", TUNING_SEEDS), ("run", SEEDS)):
        path = tmp_path / f"yeast-sum-adam-{kind}.jsonl"
        path.unlink(missing_ok=True)
        for arm, lr, s in product(ARMS, GRID["adam"] if kind == "tune" else GRID["adam"][:1], seeds):
            value = (1 - (gain if arm == "balance" else 0.0)) * (1 + 0.01 * rng.gauss(0, 1))
            curve = [value * (1.1 - 0.001 * k) for k in range(100)]
            result = {"validation": [lr], "test": [value], "curve": curve, "moves": [], "accepted": None}
            ablation.append(path, {"settings": vars(Settings(*setting, arm, s, lr)), **result})
    return symmetry_report.report(tmp_path, [setting])


def test_a_planted_gain_is_a_yes_and_none_is_a_no(tmp_path: Path) -> None:
    assert planted(tmp_path, 0.05).endswith("Yes: yeast sum adam steps balance, yeast sum adam Δm balance.")
    assert sum(not planted(tmp_path, 0.0, seed).endswith("Yes: nowhere.") for seed in range(20)) <= 1
    assert "1 of 1 settings are complete" in planted(tmp_path, 0.0)

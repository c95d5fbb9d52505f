"""benchmarks/default_scale.py: the rules are what they claim to be, runs are recorded once, tables are right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not an installed package

import default_scale
import default_scale_report as reporting
from ablation import read
from default_scale import RATES, RECORDS, WEIGHTINGS, Settings, main, plan, train
from default_scale_problems import PREVALENCES, average_precision, load
from default_scale_rules import RULES, length, scaled

import cost_mtl

FAIRGRAD = cost_mtl.FairGrad(2.0)
DOCS = Path(__file__).parents[2] / "docs" / "default_scale.md"


@pytest.fixture(scope="module")
def gradients() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    norms = torch.tensor([1e-2, 1.0, 30.0, 1.0], dtype=torch.float64)
    return [norms[:, None] * torch.randn(4, 9, generator=g, dtype=torch.float64) for _ in range(20)]


def direction(rule: str, G: Tensor, weighting: Any = FAIRGRAD) -> Tensor:
    M = G @ G.T
    return RULES[rule](M, weighting(M)) @ G


# ------------------------------------------------------------------------------------------------ rules


def test_lengths_of_the_real_vectors(gradients):
    for G in gradients:
        total = G.sum(dim=0)
        d = direction("raw", G)
        torch.testing.assert_close(direction("match", G).norm(), total.norm())
        torch.testing.assert_close(direction("trace", G).norm(), G.norm())
        torch.testing.assert_close(direction("project", G), (total @ d) / (d @ d) * d)
        assert direction("clip1", G).norm() <= 1 + 1e-9
        for rule in ("clip", "total_clip", "project", "root"):
            assert direction(rule, G).norm() <= total.norm() * (1 + 1e-9), rule


def test_sums_of_weights(gradients):
    M = gradients[0] @ gradients[0].T
    w = torch.tensor([0.1, 2.0, 3.0, 0.4], dtype=torch.float64)
    assert RULES["mean"](M, w).sum() == pytest.approx(1)
    assert RULES["total"](M, w).sum() == pytest.approx(4)
    assert RULES["largest"](M, w).max() == pytest.approx(1)


@pytest.mark.parametrize("rule", sorted(set(RULES) - {"raw", "clip1", "clip", "mean", "trace"}))
def test_the_sum_stays_the_sum(rule, gradients):
    M = gradients[0] @ gradients[0].T
    torch.testing.assert_close(RULES[rule](M, 7 * torch.ones(4, dtype=M.dtype)), torch.ones(4, dtype=M.dtype))


@pytest.mark.parametrize("rule", sorted(RULES))
def test_no_rule_turns_the_direction(rule, gradients):
    for G in gradients:
        cosine = torch.cosine_similarity(direction(rule, G), direction("raw", G), dim=0)
        assert cosine == pytest.approx(1)


def test_project_falls_at_the_largest_rate_that_the_sum_bears():
    """On quadratics 0.5 (x - c_i)' H_i (x - c_i) with a rate of 1.9 over the largest curvature of their sum, in every
    step. ``match`` rises there, so the test can fail."""
    rises = dict.fromkeys(("project", "match"), 0)
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        roots = torch.randn(3, 6, 6, generator=g, dtype=torch.float64)
        H, c = roots @ roots.mT, torch.randn(3, 6, generator=g, dtype=torch.float64)
        lr = 1.9 / torch.linalg.eigvalsh(H.sum(dim=0)).max()

        def loss(x: Tensor, H: Tensor = H, c: Tensor = c) -> Tensor:
            return 0.5 * torch.einsum("ki,kij,kj->", x - c, H, x - c)

        for rule in rises:
            x = 5 * torch.ones(6, dtype=torch.float64)
            for _ in range(20):
                after = x - lr * direction(rule, torch.einsum("kij,kj->ki", H, x - c))
                rises[rule] += bool(loss(after) > loss(x) * (1 + 1e-9))
                x = after
    assert rises["project"] == 0
    assert rises["match"] > 0


@pytest.mark.parametrize("weighting", [cost_mtl.FairGrad(2.0), cost_mtl.NashMTL(), cost_mtl.MGDA()])
def test_project_comes_to_rest_on_the_pareto_front(weighting):
    """Two quadratics that conflict, at a rate that the sum bears: the least norm of a convex combination of the task
    gradients goes to 0. With ``match`` it does not."""
    H = torch.diag_embed(torch.tensor([[1.0, 0.2], [0.3, 2.0]], dtype=torch.float64))
    c = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    left = {}
    for rule in ("project", "match"):
        x = torch.tensor([3.0, -2.0], dtype=torch.float64)
        for _ in range(60):
            G = torch.einsum("kij,kj->ki", H, x - c)
            x = x - 0.8 * direction(rule, G, weighting)
        G = torch.einsum("kij,kj->ki", H, x - c)
        left[rule] = float(direction("raw", G, cost_mtl.MGDA()).norm())
    assert left["project"] < 1e-5
    assert left["match"] > 1e-3


def test_project_gives_nothing_for_a_direction_of_rounding():
    M = torch.tensor([[1.0, -1 - 1e-9], [-1 - 1e-9, 1 + 2e-9]], dtype=torch.float64)
    w = cost_mtl.FairGrad(2.0)(M)
    for rule in ("project", "match"):
        assert RULES[rule](M, w).isfinite().all()
    assert length(M, RULES["project"](M, w)) <= 1e-3


def test_unknown_rule():
    with pytest.raises(ValueError, match=r"rule: expected one of raw, .* got 'rwa'"):
        scaled(cost_mtl.FairGrad(), "rwa")


# ------------------------------------------------------------------------------------------------ runs and tables


def test_labels_have_their_shares_and_precision_is_sklearns():
    from sklearn.metrics import average_precision_score

    study = load("rare", smoke=False, data_dir=Path("unused"))
    y = torch.cat([study.problem.train[1], study.validation[1], study.problem.test[1]])
    torch.testing.assert_close(y.mean(dim=0), torch.tensor(PREVALENCES["rare"]), atol=1e-3, rtol=0)
    score = torch.randn(500, generator=torch.Generator().manual_seed(0))
    truth = (score + 0.5 > 1).float()
    truth[:50] = 1 - truth[:50]
    expected = average_precision_score(truth.numpy(), score.numpy())
    assert float(average_precision(score, truth)) == pytest.approx(expected)


@pytest.mark.parametrize("weighting", [w for w in WEIGHTINGS if w != "upgrad"])
def test_a_run_is_costs_own(weighting):
    """``raw`` trains as COST without any rule does; the sum's ratio is 1; ``match`` has the sum's length throughout."""
    study = load("rare", smoke=True, data_dir=Path("unused"))
    settings = Settings("rare", "sgd", weighting, "raw", 0, 0.01, 4, smoke=True)
    record = train(settings, study)
    model = study.problem.model(0)
    base = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plain = cost_mtl.COST(base, model, shared=model.trunk, weighting=WEIGHTINGS[weighting](), trigger=None)
    stream = study.problem.batches(0)
    for _ in range(4):
        losses = plain.step(study.problem.losses, model, *next(stream))
    assert record["loss"] == pytest.approx(losses.tolist(), rel=1e-3)  # records have four digits; a fifth of 4 is 1
    if weighting == "sum":
        assert record["ratio"] == [1, 1, 1]
    matched = train(Settings(**{**vars(settings), "rule": "match"}), study)
    assert matched["ratio"] == [1, 1, 1]


def test_command_records_each_run_once_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(default_scale, "SEEDS", range(2))
    monkeypatch.setattr(default_scale, "OPTIMIZERS", ("sgd",))
    monkeypatch.setattr(default_scale, "WEIGHTINGS", {w: WEIGHTINGS[w] for w in ("sum", "fairgrad", "famo")})
    out = tmp_path / "records.jsonl"
    arguments = ["--problems", "rare", "--smoke", "--out", str(out), "--data-dir", str(tmp_path)]
    main(["run", *arguments])
    first = out.read_bytes()
    main(["run", *arguments])
    assert out.read_bytes() == first
    assert len(read(out)) == len(list(plan(["rare"], smoke=True))) == len({str(r["settings"]) for r in read(out)})
    capsys.readouterr()
    main(["report", "--records", str(out)])
    text = capsys.readouterr().out
    assert all(f"\n| {rule} " in text for rule in RULES)
    assert "famo, match" in text


@pytest.mark.parametrize("problem", ["rooms", "multimnist"])
def test_other_problems_run(problem, tmp_path):
    study = load(problem, smoke=True, data_dir=tmp_path)
    record = train(Settings(problem, "adam", "fairgrad", "project", 0, 1e-3, 2, smoke=True), study)
    assert len(record["test"]) == len(record["loss"]) == 3


def record(rule: str, seed: int, loss: list[float] | None, weighting: str = "fairgrad") -> dict[str, Any]:
    settings = vars(Settings("rare", "sgd", weighting, rule, seed, RATES["rare", "sgd"], 200))
    return {"settings": settings, "first": 1.0, "loss": loss, "test": loss, "ratio": [0.5, 1.0, 2.0 + seed]}


def test_arithmetic_of_the_tables():
    records = [record("raw", seed, [0.5, 0.5], "sum") for seed in range(3)]
    records += [record("match", 0, [0.5, 0.6]), record("match", 1, [0.7, 0.5]), record("match", 2, [9.0, 9.0])]
    records += [record("project", 0, None)]
    results = reporting.Results.of(records)
    arm = ("fairgrad", "match", 1.0)
    assert reporting.cell(results, ("rare", "sgd"), arm, reporting.loss_change) == "1† +15.0 ± 5.0"
    assert results.count(arm) == (1, 3)
    assert reporting.cell(results, ("rare", "sgd"), ("fairgrad", "project", 1.0), reporting.loss_change) == "1†"
    assert reporting.ratios(results, arm) == ["0.5", "1", "4"]


def test_the_page_and_the_rates_are_what_the_records_say(capsys):
    records = [r for path in sorted(RECORDS.glob("*.jsonl.gz")) for r in read(path)]
    assert {key: best for key, (best, _) in default_scale.choose_rates(records).items()} == RATES
    page = DOCS.read_text()
    rows = [line for line in reporting.report(records).splitlines() if line.startswith("|")]
    assert len(rows) > 50
    assert [row for row in rows if row not in page] == []

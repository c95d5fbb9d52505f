"""benchmarks/teleport.py: an attempt is measured as an outsider would, and the tables and curves are made of that."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # plain scripts, not an installed package

import teleport as benchmark
import teleport_curves as curves
import teleport_toy

from cost_mtl import DenseTeleporter


@pytest.fixture(scope="module")
def found():
    problem = dataclasses.replace(teleport_toy.toy(), warmup=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teleport_toy, "POINTS", ((-5.02, 2.6), (5.02, 2.6)))  # in the valleys
        return problem, [m for seed in (0, 1) for m in benchmark.moments(problem, 2, seed, 5)]


def test_moments_are_conflicts_and_stay_as_they_are(found):
    problem, moments = found
    assert len(moments) == 4
    for model, opt, batches in moments:
        before = model.trunk.theta.detach().clone()
        row = benchmark.try_one(problem, (model, opt, batches), DenseTeleporter("norm", invariance="mean"))
        assert row["cos_before"] < 0
        assert torch.equal(before, model.trunk.theta)


def test_a_row_is_what_the_move_did(found):
    problem, moments = found
    rows = [benchmark.try_one(problem, m, DenseTeleporter("norm", invariance="mean")) for m in moments]
    done = [r for r in rows if r["accepted"]]
    assert done
    for row in done:
        assert row["balanced"] >= 1.05
        assert benchmark.gained(row)
        assert row["drift"] <= 0.01
        assert row["heldout"] > row["drift"]  # each loss alone moves further than their mean
        assert row["steps"] > 0
    cells = benchmark.summary(rows)
    assert len(cells) == len(benchmark.HEADER) - 2
    assert cells[0].startswith(f"{len(done) / len(rows):.0%}")
    assert benchmark.summary([{**r, "accepted": False} for r in rows])[0] == "0 %"


def test_gained_looks_at_the_objective_that_improved():
    row = {"objective": "conflict", "cos_before": -0.1, "cos_after": -0.08, "balanced": 2.0}
    assert not benchmark.gained(row)
    assert benchmark.gained({**row, "cos_after": -0.06})
    assert benchmark.gained({**row, "objective": "norm"})
    assert not benchmark.gained({**row, "objective": "norm", "balanced": 1.04})


def test_a_moment_without_a_move_counts_as_no_gain_and_the_curves_are_drawn(tmp_path):
    made = {"accepted": True, "heldout": 0.02, "cos_before": -0.1, "cos_after": 0.1, "norm_ratio": 1.2, "steps": 5.0}
    none = {**made, "accepted": False, "cos_after": None, "norm_ratio": None}
    assert curves.point([made])["cosine"] == pytest.approx(0.2)
    assert curves.point([none, none, made])["cosine"] == 0.0
    assert curves.point([none, made])["heldout"] == pytest.approx(1.0)
    results = {"qm9": {family: {key: [made] for key in settings} for family, settings in curves.SWEEPS.items()}}
    curves.plot(tmp_path / "curves.png", results)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_share_of_time_of_a_run_too_short_for_a_teleport_is_nothing():
    text = benchmark.share_of_time(benchmark.toy(), steps=5)
    assert text == "toy: 5 steps, 0 conflicts looked at, 0 attempts, 0 accepted, 0.0% of the time"

"""examples/toy_pareto.py: the published formula, the Pareto front, and who reaches it."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

import toy_pareto as toy


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("toy")
    assert toy.main(["--smoke", "--out", str(out)]) == 0
    with (out / "table.csv").open() as file:
        return out, list(csv.DictReader(file))


def test_plain_ls_stays_in_the_valleys_and_teleports_reach_the_front(smoke):
    _, rows = smoke
    assert [row["method"] for row in rows] == ["LS", "LS + COST"]
    for row in rows:
        x, y = (float(number) for number in row["arrives at"].strip("()").split(","))
        # The front is at y = -8.3 or so, between x = -7 and 7; the valleys are at y > 0.
        if row["method"] == "LS":
            assert y > 1
            assert float(row["distance to front"]) > 9
            assert row["on the front"] == "no"
        else:
            assert abs(y + 8.3) < 0.8
            assert abs(x) < 7
            assert float(row["distance to front"]) < toy.REACHED
            assert row["on the front"] == "yes"
            assert not row["teleports"].startswith("0")


def test_it_writes_its_files(smoke):
    out, _ = smoke
    assert (out / "trajectories.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "table.json").read_text())["settings"]["lr"] == toy.SMOKE.lr


@pytest.mark.parametrize("point", [(-8.5, 7.5), (9.0, -1.0), (-5.0, 3.0), (0.0, 0.0), (2.0, -11.0)])
def test_the_losses_are_the_published_formula(point):
    a, b = point
    f1 = math.log(max(abs(0.5 * (-a - 7) - math.tanh(-b)), 0.000005)) + 6
    f2 = math.log(max(abs(0.5 * (-a + 3) + math.tanh(-b) + 2), 0.000005)) + 6
    g1 = ((-a + 7) ** 2 + 0.1 * (-b - 8) ** 2) / 10 - 20
    g2 = ((-a - 7) ** 2 + 0.1 * (-b - 8) ** 2) / 10 - 20
    c1, c2 = max(math.tanh(0.5 * b), 0), max(math.tanh(-0.5 * b), 0)
    got = toy.losses(*torch.tensor(point, dtype=torch.float64))
    assert [float(loss) for loss in got] == pytest.approx([c1 * f1 + c2 * g1, c1 * f2 + c2 * g2], rel=1e-12)


def test_the_front_is_where_no_direction_lowers_both_losses():
    front = toy.pareto_front(21)
    assert front[[0, -1], 0].tolist() == [-7, 7]
    generator = np.random.default_rng(0)
    for point in front[1:-1]:
        here = np.array([float(v) for v in toy.losses(*torch.tensor(point))])
        for angle in generator.uniform(0, 2 * math.pi, 50):
            near = point + 1e-3 * np.array([math.cos(angle), math.sin(angle)])
            there = np.array([float(v) for v in toy.losses(*torch.tensor(near))])
            assert (there > here).any()
    # A point beside it does have such a direction.
    beside = torch.tensor([0.0, -7.0], dtype=torch.float64)
    lower = torch.stack(toy.losses(*(beside - torch.tensor([0.0, 1e-3])))) < torch.stack(toy.losses(*beside))
    assert bool(lower.all())
    assert toy.distance_to_front(np.array([0.0, front[10, 1] + 2.0])) == pytest.approx(2.0, abs=1e-2)

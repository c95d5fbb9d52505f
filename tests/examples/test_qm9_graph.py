"""qm9_graph.py: graphs from geometries, the network, standardisation without the test molecules, the script."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

import qm9_graph
from dense.engine.problem import EpochRow
from dense.engine.published import load_published
from dense.errors import UserError
from qm9_graph import QM9, ErrorMeter, GraphNet
from qm9_graph_data import TARGET_NAMES, Graphs, collate, graph_features, load_graphs, split_graphs

SPLITS = ("train", "val", "test")


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return load_graphs(40, 0, tmp_path_factory.mktemp("cache"), progress=False)


H, C, N, O = range(4)  # noqa: E741
METHANE = ([C, H, H, H, H], 1.09 / 3**0.5 * np.array([[0, 0, 0], [1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]))
HYDROGEN_CYANIDE = ([H, C, N], np.array([[0, 0, 0], [1.07, 0, 0], [2.22, 0, 0]]))
BENZENE = (
    [C] * 6 + [H] * 6,
    np.array([[r * np.cos(a), r * np.sin(a), 0] for r in (1.39, 2.48) for a in np.arange(6) * np.pi / 3]),
)
FORMALDEHYDE = ([C, O, H, H], np.array([[0, 0, 0], [1.21, 0, 0], [-0.55, 0.94, 0], [-0.55, -0.94, 0]]))


def batch_of(*molecules: tuple[list[int], np.ndarray]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kinds = torch.tensor([kind for kinds, _ in molecules for kind in kinds])
    positions = torch.from_numpy(np.concatenate([p for _, p in molecules])).float()
    graph = torch.repeat_interleave(torch.arange(len(molecules)), torch.tensor([len(k) for k, _ in molecules]))
    return kinds, positions, graph


def test_graphs_are_complete_within_a_molecule_and_empty_between() -> None:
    kinds, positions, graph = batch_of(METHANE, HYDROGEN_CYANIDE)
    _, index, attributes = graph_features(kinds, positions, graph)
    expected = {(i, j) for i in range(5) for j in range(5) if i != j}
    expected |= {(i, j) for i in range(5, 8) for j in range(5, 8) if i != j}
    assert sorted(map(tuple, index.T.tolist())) == sorted(expected)
    for (i, j), row in zip(index.T.tolist(), attributes, strict=True):
        assert row[4].item() == pytest.approx(np.linalg.norm(positions[i] - positions[j]), rel=1e-5)


SINGLE, DOUBLE, TRIPLE, CONJUGATED = range(4)
COLUMNS = {"conjugated": 6, "sp": 7, "sp2": 8, "sp3": 9, "hydrogens": 10}


@pytest.mark.parametrize(
    ("molecule", "bonds", "atom", "features"),
    [
        (METHANE, {(0, 1): SINGLE, (1, 2): None}, 0, {"sp3": 1, "hydrogens": 4, "sp2": 0, "conjugated": 0}),
        (HYDROGEN_CYANIDE, {(0, 1): SINGLE, (1, 2): TRIPLE, (0, 2): None}, 1, {"sp": 1, "hydrogens": 1}),
        (BENZENE, {(0, 1): CONJUGATED, (0, 6): SINGLE, (0, 2): None}, 0, {"sp2": 1, "hydrogens": 1, "conjugated": 1}),
        (FORMALDEHYDE, {(0, 1): DOUBLE, (0, 2): SINGLE}, 1, {"sp2": 1, "hydrogens": 0}),
        (FORMALDEHYDE, {(2, 3): None}, 0, {"sp2": 1, "hydrogens": 2}),
    ],
    ids=["methane", "HCN", "benzene", "formaldehyde O", "formaldehyde C"],
)
def test_bonds_and_atoms_of_known_molecules(molecule: Any, bonds: dict, atom: int, features: dict) -> None:
    x, index, attributes = graph_features(*batch_of(molecule))
    found = {tuple(pair): row[:4] for pair, row in zip(index.T.tolist(), attributes, strict=True)}
    for pair, kind in bonds.items():
        expected = torch.zeros(4)
        if kind is not None:
            expected[kind] = 1
        assert torch.equal(found[pair], expected), pair
        assert torch.equal(found[pair[::-1]], expected), pair
    for name, value in features.items():
        assert x[atom, COLUMNS[name]] == value, name
    assert x.shape == (len(molecule[0]), 11)
    assert x[atom, :5].argmax() == molecule[0][atom]
    assert x[atom, 5] == [1, 6, 7, 8, 9][molecule[0][atom]]


def test_real_molecules_have_sound_valences(graphs: Graphs) -> None:
    """Every hydrogen has one bond; nearly every carbon two to four neighbours."""
    batch = collate(graphs, np.arange(len(graphs)), torch.zeros(len(graphs), 11))
    x, index, attributes = graph_features(batch["kinds"], batch["positions"], batch["graph"])
    bonded = attributes[:, :4].any(1)
    degree = torch.bincount(index[0][bonded], minlength=len(x))
    assert (degree[batch["kinds"] == H] == 1).float().mean() > 0.99
    carbon = degree[batch["kinds"] == C]
    assert ((carbon >= 2) & (carbon <= 4)).float().mean() > 0.99


def test_the_network_does_not_see_position_rotation_order_or_batching(graphs: Graphs) -> None:
    torch.manual_seed(0)
    model = GraphNet(TARGET_NAMES, dim=8).eval().double()
    batch = collate(graphs, np.array([3, 11]), torch.zeros(len(graphs), 11))
    kinds, positions, graph = batch["kinds"], batch["positions"].double(), batch["graph"]
    expected = torch.stack(list(model(kinds, positions, graph).values()))
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    moved = torch.stack(list(model(kinds, positions @ turn + 5, graph).values()))
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-6)
    first = int((graph == 0).sum())
    order = torch.cat([torch.randperm(first), first + torch.randperm(len(graph) - first)])
    shuffled = torch.stack(list(model(kinds[order], positions[order], graph).values()))
    torch.testing.assert_close(shuffled, expected, rtol=1e-6, atol=1e-6)
    alone = torch.stack(list(model(kinds[:first], positions[:first], graph[:first]).values()))
    torch.testing.assert_close(alone[:, 0], expected[:, 0], rtol=1e-6, atol=1e-6)


def test_the_published_width_has_the_papers_layers() -> None:
    model = GraphNet(TARGET_NAMES)
    shared = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("heads"))
    linear, edge = 11 * 64 + 64, 5 * 128 + 128 + 128 * 4096 + 4096
    root, gru, set2set, mix = 64 * 64 + 64, 2 * 3 * (64 * 64 + 64), 4 * 64 * (128 + 64) + 2 * 4 * 64, 128 * 64 + 64
    assert shared == linear + edge + root + gru + set2set + mix
    assert sum(p.numel() for p in model.heads.parameters()) == 11 * 65


def test_targets_are_standardised_with_the_training_molecules_alone(graphs: Graphs) -> None:
    problem = QM9(graphs, 0, 8)
    rows = {name: problem.loaders[name].numbers for name in SPLITS}
    assert sorted(np.concatenate(list(rows.values())).tolist()) == list(range(len(graphs)))
    train = graphs.targets[rows["train"]]
    np.testing.assert_allclose(problem.mean, train.mean(0))
    np.testing.assert_allclose(problem.scale, train.std(0, ddof=1))
    changed = Graphs(graphs.kinds, graphs.positions, graphs.starts, graphs.targets.copy())
    changed.targets[rows["test"]] *= 100
    assert (QM9(changed, 0, 8).mean == problem.mean).all()
    standard = torch.cat([batch["targets"] for batch in problem.train_loader(0, 1)])
    torch.testing.assert_close(standard.mean(0), torch.zeros(11), atol=1e-4, rtol=0)
    torch.testing.assert_close(standard.std(0), torch.ones(11), atol=1e-4, rtol=0)


def test_without_scaling_the_targets_are_the_files(graphs: Graphs) -> None:
    problem = QM9(graphs, 0, 8, scale_y=False)
    batch = next(iter(problem.eval_loader("val")))
    rows = problem.loaders["val"].numbers
    torch.testing.assert_close(batch["targets"].double(), torch.from_numpy(graphs.targets[rows[:8]]), rtol=1e-6, atol=0)


def test_errors_are_mean_absolute_errors_in_the_targets_units() -> None:
    scale = torch.arange(1.0, 12.0, dtype=torch.float64)
    tasks = ("alpha", "Cv")
    meter = ErrorMeter(tasks, scale)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for size in (4, 3, 1):
        output = {task: torch.randn(size, generator=generator) for task in tasks}
        targets = torch.randn(size, 11, generator=generator)
        meter.update(output, {"targets": targets})
        errors.append(torch.stack([(output[t] - targets[:, TARGET_NAMES.index(t)]).abs() for t in tasks], 1))
    expected = torch.cat(errors).double().mean(0) * torch.tensor([2.0, 11.0])
    assert list(meter.compute().values()) == pytest.approx(expected.tolist(), rel=1e-5)


def test_the_criterion_is_delta_m_against_the_published_single_task_row(graphs: Graphs) -> None:
    problem, table = QM9(graphs, 0, 8), load_published("qm9_per_task")
    for row in table.rows[1:4]:
        metrics = dict(zip(TARGET_NAMES, row.values, strict=True))
        assert problem.criterion(metrics, TARGET_NAMES) == pytest.approx(table.delta_m(row))
    assert table.metrics == TARGET_NAMES


def test_the_epoch_is_chosen_on_validation_and_reported_on_test(graphs: Graphs) -> None:
    problem = QM9(graphs, 0, 8)

    def row(epoch: int, val: float, test: float) -> EpochRow:
        return EpochRow(epoch, 1e-3, {}, {"val": dict.fromkeys(TARGET_NAMES, val),
                                          "test": dict.fromkeys(TARGET_NAMES, test)})  # fmt: skip

    history = [row(1, 3.0, 0.1), row(2, 1.0, 2.0), row(3, 2.0, 0.5)]
    assert problem.summary(history, TARGET_NAMES)["mu"] == 2.0


def test_the_order_is_keyed_on_seed_and_epoch(graphs: Graphs) -> None:
    problem = QM9(graphs, 0, 8)

    def first(seed: int, epoch: int) -> torch.Tensor:
        return next(iter(problem.train_loader(seed, epoch)))["targets"]

    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))


def test_the_cache_gives_the_same_molecules_and_a_damaged_one_is_named(graphs: Graphs, tmp_path: Path) -> None:
    first, again = (load_graphs(40, 0, tmp_path, progress=False) for _ in range(2))
    for name in ("kinds", "positions", "starts", "targets"):
        np.testing.assert_array_equal(getattr(first, name), getattr(graphs, name))
        np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
    path = next(tmp_path.glob("*.npz"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError, match="damaged cache"):
        load_graphs(40, 0, tmp_path, progress=False)
    with pytest.raises(UserError, match="--molecules"):
        load_graphs(3, 0, tmp_path / "b", progress=False)


def test_splits_of_the_full_set_are_the_papers() -> None:
    sizes = {name: len(rows) for name, rows in split_graphs(130_831, 0).items()}
    assert sizes == {"test": 10_000, "val": 10_000, "train": 110_831}


def test_smoke_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--smoke", "--cache", str(tmp_path), "--out", str(tmp_path / "out"), "--preset", "nashmtl", "fairgrad+cost"]
    assert qm9_graph.main(argv) == 0
    assert "| FairGrad + COST |" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "out/table.csv").read_text().splitlines()))
    assert [row["method"] for row in rows[:2]] == ["Nash-MTL", "FairGrad + COST"]
    assert all(float(rows[0][name]) > 0 for name in TARGET_NAMES)
    assert any(row["method"] == "FAMO" for row in rows)  # published rows beside

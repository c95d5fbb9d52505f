"""QM9's features, targets, cache and splits (examples/qm9_data.py)."""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

import qm9_data as qm9

SETTINGS = qm9.DataSettings()
SMALL = qm9.DataSettings(molecules=40)
CHARGE = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}


def geometries(count: int) -> list[tuple[list[str], np.ndarray]]:
    """The first molecules of the data set (methane, ammonia, water, ...): elements and positions."""
    rows = qm9.read_rows(qm9.csv_parts(), np.arange(count))
    return [(ast.literal_eval(row["Elements"]), np.array(ast.literal_eval(row["XYZ_Ang"]))) for row in rows]


def slow_features(elements: list[str], positions: np.ndarray) -> list[float]:
    """The same numbers one by one, in plain Python; eigenvalues from the general (not the symmetric) solver."""
    atoms = len(elements)
    distance = [[math.dist(positions[i], positions[j]) for j in range(atoms)] for i in range(atoms)]
    charge = [CHARGE[element] for element in elements]
    matrix = np.zeros((atoms, atoms))
    for i in range(atoms):
        for j in range(atoms):
            far = distance[i][j] / 0.529177210903
            matrix[i, j] = 0.5 * charge[i] ** 2.4 if i == j else charge[i] * charge[j] / far
    eigenvalues = sorted(np.linalg.eigvals(matrix).real, key=lambda value: -abs(value))
    features = eigenvalues + [0.0] * (29 - atoms)
    features += [float(elements.count(element)) for element in "HCNOF"] + [float(atoms)]
    for position, first in enumerate("HCNOF"):
        for second in "HCNOF"[position:]:
            pairs = [
                distance[i][j]
                for i in range(atoms)
                for j in range(i)
                if sorted((elements[i], elements[j])) == sorted((first, second))
            ]
            for centre in (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0):
                features.append(sum(math.exp(-((d - centre) ** 2) / (2 * 0.25**2)) for d in pairs))
    return features


def test_features_equal_a_slow_independent_computation() -> None:
    rows = [*range(12), 60000, 130830]
    for row in qm9.read_rows(qm9.csv_parts(), np.array(rows)):
        elements, positions = ast.literal_eval(row["Elements"]), np.array(ast.literal_eval(row["XYZ_Ang"]))
        features = qm9.describe(elements, positions, SETTINGS)
        assert features.shape == (140,)
        np.testing.assert_allclose(features, slow_features(elements, positions), rtol=1e-9, atol=1e-9)


def test_features_ignore_motion_and_order_but_not_shape() -> None:
    elements, positions = geometries(20)[-1]
    features = qm9.describe(elements, positions, SETTINGS)
    rng = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(rng.normal(size=(3, 3)))
    order = rng.permutation(len(elements))
    moved = (positions @ rotation.T + rng.normal(size=3))[order]
    same = qm9.describe([elements[index] for index in order], moved, SETTINGS)
    np.testing.assert_allclose(same, features, rtol=1e-9, atol=1e-9)
    bent = positions.copy()
    bent[0] += 0.1
    assert np.abs(qm9.describe(elements, bent, SETTINGS) - features).max() > 1e-2


def test_targets_are_the_published_ones() -> None:
    """Methane, ammonia and water: atomisation energies in kcal/mol as in the gdb9 table of MoleculeNet."""
    published = [
        [-395.999594594, -398.643290011, -401.014646522, -372.471772148],
        [-276.861363363, -278.620270794, -280.399259105, -259.338801719],
        [-213.087624272, -213.974294019, -215.159658275, -201.407171167],
    ]
    targets = [qm9.parse_row(row, SETTINGS)[1] for row in qm9.read_rows(qm9.csv_parts(), np.arange(3))]
    energies = np.array(targets)[:, 6:10] / qm9.MEV_PER_HARTREE * 627.5095
    np.testing.assert_allclose(energies, published, rtol=1e-5)
    # methane: mu 0 D, alpha 13.21 a0^3, HOMO -0.3877, LUMO 0.1171 hartree, R2 35.3641 a0^2, ZPVE 0.044749, Cv 6.469
    meV = 27211.386246
    expected = [0.0, 13.21, -0.3877 * meV, 0.1171 * meV, 35.3641, 0.044749 * meV]
    np.testing.assert_allclose(targets[0][:6], expected, rtol=1e-9)
    assert targets[0][10] == 6.469


def test_free_atom_energies_are_those_of_pyg() -> None:
    references = pytest.importorskip("torch_geometric.datasets.qm9").atomrefs
    for index, name in zip((7, 8, 9, 10), ("U0", "U", "H", "G"), strict=True):
        np.testing.assert_allclose(np.array(qm9.FREE_ATOMS[name]) * 27.211386246, references[index], rtol=1e-6)


def test_all_molecules_are_found() -> None:
    assert sum(qm9.count_lines(part) for part in qm9.csv_parts()) == 130831
    last = next(qm9.read_rows(qm9.csv_parts(), np.array([130830])))
    assert last["XYZ_file"] == "dsgdb9nsd_133885.xyz"


def test_cache_is_used_and_keyed_by_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = qm9.load(SMALL, tmp_path)
    assert first.features.shape == (40, 140)
    assert first.targets.shape == (40, 11)

    def fail(settings: qm9.DataSettings) -> qm9.Molecules:
        raise RuntimeError("computed again")

    monkeypatch.setattr(qm9, "compute", fail)
    again = qm9.load(SMALL, tmp_path)
    np.testing.assert_array_equal(again.features, first.features)
    np.testing.assert_array_equal(again.targets, first.targets)
    for other in (qm9.DataSettings(41), qm9.DataSettings(40, seed=1), qm9.DataSettings(40, width=0.3)):
        with pytest.raises(RuntimeError, match="computed again"):
            qm9.load(other, tmp_path)


def test_interrupted_cache_write_leaves_nothing_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(file: object, **arrays: np.ndarray) -> None:
        file.write(b"half of it")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(qm9.np, "savez", half)
        with pytest.raises(KeyboardInterrupt):
            qm9.load(SMALL, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(qm9.load(SMALL, tmp_path).targets) == 40


def test_subset_is_drawn_from_all_of_qm9() -> None:
    """Not the first lines, which are the smallest molecules: half of QM9 has 18 atoms or more."""
    atoms = qm9.compute(SMALL).features[:, 34]
    assert 16 <= np.median(atoms) <= 20


def test_molecules_that_the_bins_were_chosen_on_are_passed_over() -> None:
    """Drawn one after the other, the two sets meet without sharing a molecule."""
    both = qm9.compute(qm9.DataSettings(60, skip=0)).targets
    first, later = (qm9.compute(qm9.DataSettings(30, skip=skip)).targets for skip in (0, 30))
    assert {tuple(row) for row in both} == {tuple(row) for row in first} | {tuple(row) for row in later}
    assert len({tuple(row) for row in both}) == 60
    assert SETTINGS.skip == 6000


def test_scaling_sees_the_training_molecules_only() -> None:
    """Test and validation molecules can be anything: what training sees stays the same, to the bit."""
    rng = np.random.default_rng(0)
    features = rng.normal(3.0, 2.0, (80, 140)).astype(np.float32)
    targets = rng.normal(-1.0, 5.0, (80, 11))
    features[:, 0] = np.arange(80)  # a name tag
    data = qm9.split(qm9.Molecules(features, targets), seed=0)
    tags = [part.inputs[:, 0].numpy() for part in (data.train, data.val, data.test)]
    assert [len(tag) for tag in tags] == [60, 10, 10]
    rows = np.searchsorted(np.sort(np.concatenate(tags)), np.concatenate(tags))  # scaling keeps the tags' order
    assert sorted(rows) == list(range(80))  # each molecule in one part
    held = rows[60:]
    features[held], targets[held] = 1e4, -1e4
    changed = qm9.split(qm9.Molecules(features, targets), seed=0)
    assert changed.train.inputs.equal(data.train.inputs)
    assert changed.train.targets.equal(data.train.targets)
    assert changed.unit.equal(data.unit)
    np.testing.assert_allclose(data.train.targets.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(data.train.targets.std(0, unbiased=False), 1, rtol=1e-5)
    assert changed.test.targets.abs().min() > 100


def test_wrong_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"molecules: expected at most 124831 \(the 130831 of QM9 without the 6000 skip"
    ):
        qm9.compute(qm9.DataSettings(molecules=124832))
    with pytest.raises(ValueError, match="skip: expected an integer >= 0, got -1"):
        qm9.DataSettings(skip=-1)
    with pytest.raises(ValueError, match="molecules: expected at least 8"):
        qm9.DataSettings(molecules=7)
    row = next(qm9.read_rows(qm9.csv_parts(), np.array([0])))
    with pytest.raises(ValueError, match=r"expected at most 29 atoms.*got \['C', 'Si'"):
        qm9.parse_row(row | {"Elements": "['C','Si','H','H','H']"}, SETTINGS)
    with pytest.raises(ValueError, match="expected finite targets"):
        qm9.parse_row(row | {"LUMO_au": "nan"}, SETTINGS)
    with pytest.raises(ValueError, match=r"expected the columns \['LUMO_au'\]"):
        qm9.parse_row({name: value for name, value in row.items() if name != "LUMO_au"}, SETTINGS)
    part = tmp_path / "qm9_part1.csv"
    part.write_text("a,b,c\n1,2,3\n4,5\n")
    with pytest.raises(ValueError, match=r"qm9_part1.csv: expected 3 fields, got 2 in '4,5"):
        list(qm9.read_rows([part], np.array([0, 1])))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'cost_mtl\[examples\]'"):
        qm9.load(SMALL, tmp_path)

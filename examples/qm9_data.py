"""QM9 as eleven regression tasks on 140 geometric features, read from the wheel of ``qm9pack`` (no download).

QM9 (Ramakrishnan et al., Scientific Data 2014): equilibrium geometries and properties of 130,831 small organic
molecules, computed with B3LYP. The package's own loader needs pandas and the retired ``pkg_resources``; its CSV parts
are read here line by line instead, and only the chosen molecules are parsed.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import importlib.metadata
import importlib.util
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from reporting import write_whole
from torch import Tensor

ELEMENTS = ("H", "C", "N", "O", "F")
ATOMIC_NUMBERS = (1, 6, 7, 8, 9)
PAIRS = tuple(combinations_with_replacement(range(len(ELEMENTS)), 2))
MAX_ATOMS = 29  # the largest molecule in QM9
BOHR_PER_ANGSTROM = 1 / 0.529177210903
MEV_PER_HARTREE = 27211.386246
FORMAT = 1  # of the cached file: raise it when features or targets change their meaning


@dataclass(frozen=True)
class Target:
    """One property: its name and unit here, its column there, and what turns the one into the other.

    ``atoms`` are the energies of the free atoms, in the column's unit. With them the target is the atomisation energy,
    as in PyG's targets 12 to 15.
    """

    name: str
    unit: str
    column: str
    factor: float = 1.0
    atoms: tuple[float, ...] = (0.0,) * len(ELEMENTS)


# Energies of the free atoms H, C, N, O, F in hartree: the data set's own atomref table.
FREE_ATOMS = {
    "U0": (-0.500273, -37.846772, -54.583861, -75.064579, -99.718730),
    "U": (-0.498857, -37.845355, -54.582445, -75.063163, -99.717314),
    "H": (-0.497912, -37.844411, -54.581501, -75.062219, -99.716370),
    "G": (-0.510927, -37.861317, -54.598897, -75.079532, -99.733544),
}

# In the order of the public QM9 multi-task scripts: PyG's indices 0, 1, 2, 3, 5, 6, 12, 13, 14, 15, 11.
TARGETS = (
    Target("mu", "D", "Dipole_debye"),
    Target("alpha", "a0^3", "Polarizability_bohr3"),
    Target("HOMO", "meV", "HOMO_au", MEV_PER_HARTREE),
    Target("LUMO", "meV", "LUMO_au", MEV_PER_HARTREE),
    Target("R2", "a0^2", "R2_bohr2"),
    Target("ZPVE", "meV", "ZPVE_au", MEV_PER_HARTREE),
    Target("U0", "meV", "InternalEnergy_0K_au", MEV_PER_HARTREE, FREE_ATOMS["U0"]),
    Target("U", "meV", "InternalEnergy_298K_au", MEV_PER_HARTREE, FREE_ATOMS["U"]),
    Target("H", "meV", "Enthalphy_298K_au", MEV_PER_HARTREE, FREE_ATOMS["H"]),
    Target("G", "meV", "GibbsFreeEnergy_298K_au", MEV_PER_HARTREE, FREE_ATOMS["G"]),
    Target("Cv", "cal/mol/K", "Heatcapacity_Cv_cal_mol_K"),
)


@dataclass(frozen=True)
class DataSettings:
    """Which molecules, and how they are described.

    Attributes:
        molecules: how many, drawn without replacement from all of QM9.
        seed: of that draw and of the split. It stays the same for all training seeds, so that a test molecule is a
            test molecule in every run.
        skip: how many molecules of the draw are passed over first. Default 6,000: the bins below were chosen on
            molecules out of those, so that none of them may test or train anything here.
        centres: of the Gaussian bins of the pair distances, in angstrom: bonds to hydrogen, bonds, and on to 1-4 pairs.
        width: standard deviation of those bins, in angstrom.
    """

    molecules: int = 6000
    seed: int = 0
    skip: int = 6000
    centres: tuple[float, ...] = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
    width: float = 0.25

    def __post_init__(self) -> None:
        if self.molecules < 8:
            raise ValueError(
                f"molecules: expected at least 8 (an eighth each validates and tests), got {self.molecules}"
            )
        if self.skip < 0:
            raise ValueError(f"skip: expected an integer >= 0, got {self.skip}")

    @property
    def num_features(self) -> int:
        """140 with the default bins."""
        return MAX_ATOMS + len(ELEMENTS) + 1 + len(PAIRS) * len(self.centres)

    @property
    def key(self) -> str:
        """Hash of everything that the cached arrays depend on."""
        csv_parts()  # says how to install the package where it is missing
        source = {"settings": asdict(self), "format": FORMAT, "qm9pack": importlib.metadata.version("qm9pack")}
        return hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Molecules:
    """features [N, 140] float32 and targets [N, 11] float64, in the units of :data:`TARGETS`."""

    features: NDArray[np.float32]
    targets: NDArray[np.float64]


# ------------------------------------------------------------------------------------------------ features


def coulomb_eigenvalues(charges: NDArray[np.float64], positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Eigenvalues [MAX_ATOMS] of the Coulomb matrix (Rupp et al., PRL 2012), by falling magnitude, padded with zeros.

    Args:
        charges: Z [A], the nuclear charges.
        positions: [A, 3], in angstrom.
    """
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1) * BOHR_PER_ANGSTROM
    np.fill_diagonal(distances, 1.0)
    matrix = np.outer(charges, charges) / distances
    np.fill_diagonal(matrix, 0.5 * charges**2.4)
    values = np.linalg.eigvalsh(matrix)
    padded = np.zeros(MAX_ATOMS)
    padded[: len(values)] = values[np.argsort(-np.abs(values))]
    return padded


def distance_histogram(
    kinds: NDArray[np.int64], positions: NDArray[np.float64], centres: Sequence[float], width: float
) -> NDArray[np.float64]:
    """For each pair of elements a histogram of its distances, [15 * len(centres)].

    The bins are Gaussians, so that a feature is a smooth function of the geometry.

    Args:
        kinds: [A], indices into :data:`ELEMENTS`.
        positions: [A, 3], in angstrom.
    """
    first, second = np.triu_indices(len(kinds), 1)
    distances = np.linalg.norm(positions[first] - positions[second], axis=-1)
    bins = np.exp(-0.5 * ((distances[:, None] - np.asarray(centres)) / width) ** 2)
    histogram = np.zeros((len(PAIRS), len(centres)))
    low, high = np.minimum(kinds[first], kinds[second]), np.maximum(kinds[first], kinds[second])
    row = {pair: index for index, pair in enumerate(PAIRS)}
    np.add.at(histogram, [row[pair] for pair in zip(low.tolist(), high.tolist(), strict=True)], bins)
    return histogram.ravel()


def describe(elements: Sequence[str], positions: NDArray[np.float64], settings: DataSettings) -> NDArray[np.float64]:
    """The features [140] of one molecule: 29 Coulomb eigenvalues, 5 element counts and their sum, 105 histogram bins.

    They do not change when the molecule is moved, turned or its atoms are listed in another order.
    """
    kinds = np.array([ELEMENTS.index(element) for element in elements])
    charges = np.array(ATOMIC_NUMBERS, dtype=np.float64)[kinds]
    counts = np.bincount(kinds, minlength=len(ELEMENTS))
    return np.concatenate(
        [
            coulomb_eigenvalues(charges, positions),
            counts,
            [len(kinds)],
            distance_histogram(kinds, positions, settings.centres, settings.width),
        ]
    )


# ------------------------------------------------------------------------------------------------ reading


def csv_parts() -> list[Path]:
    """The CSV parts inside the installed ``qm9pack``, found without importing it."""
    spec = importlib.util.find_spec("qm9pack")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("qm9pack, which carries QM9, is not installed: pip install 'cost_mtl[examples]'")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    parts = sorted(folder.glob("qm9_part*.csv"))
    if not parts:
        raise FileNotFoundError(f"qm9pack: expected qm9_part1.csv, qm9_part2.csv, ... in {folder}, found none")
    return parts


def count_lines(path: Path) -> int:
    """Molecules in one part: its lines but for the header."""
    with path.open("rb") as file:
        return sum(1 for _ in file) - 1


def read_rows(parts: Sequence[Path], chosen: NDArray[np.int64]) -> Iterator[dict[str, str]]:
    """The rows with the sorted numbers ``chosen``, counted over all parts; the other lines are skipped unparsed."""
    wanted = set(chosen.tolist())
    number = 0
    for part in parts:
        with part.open(encoding="utf-8", newline="") as file:
            header = next(csv.reader([next(file)]))
            for line in file:
                if number in wanted:
                    row = next(csv.reader([line]))
                    if len(row) != len(header):
                        raise ValueError(f"{part.name}: expected {len(header)} fields, got {len(row)} in {line[:60]!r}")
                    yield dict(zip(header, row, strict=True))
                number += 1


def parse_row(row: dict[str, str], settings: DataSettings) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Features [140] and targets [11] of one row of the CSV."""
    missing = [name for name in ("Elements", "XYZ_Ang", *(t.column for t in TARGETS)) if name not in row]
    if missing:
        raise ValueError(f"qm9pack: expected the columns {missing} in its CSV files, got {sorted(row)}")
    elements = ast.literal_eval(row["Elements"])
    positions = np.array(ast.literal_eval(row["XYZ_Ang"]), dtype=np.float64)
    if set(elements) - set(ELEMENTS) or positions.shape != (len(elements), 3) or len(elements) > MAX_ATOMS:
        raise ValueError(
            f"{row.get('XYZ_file')}: expected at most {MAX_ATOMS} atoms out of {ELEMENTS} with three coordinates each, "
            f"got {elements} with coordinates of shape {positions.shape}"
        )
    counts = np.array([elements.count(element) for element in ELEMENTS])
    targets = np.array([(float(row[t.column]) - counts @ np.array(t.atoms)) * t.factor for t in TARGETS])
    if not np.isfinite(targets).all():
        raise ValueError(f"{row.get('XYZ_file')}: expected finite targets, got {targets}")
    return describe(elements, positions, settings), targets


def compute(settings: DataSettings) -> Molecules:
    """Draw the molecules and describe them (about 4 s for 6,000 on one core)."""
    parts = csv_parts()
    total = sum(count_lines(part) for part in parts)
    most = total - settings.skip
    if settings.molecules > most:
        raise ValueError(
            f"molecules: expected at most {most} (the {total} of QM9 without the {settings.skip} skipped), got "
            f"{settings.molecules}"
        )
    drawn = np.random.default_rng(settings.seed).permutation(total)[settings.skip :]
    chosen = np.sort(drawn[: settings.molecules])
    features, targets = zip(*(parse_row(row, settings) for row in read_rows(parts, chosen)), strict=True)
    return Molecules(np.array(features, dtype=np.float32), np.array(targets))


def load(settings: DataSettings, folder: Path) -> Molecules:
    """Features and targets from the cache in ``folder``, computed and stored there the first time."""
    path = folder / f"qm9-{settings.key}.npz"
    if not path.exists():
        molecules = compute(settings)
        buffer = io.BytesIO()
        np.savez(buffer, features=molecules.features, targets=molecules.targets)
        write_whole(path, buffer.getvalue())
    with np.load(path) as arrays:
        molecules = Molecules(arrays["features"], arrays["targets"])
    expected = (settings.molecules, settings.num_features), (settings.molecules, len(TARGETS))
    if (molecules.features.shape, molecules.targets.shape) != expected:
        raise ValueError(f"{path}: expected arrays of shape {expected}, found {molecules.features.shape}; delete it")
    return molecules


# ------------------------------------------------------------------------------------------------ splits


@dataclass(frozen=True)
class Part:
    """Inputs [N, 140] and targets [N, 11], both standardised."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Data:
    """The three parts, and the units of the targets: a standardised error times ``unit`` [11] is one in usual units."""

    train: Part
    val: Part
    test: Part
    unit: Tensor


def split(molecules: Molecules, seed: int) -> Data:
    """Three quarters to train on, an eighth each to validate and test; scaled by the training molecules alone."""
    count = len(molecules.targets)
    order = np.random.default_rng([seed, 1]).permutation(count)
    held = count // 8
    rows = {"test": order[:held], "val": order[held : 2 * held], "train": order[2 * held :]}
    inputs = standardise(molecules.features.astype(np.float64), rows["train"])
    targets = standardise(molecules.targets, rows["train"])
    parts = {name: Part(to_tensor(inputs[index]), to_tensor(targets[index])) for name, index in rows.items()}
    return Data(**parts, unit=to_tensor(spread(molecules.targets, rows["train"])))


def spread(values: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard deviation of each column over ``rows``; 1 for a column that is constant there (an absent pair)."""
    deviation = values[rows].std(axis=0)
    return np.where(deviation > 0, deviation, 1.0)


def standardise(values: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """``values`` with the mean and standard deviation over ``rows`` (the training molecules) taken out."""
    return (values - values[rows].mean(axis=0)) / spread(values, rows)


def to_tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values).to(torch.float32)

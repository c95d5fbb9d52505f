"""QM9 as graphs, from the geometries and targets in the wheel of ``qm9pack``.

The public scripts take their 11 atom and 4 bond features from RDKit through torch_geometric. Here they are read off the
geometry, so that nothing but the wheel is needed: a bond is two atoms closer than 1.2 times the sum of their covalent
radii, its kind follows from how short it is, and hybridisation from the number of neighbours. Element, atomic number,
hydrogen count and distances are exact, the rest is an approximation: rows made with it are close to, but not the same
problem as, the published ones.
"""

from __future__ import annotations

import ast
import io
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from dense.errors import UserError
from numpy.typing import NDArray
from qm9_data import ATOMIC_NUMBERS, ELEMENTS, TARGETS, count_lines, csv_parts, read_rows
from torch import Tensor
from tqdm import tqdm

__all__ = ["NODE_FEATURES", "TARGET_NAMES", "Graphs", "collate", "graph_features", "load_graphs", "split_graphs"]

TARGET_NAMES = ("mu", "alpha", "homo_meV", "lumo_meV", "r2", "zpve_meV", "U0_meV", "U_meV", "H_meV", "G_meV", "Cv")
"""The targets' names in ``published/qm9_per_task.csv``, in the order and units of ``qm9_data.TARGETS``."""
NODE_FEATURES = 11
TOTAL = 130831
COVALENT_RADII = torch.tensor([0.31, 0.76, 0.71, 0.66, 0.57])
"""Of H, C, N, O, F in angstrom (Cordero et al. 2008)."""


@dataclass(frozen=True)
class Graphs:
    """N molecules with A atoms altogether.

    Attributes:
        kinds: [A] index of the element in H, C, N, O, F.
        positions: [A, 3] in angstrom.
        starts: [N + 1], molecule n has the atoms starts[n] to starts[n + 1] - 1.
        targets: [N, 11] float64, in the units of the published table.
    """

    kinds: NDArray[np.int64]
    positions: NDArray[np.float32]
    starts: NDArray[np.int64]
    targets: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.targets)


def load_graphs(count: int | None, seed: int, folder: Path, *, progress: bool = True) -> Graphs:
    """``count`` molecules drawn without replacement (None: all 130,831), read once and cached in ``folder``.

    Raises:
        UserError: if qm9pack is missing, has a row that cannot be read, or holds fewer molecules.
    """
    path = folder / f"qm9-graphs-{count or 'all'}-{seed}.npz"
    if not path.is_file():
        try:
            graphs = _read(count, seed, progress)
        except (ModuleNotFoundError, FileNotFoundError, ValueError) as error:
            raise UserError(str(error)) from None
        buffer = io.BytesIO()
        np.savez(buffer, **vars(graphs))
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_bytes(buffer.getvalue())
        os.replace(partial, path)
    try:
        with np.load(path) as arrays:
            return Graphs(**{name: arrays[name] for name in ("kinds", "positions", "starts", "targets")})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: damaged cache ({error}); remove it") from None


def _read(count: int | None, seed: int, progress: bool) -> Graphs:
    parts = csv_parts()
    total = sum(count_lines(part) for part in parts)
    if count is not None and not 8 <= count <= total:
        raise ValueError(f"--molecules: expected 8 to {total}, got {count}")
    order = np.random.default_rng(seed).permutation(total)
    chosen = np.sort(order[:count])
    kinds, positions, sizes, targets = [], [], [], []
    for row in tqdm(
        read_rows(parts, chosen), "reading QM9", len(chosen), unit="mol", disable=not progress, leave=False
    ):
        elements = ast.literal_eval(row["Elements"])
        counts = np.array([elements.count(element) for element in ELEMENTS])
        kinds += [ELEMENTS.index(element) for element in elements]
        positions.append(np.array(ast.literal_eval(row["XYZ_Ang"]), dtype=np.float32))
        sizes.append(len(elements))
        targets.append([(float(row[t.column]) - counts @ np.array(t.atoms)) * t.factor for t in TARGETS])
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return Graphs(np.array(kinds), np.concatenate(positions), starts, np.array(targets))


def split_graphs(count: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """Molecule numbers of train, val and test: 10,000 each for the last two, or a thirteenth where there are fewer."""
    order = np.random.default_rng([seed, 1]).permutation(count)
    held_out = min(10_000, max(1, count // 13))
    return {"test": order[:held_out], "val": order[held_out : 2 * held_out], "train": order[2 * held_out :]}


def collate(graphs: Graphs, numbers: NDArray[np.int64], targets: Tensor) -> dict[str, Tensor]:
    """A batch of plain tensors: ``kinds`` [A], ``positions`` [A, 3], ``graph`` [A] (which molecule), ``targets``
    [B, 11], the rows ``numbers`` of ``targets``."""
    atoms = np.concatenate([np.arange(graphs.starts[n], graphs.starts[n + 1]) for n in numbers])
    sizes = graphs.starts[numbers + 1] - graphs.starts[numbers]
    return {
        "kinds": torch.from_numpy(graphs.kinds[atoms]),
        "positions": torch.from_numpy(graphs.positions[atoms]),
        "graph": torch.from_numpy(np.repeat(np.arange(len(numbers)), sizes)),
        "targets": targets[torch.from_numpy(numbers)],
    }


def graph_features(kinds: Tensor, positions: Tensor, graph: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The complete graph of every molecule.

    Returns:
        ``x`` [A, 11]: one-hot element (5), atomic number, conjugated, sp, sp2, sp3, number of hydrogens;
        ``edge_index`` [2, E], all ordered pairs within a molecule; ``edge_attr`` [E, 5]: single, double, triple,
        conjugated (all 0 without a bond), distance in angstrom.
    """
    index = _complete_edges(graph)
    first, second = index
    distance = (positions[first] - positions[second]).norm(dim=1)
    radii = COVALENT_RADII.to(positions.device)[kinds]
    bond = _bond_kinds(distance / (radii[first] + radii[second]), (kinds[first] == 0) | (kinds[second] == 0))
    edge_attr = torch.cat([bond, distance[:, None]], 1)
    return _node_features(kinds, first, second, bond), index, edge_attr


def _complete_edges(graph: Tensor) -> Tensor:
    """All ordered pairs of different atoms of one molecule; ``graph`` is sorted."""
    sizes = torch.bincount(graph)
    starts = sizes.cumsum(0) - sizes
    own = sizes[graph]  # [A] atoms in the molecule of each atom
    first = torch.repeat_interleave(own)
    offset = torch.arange(len(first), device=graph.device) - torch.repeat_interleave(own.cumsum(0) - own, own)
    second = starts[graph][first] + offset
    keep = first != second
    return torch.stack([first[keep], second[keep]])


def _bond_kinds(ratio: Tensor, with_hydrogen: Tensor) -> Tensor:
    """One-hot [E, 4] of single, double, triple, conjugated from the distance over the sum of the covalent radii.

    Bounds between typical lengths: C#C 0.79, C=C 0.88, aromatic C-C 0.92, C-C 1.01 (likewise for N and O)."""
    bounds = torch.tensor([0.82, 0.90, 0.95, 1.20], device=ratio.device)
    level = torch.bucketize(ratio, bounds)  # 0 triple, 1 double, 2 conjugated, 3 single, 4 none
    level = torch.where(with_hydrogen & (level < 3), 3, level)
    column = torch.tensor([2, 1, 3, 0, 4], device=ratio.device)[level]
    return torch.nn.functional.one_hot(column, 5)[:, :4].to(ratio.dtype)


def _node_features(kinds: Tensor, first: Tensor, second: Tensor, bond: Tensor) -> Tensor:
    atoms = len(kinds)

    def count(mask: Tensor) -> Tensor:
        return torch.zeros(atoms, device=kinds.device, dtype=bond.dtype).index_add_(0, first, mask.to(bond.dtype))

    bonded = bond.any(1)
    neighbours, hydrogens = count(bonded), count(bonded & (kinds[second] == 0))
    conjugated = count(bond[:, 3] > 0) > 0
    # steric number: neighbours and lone pairs (one on N, two on O, three on F)
    lone = torch.tensor([0, 0, 1, 2, 3], device=kinds.device)[kinds]
    steric = neighbours + lone
    heavy = kinds > 0
    hybrid = torch.stack([heavy & (steric <= 2), heavy & (steric == 3), heavy & (steric >= 4)], 1)
    numbers = torch.tensor(ATOMIC_NUMBERS, device=kinds.device)[kinds]
    return torch.cat(
        [
            torch.nn.functional.one_hot(kinds, len(ELEMENTS)).to(bond.dtype),
            numbers[:, None].to(bond.dtype),
            conjugated[:, None].to(bond.dtype),
            hybrid.to(bond.dtype),
            hydrogens[:, None],
        ],
        1,
    )

"""Time and accuracy of the weightings against torchjd, SciPy and a conic solver (cvxpy), as Markdown tables.

    python benchmarks/weightings.py            # K = 2, 3, 11, 40, 100: ten to twenty minutes
    python benchmarks/weightings.py --quick    # K = 2, 3, 11, few repeats: about one minute

One thread; CPU time of the process, the median over the repeats, so that other work on the machine counts little. Slow
solvers get few repeats, and none where the last K says that one call would exceed --budget seconds ("skipped").
Needs torchjd with its solvers: pip install torchjd ecos qpsolvers quadprog scipy cvxpy.
"""

# ruff: noqa: E402
from __future__ import annotations

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import optimize
from torch import Tensor

from cost_mtl import weighting as ours
from cost_mtl.base import WeightingInputs

Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


# ------------------------------------------------------------------------------------- the Gramians


def gradients(K: int, seed: int = 0) -> dict[str, Matrix]:
    """Gradients G [K, m] of every family. All have a solution but "Pareto-stationary", whose convex hull holds 0."""
    random = np.random.default_rng([seed, K])
    G = random.standard_normal((K, 4 * K + 10))
    spread = np.linspace(-1, 1, K)
    random.shuffle(spread)
    rank = (K + 1) // 2 if K > 2 else 1
    duplicated = G.copy()
    duplicated[1::2] = G[0 : K - K % 2 : 2]
    stationary = G.copy()
    stationary[-1] = -G[:-1].mean(axis=0)
    conflicting = G - 0.95 * G.mean(axis=0)
    return {
        "well-conditioned": G,
        "conflicting": conflicting,
        "rank-deficient": np.abs(random.standard_normal((K, rank))) @ random.standard_normal((rank, G.shape[1])),
        "duplicated": duplicated,
        "spread 1e±3": G * 10 ** (3 * spread)[:, None],
        "spread 1e±6": G * 10 ** (6 * spread)[:, None],
        "conflicting, spread 1e±3": conflicting * 10 ** (3 * spread)[:, None],
        "norms 1e-8": G * 1e-8,
        "norms 1e+8": G * 1e8,
        "Pareto-stationary": stationary,
    }


# ------------------------------------------------------------------------------------- the measures of accuracy


def fairness_residual(alpha: float) -> Callable[[Matrix, Vector], float]:
    """max_i |w_i^(1/alpha) (M w)_i - 1|"""

    def residual(G: Matrix, w: Vector) -> float:
        return float(np.abs(w ** (1 / alpha) * (G @ G.T @ w) - 1).max())

    return residual


def cagrad_gap(c: float) -> Callable[[Matrix, Vector], float]:
    """how far min_i g_i^T d falls short of the dual bound of our multipliers, relative to c ||g_0|| ||g_w||"""

    def gap(G: Matrix, w: Vector) -> float:
        g_0 = G.mean(axis=0)
        multipliers = ours.CAGrad(c, rescale=0)(torch.from_numpy(G @ G.T)).numpy() - 1
        g_w = multipliers / multipliers.sum() @ G
        unit = c * np.linalg.norm(g_0) * np.linalg.norm(g_w)
        d = w @ G
        d = g_0 + (d - g_0) * min(1.0, c * np.linalg.norm(g_0) / max(float(np.linalg.norm(d - g_0)), 1e-300))
        return float((g_w @ g_0 + unit - (G @ d).min()) / unit)

    return gap


def norm_excess(G: Matrix, w: Vector) -> float:
    """||G^T w|| over the norm of our own solution, minus 1 (negative: the other one is shorter)"""
    g = ours.MGDA()(torch.from_numpy(G @ G.T)).numpy() @ G
    return float(np.linalg.norm(w @ G) / max(float(np.linalg.norm(g)), 1e-300) - 1)


def projection_spread(G: Matrix, w: Vector) -> float:
    """relative spread of the projections g_i^T d / ||g_i||"""
    projections = G @ (w @ G) / np.linalg.norm(G, axis=1)
    return float(np.ptp(projections) / np.abs(projections).max())


# ------------------------------------------------------------------------------------- SciPy, as the scripts do


def scipy_fairgrad(alpha: float) -> Callable[[Matrix], Vector]:
    """Least squares from w = 1/K, the official FairGrad's way."""

    def solve(M: Matrix) -> Vector:
        start = np.full(len(M), 1 / len(M))
        with np.errstate(all="ignore"):
            found = optimize.least_squares(lambda w: M @ w - w ** (-1 / alpha), start, bounds=(0, np.inf))
        return np.asarray(found.x)

    return solve


def scipy_cagrad(c: float) -> Callable[[Matrix], Vector]:
    """SLSQP on the dual over the simplex, the official CAGrad's way."""

    def solve(M: Matrix) -> Vector:
        K = len(M)
        b, radius = M.mean(axis=1), c * np.sqrt(M.mean()) + 1e-8

        def dual(x: Vector) -> float:
            return float(x @ b + radius * np.sqrt(x @ M @ x + 1e-8))

        simplex = {"type": "eq", "fun": lambda x: 1 - x.sum()}
        x = optimize.minimize(dual, np.full(K, 1 / K), bounds=[(0, 1)] * K, constraints=simplex).x
        return np.asarray(1 / K + radius * x / (np.sqrt(x @ M @ x) + 1e-8))

    return solve


# ------------------------------------------------------------------------------------- the methods

Solver = Callable[[Matrix], Vector]
Rival = Callable[[Matrix], Solver]
"""G [K, m] -> the solver (a torchjd object, say), which then takes M."""


@dataclass(frozen=True)
class Method:
    """One weighting, its rivals by name, and the measure of the weights (None: time only) with what it means."""

    name: str
    ours: Callable[[Tensor], Tensor]
    rivals: dict[str, Rival]
    error: Callable[[Matrix, Vector], float] | None = None
    meaning: str = "time only"


def gramian_weighting(weigh: Callable[[Tensor], Tensor]) -> Rival:
    """Anything that maps a Gramian tensor to weights: torchjd's Weightings."""
    return lambda G: lambda M: weigh(torch.from_numpy(M)).numpy()


def plain(solve: Solver) -> Rival:
    return lambda G: solve


def nash_of_torchjd(G: Matrix) -> Solver:
    """torchjd's Nash-MTL takes the gradients; a triangular factor of M stands for them."""
    import torchjd.aggregation as jd

    weigh = jd.NashMTL(n_tasks=len(G), max_norm=0.0).weighting
    matrix = torch.from_numpy(np.linalg.qr(G.T, mode="r").T.copy())

    def solve(M: Matrix) -> Vector:
        weigh.reset()
        return np.asarray(weigh(matrix).numpy())

    return solve


def project(gramian: Tensor) -> Tensor:
    return ours.PCGrad().weigh(WeightingInputs(gramian, gramian[0], gramian, 0), {}).weights


def methods() -> list[Method]:
    import torchjd.aggregation as jd

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.weighting import reference as slow  # the slow twins, by a conic solver

    residual, gap = "max_i |w_i^(1/alpha) (M w)_i - 1|", "shortfall of min_i g_i^T d, relative to c ||g_0|| ||g_w||"
    raw = {"rescale": 0, "scale": "raw"}
    fair = [
        Method(
            f"FairGrad(alpha={alpha:g})",
            ours.FairGrad(alpha),
            {
                "torchjd": gramian_weighting(jd.FairGradWeighting(alpha=alpha)),
                "SciPy": plain(scipy_fairgrad(alpha)),
                "cvxpy": plain(lambda M, alpha=alpha: slow.fairness_reference(M, alpha)),
            },
            fairness_residual(alpha),
            residual,
        )
        for alpha in (1.0, 2.0)
    ]
    nash = {"torchjd": nash_of_torchjd, "cvxpy": plain(lambda M: slow.fairness_reference(M, 1.0))}
    cagrad = {
        "torchjd": gramian_weighting(jd.CAGradWeighting(c=0.4)),
        "SciPy": plain(scipy_cagrad(0.4)),
        "cvxpy": plain(lambda M: slow.cagrad_reference(M, 0.4) / len(M)),
    }
    mgda = {"torchjd": gramian_weighting(jd.MGDAWeighting()), "cvxpy": plain(slow.min_norm_reference)}
    imtl = {"torchjd": gramian_weighting(jd.IMTLGWeighting())}
    return [
        *fair,
        Method("NashMTL()", ours.NashMTL(), nash, fairness_residual(1.0), residual),
        Method("CAGrad(c=0.4)", ours.CAGrad(0.4, **raw), cagrad, cagrad_gap(0.4), gap),
        Method("MGDA()", ours.MGDA(), mgda, norm_excess, "||G^T w|| over the norm of our solution, minus 1"),
        Method("IMTLG()", ours.IMTLG(), imtl, projection_spread, "relative spread of g_i^T d / ||g_i||"),
        Method("PCGrad()", project, {"torchjd": gramian_weighting(jd.PCGradWeighting())}),
        Method("EqualWeighting()", ours.EqualWeighting(), {"torchjd": gramian_weighting(jd.SumWeighting())}),
    ]


# ------------------------------------------------------------------------------------- the tables


def median_time(call: Callable[[], object], repeats: int, budget: float) -> float:
    """Median CPU seconds of a call; fewer repeats where they would take more than ``budget`` seconds."""
    times: list[float] = []
    while len(times) < repeats and (not times or sum(times) < budget):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


@dataclass
class Race:
    """One method's measurements; ``last`` holds a rival's time at the last K, to leave out what would take too long."""

    method: Method
    repeats: int
    budget: float
    last: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)

    def row(self, family: str, G: Matrix) -> tuple[float, dict[str, float], list[str]]:
        """Our seconds, the rivals' time over ours, and the cells of the row."""
        gramian = torch.from_numpy(G @ G.T)
        weights = self.method.ours(gramian)
        seconds = median_time(lambda: self.method.ours(gramian), self.repeats, self.budget)
        solve = getattr(self.method.ours, "solve", None)
        status = "" if solve is None else solve(gramian).report.status
        cells = [family, f"{1e3 * seconds:.2f}", self._error(G, weights.numpy()), status]
        ratios: dict[str, float] = {}
        for name, rival in self.method.rivals.items():
            try:
                measured = self._measure(name, rival, family, G)
            except Exception as failure:  # whatever a rival's solver raises is its result
                cells += [type(failure).__name__, ""]
                continue
            if measured is None:
                cells += ["skipped", ""]
                continue
            ratios[name] = measured[0] / seconds
            cells += [f"{ratios[name]:.0f} ×", measured[1]]
        return seconds, ratios, cells

    def _measure(self, name: str, rival: Rival, family: str, G: Matrix) -> tuple[float, str] | None:
        """A rival's seconds and error, or None where one call would take longer than the budget."""
        K, M = len(G), G @ G.T
        before = self.last.get((name, family))
        if before is not None and before[1] * (K / before[0]) ** 2 > self.budget:
            return None
        solve = rival(G)
        start = time.process_time()
        weights = solve(M)
        once = time.process_time() - start
        # The first call builds and compiles; it counts only where it is the only one that fits the budget.
        each = once if once > self.budget / 2 else median_time(lambda: solve(M), 3, self.budget / 2)
        self.last[name, family] = (K, each)
        return each, self._error(G, weights)

    def _error(self, G: Matrix, weights: Vector) -> str:
        if self.method.error is None:
            return ""
        with np.errstate(all="ignore"):
            value = self.method.error(G, np.asarray(weights, dtype=np.float64))
        return f"{value:.0e}" if np.isfinite(value) else str(value)


def report(method: Method, tasks: list[int], repeats: int, budget: float) -> None:
    """Prints one table per K, its rows the families, and the medians over the solvable ones."""
    race = Race(method, repeats, budget)
    print(f"\n## {method.name}\n\nError: {method.meaning}.\n")
    heads = ["family", "ms", "error", "status"]
    for name in method.rivals:
        heads += [name, "its error"]
    for K in tasks:
        print(f"### K = {K}\n\n| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
        rows = []
        for family, G in gradients(K).items():
            seconds, ratios, cells = race.row(family, G)
            print(f"| {' | '.join(cells)} |", flush=True)
            if family != "Pareto-stationary":
                rows.append((seconds, ratios))
        print(f"\n{_medians(rows, list(method.rivals))}\n", flush=True)


def _medians(rows: list[tuple[float, dict[str, float]]], rivals: list[str]) -> str:
    line = f"Median over the solvable families: {1e3 * statistics.median(row[0] for row in rows):.2f} ms"
    for name in rivals:
        known = [ratios[name] for _, ratios in rows if name in ratios]
        line += f"; {name} {statistics.median(known):.0f} ×" if known else f"; {name} not measured"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="K = 2, 3, 11 and few repeats")
    parser.add_argument("--only", help="only methods whose name contains this")
    parser.add_argument("--tasks", type=int, nargs="+", help="numbers of tasks K")
    parser.add_argument("--budget", type=float, help="seconds for one rival on one Gramian (default 4; quick 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tasks = options.tasks or ([2, 3, 11] if options.quick else [2, 3, 11, 40, 100])
    budget = options.budget or (1.0 if options.quick else 4.0)
    print("# Weightings: time and accuracy\n\nTimes of the others are multiples of ours (first column, milliseconds).")
    for method in methods():
        if options.only is None or options.only.lower() in method.name.lower():
            report(method, tasks, 5 if options.quick else 15, budget)


if __name__ == "__main__":
    main()

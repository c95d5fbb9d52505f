"""The two-parameter toy problem of CAGrad (Liu et al., NeurIPS 2021, appendix): two losses with narrow valleys on the
way to the Pareto front. Linear scalarisation (LS) stalls in a valley from two of the published initial points; the same
run with teleports does not (COST, Figure 6).

With two losses and two parameters no direction keeps both losses, so a teleport keeps the mean loss here:
``DenseTeleporter(invariance="mean")``. Everything else is COST's default, the schedule aside.

    python examples/toy_pareto.py              # all six points, a few minutes, into runs/toy
    python examples/toy_pareto.py --smoke      # one point where LS stalls, a larger learning rate, seconds

Writes table.md, table.csv, table.json and trajectories.png.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from reporting import Table, save_table, write_whole
from torch import Tensor, nn

import cost_mtl

POINTS = ((-8.5, 7.5), (9.0, 9.0), (-8.5, -5.0), (0.0, 0.0), (-7.5, -0.5), (9.0, -1.0))
"""Initial points of CAGrad's toy (the first three) and of Nash-MTL's (all but the third). LS stalls from two."""

FLOOR = 5e-6
"""Smallest argument of the logarithms, which bounds the losses from below."""

REACHED = 0.5
"""Distance to the Pareto front, in the plane of the parameters, below which a run counts as having arrived."""


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Attributes:
        steps, lr, betas: of Adam. The published toy takes 100,000 steps at 1e-3; at 3e-3 LS stalls as well,
            and the runs are shorter.
        start, cooldown: of the teleports.
    """

    points: Sequence[tuple[float, float]] = POINTS
    steps: int = 12_000
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    start: int = 500
    cooldown: int = 50


SMOKE = Settings(points=POINTS[1:2], steps=3400, lr=7e-3, betas=(0.9, 0.99), start=300, cooldown=20)


def losses(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """L_1 and L_2 at the points (x, y), of any shape: logarithmic valleys where y > 0, quadratic bowls where y < 0,
    each times tanh(|y| / 2)."""
    bend = torch.tanh(y)
    valley_1 = ((-x - 7) / 2 + bend).abs().clamp_min(FLOOR).log() + 6
    valley_2 = ((3 - x) / 2 - bend + 2).abs().clamp_min(FLOOR).log() + 6
    bowl_1 = ((x - 7) ** 2 + 0.1 * (y + 8) ** 2) / 10 - 20
    bowl_2 = ((x + 7) ** 2 + 0.1 * (y + 8) ** 2) / 10 - 20
    up, down = torch.tanh(y / 2).clamp_min(0), torch.tanh(-y / 2).clamp_min(0)
    return up * valley_1 + down * bowl_1, up * valley_2 + down * bowl_2


class Point(nn.Module):
    """The model: a point of the plane."""

    def __init__(self, start: tuple[float, float]) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(start, dtype=torch.float64))

    def losses(self) -> tuple[Tensor, Tensor]:
        return losses(*self.theta)


def pareto_front(count: int = 201) -> NDArray[np.float64]:
    """Points [count, 2] of the Pareto front, from x = -7 to 7.

    There lambda grad L_1 + (1 - lambda) grad L_2 = 0. Its x part gives lambda = (x + 7) / 14; its y part is solved by
    bisection between y = -8, the bottom of the bowls, and -12: the blend pulls the optimum a little below the bottom.
    """
    x = torch.linspace(-7, 7, count, dtype=torch.float64)
    share = (x + 7) / 14
    low, high = torch.full_like(x, -12.0), torch.full_like(x, -8.0)
    for _ in range(60):
        y = ((low + high) / 2).requires_grad_()
        first, second = losses(x, y)
        (slope,) = torch.autograd.grad((share * first + (1 - share) * second).sum(), y)
        y = y.detach()
        low, high = torch.where(slope < 0, y, low), torch.where(slope < 0, high, y)
    return torch.stack([x, (low + high) / 2], dim=1).numpy()


def distance_to_front(theta: NDArray[np.float64]) -> float:
    """Smallest distance in the plane between theta [2] and the Pareto front."""
    return float(np.linalg.norm(pareto_front(2001) - theta, axis=1).min())


@dataclass(frozen=True)
class Path2D:
    """One run.

    Attributes:
        theta: [steps + 1, 2].
        jumps: steps at which a teleport was accepted.
        attempts: teleports tried.
    """

    method: str
    start: tuple[float, float]
    theta: NDArray[np.float64]
    losses: tuple[float, float]
    jumps: list[int]
    attempts: int


def teleporter_of(objective: str) -> cost_mtl.DenseTeleporter:
    return cost_mtl.DenseTeleporter(invariance="mean", objective=objective)


def run(method: str, start: tuple[float, float], settings: Settings, objective: str = "auto") -> Path2D:
    """``"LS"`` or ``"LS + COST"`` from one point."""
    model = Point(start)
    optimizer = cost_mtl.COST(
        torch.optim.Adam(model.parameters(), lr=settings.lr, betas=settings.betas),
        model,
        shared=model,
        weighting=cost_mtl.EqualWeighting(),
        teleporter=teleporter_of(objective) if "COST" in method else None,
        schedule=cost_mtl.TeleportSchedule(settings.start, settings.cooldown),
    )
    theta, jumps, attempts = [model.theta.detach().numpy().copy()], [], 0
    for step in range(settings.steps):
        optimizer.step(model.losses)
        theta.append(model.theta.detach().numpy().copy())
        report = optimizer.last_step.teleport if optimizer.last_step else None
        if report is not None:
            attempts += 1
            if report.accepted:
                jumps.append(step + 1)
    with torch.no_grad():
        first, second = model.losses()
    return Path2D(method, start, np.array(theta), (float(first), float(second)), jumps, attempts)


def table(paths: Sequence[Path2D]) -> Table:
    header = ["from", "method", "arrives at", "L1", "L2", "distance to front", "on the front", "teleports"]
    rows = []
    for path in paths:
        x, y = path.theta[-1]
        gap = distance_to_front(path.theta[-1])
        counts = f"{len(path.jumps)} of {path.attempts}" if "COST" in path.method else "-"
        rows.append([f"({path.start[0]:g}, {path.start[1]:g})", path.method, f"({x:.2f}, {y:.2f})",
                     *(f"{value:.2f}" for value in path.losses), f"{gap:.2f}", "yes" if gap < REACHED else "no",
                     counts])  # fmt: skip
    return Table(header, rows)


def plot(file: Path, paths: Sequence[Path2D]) -> None:
    """The trajectories over contours of the mean loss, one panel per method; accepted teleports are marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    grid = torch.linspace(-10.5, 10.5, 301, dtype=torch.float64)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    mean = torch.stack(losses(x, y)).mean(dim=0)
    front = pareto_front()
    methods = list(dict.fromkeys(path.method for path in paths))
    figure = Figure(figsize=(6 * len(methods), 5.6), layout="constrained")
    for axis, method in zip(figure.subplots(1, len(methods), squeeze=False)[0], methods, strict=True):
        axis.contour(grid, grid, mean, levels=40, cmap="viridis", linewidths=0.7, alpha=0.7)
        axis.plot(*front.T, color="0.35", lw=5, alpha=0.6, solid_capstyle="round", label="Pareto front")
        for path in paths:
            if path.method == method:
                (line,) = axis.plot(*path.theta.T, lw=1.6)
                axis.plot(*path.theta[0], "o", color="black", ms=6)
                axis.plot(*path.theta[-1], "*", color=line.get_color(), mec="black", ms=13)
                if path.jumps:
                    axis.plot(*path.theta[path.jumps].T, "x", color="crimson", ms=5)
        axis.plot([], [], "o", color="black", label="initial point")
        axis.plot([], [], "*", color="white", mec="black", ms=11, label="end")
        axis.plot([], [], "x", color="crimson", label="accepted teleport")
        axis.set(title=method, xlabel="θ₁", ylabel="θ₂", xlim=(-10.5, 10.5), ylim=(-10.5, 10.5), aspect="equal")
        axis.legend(loc="upper center", fontsize="small", framealpha=0.9, ncols=2)
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    write_whole(file, buffer.getvalue())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/toy"), help="default: %(default)s")
    parser.add_argument("--objective", default="auto", help="of the teleports (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="one point, a larger learning rate")
    args = parser.parse_args(argv)
    settings = SMOKE if args.smoke else Settings()
    torch.set_num_threads(1)
    paths = []
    for start in settings.points:
        for method in ("LS", "LS + COST"):
            paths.append(run(method, start, settings, args.objective))
            print(f"{method} from {start}: done", file=sys.stderr)
    report = table(paths)
    details = {"settings": vars(settings), "jumps": {f"{p.method} {p.start}": p.jumps for p in paths}}
    save_table(args.out / "table", report, details)
    plot(args.out / "trajectories.png", paths)
    print(report.markdown())
    print(f"{args.out / 'table.md'}, table.csv, table.json and trajectories.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Teleports on a stiff problem: a physics-informed network for 1-D convection, full batch, float64.

u_t + beta u_x = 0 on (0, 2 pi) x (0, 1), u(x, 0) = sin x, periodic: three losses (residual, initial, boundary), which
share every parameter. The plain sum is trained with Adam; on the way copies teleport.

    python benchmarks/convection.py [--betas 5 30] [--seeds 0 1 2] [--every 100] [--steps 1200]
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import cost_mtl


@dataclass(frozen=True)
class Convection:
    """The problem with its points, the same in every call.

    Args:
        beta: velocity.
        points: of the residual; a quarter as many for each of the other two losses.
        width: of the two hidden layers.
    """

    beta: float = 30.0
    points: int = 256
    width: int = 20
    inside: Tensor = field(init=False)
    start: Tensor = field(init=False)
    times: Tensor = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        size = torch.tensor([2 * math.pi, 1.0], dtype=torch.float64)
        few = self.points // 4
        object.__setattr__(self, "inside", torch.rand(self.points, 2, dtype=torch.float64, generator=g) * size)
        object.__setattr__(self, "start", torch.rand(few, 1, dtype=torch.float64, generator=g) * size[0])
        object.__setattr__(self, "times", torch.rand(few, 1, dtype=torch.float64, generator=g))

    def model(self, seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        w = self.width
        return nn.Sequential(nn.Linear(2, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh(), nn.Linear(w, 1)).double()

    def losses(self, model: nn.Module) -> dict[str, Tensor]:
        points = self.inside.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        zero = torch.zeros_like(self.start)
        left, right = (torch.cat([torch.full_like(self.times, x), self.times], dim=1) for x in (0.0, 2 * math.pi))
        return {
            "residual": (slope[:, 1] + self.beta * slope[:, 0]).square().mean(),
            "initial": (model(torch.cat([self.start, zero], dim=1)) - self.start.sin()).square().mean(),
            "boundary": (model(left) - model(right)).square().mean(),
        }


def optimizer(model: nn.Module, teleporter: Any) -> cost_mtl.COST:
    """The plain sum, Adam at 1e-3; teleports by hand."""
    return cost_mtl.COST(
        torch.optim.Adam(model.parameters(), lr=1e-3), model, shared=model, weighting=cost_mtl.EqualWeighting(),
        teleporter=teleporter, trigger=None,
    )  # fmt: skip


def moments(problem: Convection, seed: int, every: int, steps: int) -> Iterator[tuple[int, nn.Module]]:
    """(step, copy of the model) every so many steps of training."""
    model = problem.model(seed)
    opt = optimizer(model, None)
    for step in range(steps + 1):
        if step and step % every == 0:
            yield step, copy.deepcopy(model)
        opt.step(problem.losses, model)


def attempt(problem: Convection, model: nn.Module, teleporter: Any) -> tuple[cost_mtl.TeleportReport, float]:
    """What comes of one attempt on a copy, and its cost in ordinary steps."""
    model = copy.deepcopy(model)
    opt = optimizer(model, teleporter)
    began = time.process_time()
    report = opt.teleport(problem.losses, model)
    seconds = time.process_time() - began
    spent = []
    for _ in range(3):
        began = time.process_time()
        opt.step(problem.losses, model)
        spent.append(time.process_time() - began)
    return report, seconds / statistics.median(spent) - 1


def line(report: cost_mtl.TeleportReport) -> str:
    """One attempt."""
    before, after = report.cosines_before, report.cosines_after
    cosine = f"{float(before.min()):+.2f} -> {'?' if after is None else f'{float(after.min()):+.2f}'}"
    return (f"{'accepted' if report.accepted else 'rejected'}, smallest cosine {cosine}, {report.closure_calls} calls, "
            f"length {report.length:.5f}, {report.reason}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--betas", nargs="+", type=float, default=[5.0, 30.0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--verbose", action="store_true", help="a line for each attempt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    teleporters = {"dense": cost_mtl.DenseTeleporter(), "LoRA": cost_mtl.LoRATeleporter(rank=2)}
    print("| beta | teleporter | attempts | accepted | largest drift | closure calls, median (most) | cost in steps |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for beta in args.betas:
        problem = Convection(beta)
        found = [(seed, *m) for seed in args.seeds for m in moments(problem, seed, args.every, args.steps)]
        for name, teleporter in teleporters.items():
            rows = []
            for seed, step, model in found:
                report, cost = attempt(problem, model, teleporter)
                rows.append((report, cost))
                if args.verbose:
                    print(f"{name}, seed {seed}, step {step}: {line(report)}", flush=True)
            calls = [r.closure_calls for r, _ in rows]
            good = [r for r, _ in rows if r.accepted]
            drift = max((r.drift for r in good), default=float("nan"))
            print(
                f"| {beta:g} | {name} | {len(rows)} | {len(good) / len(rows):.0%} | {drift:.2%} | "
                f"{statistics.median(calls):.0f} ({max(calls)}) | {statistics.median(c for _, c in rows):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What is one teleport worth some steps later? Branches of one run, with and without it, on the same batches.

The end of a whole run depends on chance so much that a small harm or gain takes dozens of seeds to see. Branches stay
close to each other for a while: at moments of conflict along a plain run every arm teleports a copy of model and
optimizer, all copies train on over the same batches, and the losses of all training data and the test metrics are
compared with those of the copy that did not teleport.

    python benchmarks/ablation_branch.py [--problems multimnist qm9] [--weighting cagrad] [--arms cost placebo]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from ablation import EPOCHS, RATES, SMOKE_EPOCHS
from ablation_arms import ARMS, NoMove
from ablation_problems import Study, load, metrics
from ablation_run import Settings, build
from problems import Batch, Heads, Problem
from reporting import Table, mean_and_error  # of examples/, which problems.py has put on the path
from torch import Tensor
from tqdm import tqdm

import cost_mtl
from cost_mtl.teleport.base import TeleportProblem

COMPARED = ("cost", "placebo", "no-move", "constraints", "norm", "dense")
SEEDS = (3000, 3001, 3002, 3003)
LOOKS = (0, 5, 20, 40)
"""Steps after the teleport at which branches are compared."""

Point = tuple[Heads, cost_mtl.COST, list[Batch]]
"""Where a run stands, and the batches to come; copy the model and the optimizer together before using them."""


def points(settings: Settings, study: Study, every: int, ahead: int = 0) -> Iterator[Point]:
    """Moments at which COST would teleport along a run that itself never does, at least ``every`` steps apart, after
    the share before the first attempt; with the batch of that step and ``ahead`` more."""
    problem = study.problem
    model = problem.model(settings.seed)
    optimizer = build(settings, model, problem.steps_per_epoch)
    # The driver with a teleporter keeps earlier batches, but at no step may it use them.
    object.__setattr__(optimizer._controller, "schedule", cost_mtl.TeleportSchedule(start=10**9))
    steps = settings.epochs * problem.steps_per_epoch
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [max(1, steps // 2)], gamma=0.5)
    batches = list(itertools.islice(problem.batches(settings.seed), steps + ahead))
    last = -every
    for step in range(steps):
        if step >= settings.start * steps and step - last >= every:
            coming = batches[step : step + 1 + ahead]
            if would_teleport((model, optimizer, coming), problem):
                last = step
                yield model, optimizer, coming
        optimizer.step(problem.losses, model, *batches[step])
        scheduler.step()


@dataclass
class _Asked:
    """Moves nothing, and notes that it was asked to."""

    asked: bool = False

    def propose(self, problem: TeleportProblem, /) -> cost_mtl.Move:
        self.asked = True
        return cost_mtl.Move(torch.zeros_like(problem.gradients[0]), "none", inner_steps=0)


def would_teleport(point: Point, problem: Problem) -> bool:
    """Whether the coming step has a conflict that an earlier batch confirms."""
    model, optimizer = copy.deepcopy(point[:2])
    teleporter = _Asked()
    object.__setattr__(optimizer._controller, "teleporter", teleporter)
    object.__setattr__(optimizer._controller, "schedule", cost_mtl.TeleportSchedule(start=0, cooldown=1))
    optimizer.step(problem.losses, model, *point[2][0])
    return teleporter.asked


def whole_losses(problem: Problem, model: Heads, chunk: int = 256) -> Tensor:
    """Every task's loss [K] on the training data, float64, in training mode with the buffers put back; a last chunk
    that is not full is left out (BatchNorm)."""
    count = len(problem.train[0])
    chunk = min(chunk, count)
    saved = [buffer.clone() for buffer in model.buffers()]
    with torch.no_grad():
        parts = [
            torch.stack(list(problem.losses(model, *(t[k : k + chunk] for t in problem.train)).values())).double()
            for k in range(0, count - chunk + 1, chunk)
        ]
        for buffer, value in zip(model.buffers(), saved, strict=True):
            buffer.copy_(value)
    return torch.stack(parts).mean(dim=0)


def branch(point: Point, problem: Problem, arm: str, looks: Sequence[int]) -> tuple[float | None, Tensor]:
    """Teleport a copy and train it on.

    Returns:
        Rise of the smallest cosine (None where nothing was accepted; 0 for the arms without a move), and logarithms
        [looks, 2, K] of the training losses and the test metrics after that many steps.
    """
    model, optimizer = copy.deepcopy(point[:2])
    found: list[Tensor] = []
    gain = _teleport(point, model, optimizer, arm, problem)
    for step, batch in enumerate([*point[2], None]):
        if step in looks:
            test = torch.tensor(metrics(problem, model, problem.test), dtype=torch.float64)
            found.append(torch.stack([whole_losses(problem, model), test]).clamp_min(1e-30).log())
        if batch is not None:
            optimizer.step(problem.losses, model, *batch)
    return gain, torch.stack(found)


def _teleport(point: Point, model: Heads, optimizer: cost_mtl.COST, arm: str, problem: Problem) -> float | None:
    make = ARMS[arm].teleporter
    if make is None:
        return 0.0
    teleporter = make()
    object.__setattr__(optimizer._controller, "teleporter", teleporter)
    optimizer.htr = ARMS[arm].htr
    report = optimizer.teleport(problem.losses, model, *point[2][0])
    if isinstance(teleporter, NoMove):
        optimizer.progress.sigma = teleporter.sigma
        return 0.0 if teleporter.sigma is not None else None
    if not report.accepted or report.cosines_after is None:
        return None
    return float(report.cosines_after.min() - report.cosines_before.min())


def compare(settings: Sequence[Settings], study: Study, arms: Sequence[str], every: int, looks: Sequence[int]) -> Table:
    """Mean over the accepted teleports (± standard error) of the relative difference in percent from the branch
    without one, averaged over the tasks."""
    differences: dict[str, list[Tensor]] = {arm: [] for arm in arms}
    gains: dict[str, list[float]] = {arm: [] for arm in arms}
    tried = 0
    for run in settings:
        for point in tqdm(points(run, study, every, max(looks)), desc=f"seed {run.seed}", mininterval=10):
            tried += 1
            _, plain = branch(point, study.problem, "plain", looks)
            for arm in arms:
                gain, there = branch(point, study.problem, arm, looks)
                if gain is not None:
                    gains[arm].append(gain)
                    differences[arm].append(100 * (there - plain).mean(dim=2))
    rows = []
    for arm in arms:
        row = [arm, f"{len(gains[arm])} of {tried}"]
        if gains[arm]:
            row.append(f"{statistics.median(gains[arm]):+.3f}")
            for column in torch.stack(differences[arm]).transpose(1, 2).flatten(1).T:  # [2 looks, points]
                mean, error = mean_and_error(column.tolist())
                row.append(f"{mean:+.2f} ± {error:.2f}")
        rows.append(row + ["–"] * (3 + 2 * len(looks) - len(row)))
    header = ["arm", "accepted", "cosine", *(f"train, {n}" for n in looks), *(f"test, {n}" for n in looks)]
    return Table(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=list(EPOCHS), default=["multimnist", "qm9"])
    parser.add_argument("--weighting", default="cagrad")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--arms", nargs="+", choices=[a for a in ARMS if ARMS[a].teleporter], default=list(COMPARED))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--every", type=int, default=12, help="least number of steps from one moment to the next")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in args.problems:
        rate = RATES[name, args.weighting, args.optimizer]
        epochs = SMOKE_EPOCHS if args.smoke else EPOCHS[name]
        settings = [
            Settings(name, args.weighting, args.optimizer, "cost", seed, rate, epochs, args.smoke)
            for seed in args.seeds
        ]
        study = load(name, smoke=args.smoke, data_dir=args.data_dir)
        looks = (0, 1, 2) if args.smoke else LOOKS
        print(f"{name}, {args.weighting}, {args.optimizer}:")
        print(compare(settings, study, args.arms, args.every, looks).markdown(), flush=True)


if __name__ == "__main__":
    main()

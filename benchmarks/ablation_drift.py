"""Where do accepted teleports leave the losses of the whole training set?

COST keeps the losses of two batches and bounds the size of the change on a third. This measures the signed change on
all training data, which a training run feels: at points along a plain run every arm's teleport is tried on a copy.

    python benchmarks/ablation_drift.py [--problems qm9 multimnist] [--weighting cagrad] [--arms cost placebo]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from ablation import EPOCHS, RATES, SMOKE_EPOCHS
from ablation_arms import ARMS
from ablation_problems import Study, load
from ablation_run import Settings, build
from problems import Batch, Heads, Problem
from reporting import Table, mean_and_error  # of examples/, which problems.py has put on the path
from torch import Tensor

import cost_mtl

COMPARED = ("cost", "placebo", "constraints", "strict", "dense")
SEEDS = (3000, 3001)


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


def points(settings: Settings, study: Study, every: int) -> Iterator[tuple[Heads, cost_mtl.COST, Batch]]:
    """(model, optimizer, batch) along a run that itself never teleports, after the share before the first attempt."""
    problem = study.problem
    model = problem.model(settings.seed)
    optimizer = build(settings, model, problem.steps_per_epoch)
    # The driver with a teleporter keeps earlier batches, but at no step may it use them.
    object.__setattr__(optimizer._driver, "schedule", cost_mtl.TeleportSchedule(start=10**9))
    stream = problem.batches(settings.seed)
    steps = settings.epochs * problem.steps_per_epoch
    for step in range(steps):
        batch = next(stream)
        if step >= settings.start * steps and step % every == 0:
            yield model, optimizer, batch
        optimizer.step(problem.losses, model, *batch)


def signed_changes(settings: Sequence[Settings], study: Study, arms: Sequence[str], every: int) -> Table:
    """For each arm: attempts, accepted, and the mean over the accepted (± standard error) of the relative change of the
    training losses, averaged over the tasks and of the tasks that rose and fell most."""
    changes: dict[str, list[Tensor]] = {arm: [] for arm in arms}
    gains: dict[str, list[float]] = {arm: [] for arm in arms}
    tried = 0
    for run in settings:
        for model, optimizer, batch in points(run, study, every):
            tried += 1
            before = whole_losses(study.problem, model)
            for arm in arms:
                make = ARMS[arm].teleporter
                twin, opt = copy.deepcopy((model, optimizer))
                object.__setattr__(opt._driver, "teleporter", make() if make else None)
                report = opt.teleport(study.problem.losses, twin, *batch)
                if report.accepted:
                    changes[arm].append(100 * (whole_losses(study.problem, twin) / before - 1))
                    gains[arm].append(float(report.cosines_after.min() - report.cosines_before.min()))
    rows = []
    for arm in arms:
        row = [arm, f"{len(changes[arm])} of {tried}"]
        if changes[arm]:
            for pick in (Tensor.mean, Tensor.max, Tensor.min):
                mean, error = mean_and_error([float(pick(change)) for change in changes[arm]])
                row.append(f"{mean:+.2f} ± {error:.2f}")
            row.append(f"{statistics.median(gains[arm]):+.3f}")
        rows.append(row + ["–"] * (6 - len(row)))
    header = ["arm", "accepted", "mean of the tasks %", "largest rise %", "largest fall %", "smallest cosine"]
    return Table(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=list(EPOCHS), default=["multimnist", "qm9"])
    parser.add_argument("--weighting", default="cagrad")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--arms", nargs="+", choices=[a for a in ARMS if ARMS[a].teleporter], default=list(COMPARED))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--every", type=int, default=20, help="steps from one point to the next")
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
        print(f"{name}, {args.weighting}, {args.optimizer}:")
        print(signed_changes(settings, study, args.arms, args.every).markdown(), flush=True)


if __name__ == "__main__":
    main()

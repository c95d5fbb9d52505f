"""Does an exact symmetry help training? The test that docs/symmetry.md describes, registered before its first record.

Every arm of a setting starts from the same weights and sees the same batches. The learning rate is tuned for each arm
with the same number of runs, on seeds that are used nowhere else. One JSON line is appended for each finished run,
keyed on all of its settings, so each command can be stopped and given again.

    python benchmarks/symmetry.py tune      # all rates of the grid, on two seeds of their own
    python benchmarks/symmetry.py run       # ten fresh seeds, each arm at the rate that its validation metrics chose
    python benchmarks/symmetry.py report    # the tables, from the records in benchmarks/results/symmetry
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from ablation import append, read
from default_scale_problems import load
from symmetry_run import ARMS, EPOCHS, WEIGHTINGS, Settings, train
from tqdm import tqdm

RECORDS = Path(__file__).parent / "results" / "symmetry"
OPTIMIZERS = ("sgd", "adam")
GRID = {"sgd": (0.0075, 0.015, 0.03, 0.06, 0.12, 0.24), "adam": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)}
TUNING_SEEDS = (2100, 2101)
SEEDS = range(100, 110)

Setting = tuple[str, str, str]
"""Problem, weighting, optimizer."""


def settings_of(problems: Sequence[str]) -> list[Setting]:
    return list(product(problems, WEIGHTINGS, OPTIMIZERS))


def tuning(setting: Setting, *, smoke: bool = False) -> list[Settings]:
    rates = GRID[setting[2]][:2] if smoke else GRID[setting[2]]
    seeds = TUNING_SEEDS[:1] if smoke else TUNING_SEEDS
    return [Settings(*setting, arm, seed, lr, smoke) for arm in ARMS for lr in rates for seed in seeds]


def score(record: dict[str, Any]) -> float:
    """Mean log of the validation metrics; infinite where training broke down."""
    values = record["validation"]
    return math.inf if values is None else statistics.mean(math.log(max(v, 1e-30)) for v in values)


def chosen_rates(records: Sequence[dict[str, Any]]) -> dict[tuple[Setting, str], float]:
    """The rate with the lowest mean score, of each setting and arm whose tuning is complete."""
    scores: dict[tuple[Setting, str], dict[float, list[float]]] = {}
    for record in records:
        s = Settings(**record["settings"])
        of_arm = scores.setdefault(((s.problem, s.weighting, s.optimizer), s.arm), {})
        of_arm.setdefault(s.lr, []).append(score(record))
    best = {}
    for key, tried in scores.items():
        complete = len(tried) == len(GRID[key[0][2]]) and all(len(v) == len(TUNING_SEEDS) for v in tried.values())
        if complete:
            best[key] = min(tried, key=lambda lr: statistics.mean(tried[lr]))
    return best


def execute(wanted: Sequence[Settings], path: Path, data_dir: Path) -> None:
    """Do the runs that the file does not have yet."""
    study = functools.cache(lambda name, smoke: load(name, smoke=smoke, data_dir=data_dir))
    done = {Settings(**record["settings"]).key for record in read(path)}
    todo = [s for s in wanted if s.key not in done]
    for settings in tqdm(todo, desc=f"{len(wanted) - len(todo)} done before", mininterval=5):
        append(path, {"settings": vars(settings), **train(settings, study(settings.problem, settings.smoke))})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tune", "run", "report"])
    parser.add_argument("--out", type=Path, default=RECORDS, help="the folder of records")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="cache of QM9's features")
    parser.add_argument("--problems", nargs="+", choices=list(EPOCHS), default=list(EPOCHS))
    parser.add_argument("--smoke", action="store_true", help="tune: tiny sizes, two rates: does it run?")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for setting in settings_of(args.problems):
        tuned, fresh = (args.out / f"{'-'.join(setting)}-{kind}.jsonl" for kind in ("tune", "run"))
        if args.command == "tune":
            execute(tuning(setting, smoke=args.smoke), tuned, args.data_dir)
        elif args.command == "run":
            rates = chosen_rates(read(tuned))
            wanted = [Settings(*setting, arm, seed, rates[setting, arm])
                      for seed in SEEDS for arm in ARMS if (setting, arm) in rates]  # fmt: skip
            execute(wanted, fresh, args.data_dir)
    if args.command == "report":
        from symmetry_report import report

        print(report(args.out, settings_of(args.problems)))


if __name__ == "__main__":
    main()

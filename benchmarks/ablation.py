"""Does teleporting help training? COST with and without, beside a placebo and a no-move control, paired over seeds.

Every arm of a comparison starts from the same weights and sees the same batches in the same order. One JSON line is
appended for each finished run, keyed on all of its settings, so the command can be stopped and given again.

    python benchmarks/ablation.py rates                  # learning rates, chosen on plain runs and validation data
    python benchmarks/ablation.py run [--seeds 10] [--first-seed 0] [--arms plain cost placebo no-move]
    python benchmarks/ablation.py run --axes             # one part varied at a time, with Adam
    python benchmarks/ablation.py report                 # tables and plot of what is there
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from ablation_arms import ARMS, AXES, MAIN
from ablation_problems import load
from ablation_run import WEIGHTINGS, Settings, code_digest, train, train_single
from tqdm import tqdm

PROBLEMS = ("qm9", "multimnist")
OPTIMIZERS = ("adam", "sgd")
EPOCHS = {"qm9": 6, "multimnist": 6}
RATES_EPOCHS = 8
SMOKE_EPOCHS = 4
BASELINE_SEEDS = (2000, 2001)
RATES_SEED = 1000
GRID = {"adam": (1e-3, 3e-3), "sgd": (1e-3, 3e-3, 1e-2, 3e-2), "single-sgd": (1e-2, 3e-2, 0.1)}
"""Learning rates that ``rates`` tries."""

RATES: dict[tuple[str, str, str], float] = {
    **dict.fromkeys(product(PROBLEMS, ("single", *WEIGHTINGS), ("adam",)), 3e-3),
    **dict.fromkeys(product(("qm9",), WEIGHTINGS, ("sgd",)), 1e-2),
    **dict.fromkeys(product(("multimnist",), WEIGHTINGS, ("sgd",)), 3e-2),
    ("qm9", "single", "sgd"): 3e-2,
    ("multimnist", "single", "sgd"): 0.1,
}
"""What ``rates`` printed: chosen once, on plain runs with a seed of their own, by validation error. Never per arm."""


# ------------------------------------------------------------------------------------------------ records


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a .jsonl or .jsonl.gz file; none if it is not there. Raises ValueError where a line is broken
    (a last line without its end, from a run that was killed while writing, is left out)."""
    if not path.exists():
        return []
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).decode().split("\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: expected a JSON record, got {line[:60]!r}") from error
    return records


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line, after cutting off an unfinished one. Raises ValueError for a compressed file."""
    if path.suffix == ".gz":
        raise ValueError(f"path: expected a .jsonl file to add to, got {path}; decompress it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------ runs


def plan(
    wanted: Sequence[tuple[tuple[str, str, str], Sequence[str]]], seeds: Sequence[int], *, smoke: bool
) -> Iterator[Settings]:
    """The arms of each (problem, weighting, optimizer): baselines first, then seed by seed, so that a stop leaves
    whole seeds."""
    for problem, optimizer in dict.fromkeys((p, o) for (p, _, o), _ in wanted):
        for seed in BASELINE_SEEDS:
            yield configured(problem, "single", optimizer, "plain", seed, smoke=smoke)
    for seed in seeds:
        for setting, arms in wanted:
            for arm in arms:
                yield configured(*setting, arm, seed, smoke=smoke)


def configured(problem: str, weighting: str, optimizer: str, arm: str, seed: int, *, smoke: bool) -> Settings:
    epochs = SMOKE_EPOCHS if smoke else EPOCHS[problem]
    return Settings(problem, weighting, optimizer, arm, seed, RATES[problem, weighting, optimizer], epochs, smoke)


def execute(wanted: Sequence[Settings], path: Path, data_dir: Path) -> None:
    """Do the runs that the file does not have yet."""
    study = functools.cache(lambda name, smoke: load(name, smoke=smoke, data_dir=data_dir))
    done = {Settings(**record["settings"]).key for record in read(path)}
    todo = [s for s in wanted if s.key not in done]
    code = code_digest()
    for settings in tqdm(todo, desc=f"{len(wanted) - len(todo)} done before", mininterval=5):
        run = train_single if settings.weighting == "single" else train
        result = run(settings, study(settings.problem, settings.smoke))
        append(path, {"settings": vars(settings), **result, "code": code})


def rates_plan(smoke: bool) -> list[Settings]:
    wanted = []
    for problem, weighting, optimizer in product(PROBLEMS, ("single", *WEIGHTINGS), OPTIMIZERS):
        single = weighting == "single" and optimizer == "sgd"
        for lr in GRID["single-sgd" if single else optimizer]:
            epochs = SMOKE_EPOCHS if smoke else RATES_EPOCHS
            wanted.append(Settings(problem, weighting, optimizer, "plain", RATES_SEED, lr, epochs, smoke))
    return wanted


def choose_rates(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str], tuple[float, dict[float, float]]]:
    """For each setting the rate with the lowest geometric mean of the validation metrics, and those of all rates
    (infinite where training broke down)."""
    scores: dict[tuple[str, str, str], dict[float, float]] = {}
    for record in records:
        s = Settings(**record["settings"])
        values = record["validation"]
        score = float("inf") if values is None else float(torch.tensor(values).clamp_min(1e-30).log().mean().exp())
        scores.setdefault((s.problem, s.weighting, s.optimizer), {})[s.lr] = score
    return {setting: (min(tried, key=tried.__getitem__), tried) for setting, tried in scores.items()}


# ------------------------------------------------------------------------------------------------ command


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["rates", "run", "report"])
    parser.add_argument("--out", type=Path, default=Path("runs/ablation.jsonl"), help="the file of records")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="cache of QM9's features")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(MAIN))
    parser.add_argument("--axes", action="store_true", help="all other arms, with Adam")
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--weightings", nargs="+", choices=list(WEIGHTINGS), default=list(WEIGHTINGS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--plot", type=Path, help="report: write a PNG")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.command == "rates":
        execute(rates_plan(args.smoke), args.out, args.data_dir)
        for setting, (best, tried) in choose_rates(read(args.out)).items():
            print(f"    {setting}: {best},  # " + ", ".join(f"{lr:g}: {score:.4g}" for lr, score in tried.items()))
    elif args.command == "run":
        settings = list(product(args.problems, args.weightings, args.optimizers))
        arms = dict(AXES) if args.axes else dict.fromkeys(settings, args.arms)
        chosen = [(setting, arms[setting]) for setting in settings if setting in arms]
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        execute(list(plan(chosen, seeds, smoke=args.smoke)), args.out, args.data_dir)
    else:
        from ablation_report import report

        print(report(read(args.out), args.plot))


if __name__ == "__main__":
    main()

"""How long should the combined gradient be, so that the learning rate of the plain sum keeps working?

Each rule of ``default_scale_rules.py`` is put behind a weighting and trained at the plain sum's own best rate, and at a
third and three times of it, from the same weights and with the same batches as the sum. docs/default_scale.md has the
answer. One JSON line is appended for each finished run, keyed on all of its settings, so the command can be stopped and
given again.

    python benchmarks/default_scale.py rates      # the plain sum's rates, on seeds of their own, by validation loss
    python benchmarks/default_scale.py run        # all runs
    python benchmarks/default_scale.py report     # the tables, from the records in benchmarks/results/default_scale
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from ablation import append, read
from ablation_problems import Study
from ablation_run import base_optimizer
from default_scale_problems import NAMES, load, metrics
from default_scale_rules import RULES, scaled
from torch import Tensor
from tqdm import tqdm

import cost_mtl

RECORDS = Path(__file__).parent / "results" / "default_scale"
OPTIMIZERS = ("sgd", "adam")
STEPS = {"qm9": 150, "multimnist": 100, "yeast": 200, "rare": 200, "rooms": 50}
SEEDS = range(4)
RATES_SEEDS = (1000, 1001)
GRID = {"sgd": (3e-3, 1e-2, 3e-2, 0.1, 0.3), "adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)}
"""Learning rates that ``rates`` tries."""

RATES: dict[tuple[str, str], float] = {
    ("qm9", "sgd"): 0.01,
    ("qm9", "adam"): 0.003,
    ("multimnist", "sgd"): 0.03,
    ("multimnist", "adam"): 0.003,
    ("yeast", "sgd"): 0.01,
    ("yeast", "adam"): 0.001,
    ("rare", "sgd"): 0.01,
    ("rare", "adam"): 0.001,
    ("rooms", "sgd"): 0.1,
    ("rooms", "adam"): 0.03,
}
"""What ``rates`` printed."""

SHORTLIST = ("raw", "clip1", "total_clip", "match", "project")
"""Rules that FairGrad is tried with on all seeds."""

MARGINS = ("clip1", "match", "project")
"""Rules that FairGrad is tried with at a third and three times of the sum's rate."""

COMPARED = ("raw", "match", "project")
"""Rules that every other weighting is tried with."""


def _upgrad() -> Any:
    from torchjd.aggregation import UPGradWeighting

    return UPGradWeighting()


WEIGHTINGS: dict[str, Callable[[], Any]] = {
    "sum": cost_mtl.EqualWeighting,
    "fairgrad": lambda: cost_mtl.FairGrad(alpha=2.0),
    "nashmtl": cost_mtl.NashMTL,
    "cagrad": cost_mtl.CAGrad,
    "imtlg": cost_mtl.IMTLG,
    "mgda": cost_mtl.MGDA,
    "famo": cost_mtl.FAMO,
    "upgrad": _upgrad,
}
"""With their default settings; ``raw`` leaves each at its own default scale."""


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on but the code; its JSON form is the key of the record.

    Attributes:
        rule: a key of ``default_scale_rules.RULES``.
        seed: of the initial weights and the order of the batches.
        lr: constant.
    """

    problem: str
    optimizer: str
    weighting: str
    rule: str
    seed: int
    lr: float
    steps: int
    smoke: bool = False

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


# ------------------------------------------------------------------------------------------------ one run


def train(settings: Settings, study: Study) -> dict[str, Any]:
    """One run without teleports, every task's own parameters on their own loss.

    Returns:
        ``first``: mean loss over the tasks in the first step; ``loss`` [K]: training losses, mean over the last fifth
        of the steps; ``validation``: mean loss on the validation data, in evaluation mode; ``test`` [K]: metrics (the
        three are None where training broke down); ``ratio``: least, median and largest ||d|| / ||g_sum||.
    """
    problem = study.problem
    model = problem.model(settings.seed)
    weighting = scaled(WEIGHTINGS[settings.weighting](), settings.rule)
    optimizer = cost_mtl.COST(
        base_optimizer(settings.optimizer, model.parameters(), settings.lr),
        model, shared=model.trunk, weighting=weighting, trigger=None, teleporter=None,
    )  # fmt: skip
    stream = problem.batches(settings.seed)
    losses: list[Tensor] = []
    try:
        for _ in range(settings.steps):
            losses.append(optimizer.step(problem.losses, model, *next(stream)))
        loss: list[float] | None = torch.stack(losses[-max(1, settings.steps // 5) :]).mean(dim=0).tolist()
    except FloatingPointError:
        loss = None
    broken = loss is None or not all(map(math.isfinite, loss))
    finite = [r for r in weighting.ratios if math.isfinite(r)]
    return {
        "first": _short(losses[0].mean().item()),
        "loss": None if broken or loss is None else [_short(v) for v in loss],
        "validation": None if broken else _validation(study, model),
        "test": None if broken else [_short(v) for v in metrics(problem, model, study.problem.test)],
        "ratio": [_short(f(finite)) for f in (min, statistics.median, max)],
    }


def _validation(study: Study, model: torch.nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        losses = study.problem.losses(model, *study.validation)
    model.train()
    return _short(statistics.mean(float(v) for v in losses.values()))


def _short(value: float) -> float:
    return float(f"{value:.4g}")


# ------------------------------------------------------------------------------------------------ which runs


def rates_plan(problems: Sequence[str], *, smoke: bool) -> Iterator[Settings]:
    for problem, optimizer in product(problems, OPTIMIZERS):
        for lr, seed in product(GRID[optimizer], RATES_SEEDS):
            yield Settings(problem, optimizer, "sum", "raw", seed, lr, 4 if smoke else STEPS[problem], smoke)


def choose_rates(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, dict[float, float]]]:
    """For each (problem, optimizer) the rate with the lowest validation loss, mean over the seeds, and those of all
    rates (infinite where training broke down)."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for record in records:
        s = Settings(**record["settings"])
        if s.weighting == "sum" and s.seed in RATES_SEEDS:
            value = record["validation"]
            tried = found.setdefault((s.problem, s.optimizer), {})
            tried.setdefault(s.lr, []).append(math.inf if value is None else value)
    means = {key: {lr: statistics.mean(v) for lr, v in tried.items()} for key, tried in found.items()}
    return {key: (min(tried, key=tried.__getitem__), tried) for key, tried in means.items()}


def plan(problems: Sequence[str], *, smoke: bool) -> Iterator[Settings]:
    """FairGrad with every rule at the sum's rate; the other weightings; more seeds for the promising rules; those at a
    third and three times of the rate. Each part goes seed by seed, so that a stop leaves whole seeds."""
    every, shortlist, margins = (
        [("sum", "raw"), *(("fairgrad", rule) for rule in rules)] for rules in (RULES, SHORTLIST, MARGINS)
    )
    others = [(w, rule) for w in WEIGHTINGS if w not in ("sum", "fairgrad") for rule in COMPARED]
    fewer = [problem for problem in problems if problem != "yeast"]  # "rare" is of the same kind
    parts = (
        (SEEDS[:2], problems, OPTIMIZERS, every, (1.0,)),
        (SEEDS[:1], fewer, OPTIMIZERS, others, (1.0,)),
        (SEEDS[:3], problems, OPTIMIZERS, shortlist, (1.0,)),
        (SEEDS[:1], problems, OPTIMIZERS, margins, (1 / 3, 3.0)),
        (SEEDS[:2], fewer, ("sgd",), others, (1.0,)),
        (SEEDS, problems, OPTIMIZERS, shortlist, (1.0,)),
    )
    seen = set()
    for seeds, names, optimizers, arms, factors in parts:
        for seed, problem, optimizer, (weighting, rule), factor in product(seeds, names, optimizers, arms, factors):
            lr, steps = _short(RATES[problem, optimizer] * factor), 4 if smoke else STEPS[problem]
            settings = Settings(problem, optimizer, weighting, rule, seed, lr, steps, smoke)
            if settings not in seen:
                seen.add(settings)
                yield settings


def execute(wanted: Sequence[Settings], path: Path, data_dir: Path) -> None:
    """Do the runs that the file does not have yet."""
    study = functools.cache(lambda name, smoke: load(name, smoke=smoke, data_dir=data_dir))
    done = {Settings(**record["settings"]).key for record in read(path)}
    todo = [s for s in wanted if s.key not in done]
    for settings in tqdm(todo, desc=f"{len(wanted) - len(todo)} done before", mininterval=5):
        append(path, {"settings": asdict(settings), **train(settings, study(settings.problem, settings.smoke))})


# ------------------------------------------------------------------------------------------------ command


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["rates", "run", "report"])
    parser.add_argument("--out", type=Path, default=Path("runs/default_scale.jsonl"), help="the file of new records")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="cache of QM9's features and of the rooms")
    parser.add_argument("--problems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--records", type=Path, nargs="+", help="report: files of records, default: the committed ones")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if args.command == "rates":
        execute(list(rates_plan(args.problems, smoke=args.smoke)), args.out, args.data_dir)
        for setting, (best, tried) in choose_rates(read(args.out)).items():
            print(f"    {setting}: {best},  # " + ", ".join(f"{lr:g}: {score:.4g}" for lr, score in tried.items()))
    elif args.command == "run":
        execute(list(plan(args.problems, smoke=args.smoke)), args.out, args.data_dir)
    else:
        from default_scale_report import report

        paths = args.records or sorted(RECORDS.glob("*.jsonl.gz"))
        print(report([record for path in paths for record in read(path)]))


if __name__ == "__main__":
    main()

"""The command line that all four scripts share, and what happens between parsing it and the last table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dense.engine.loop import run_row
from dense.engine.methods import STL, WORDS, Row, parse_rows
from dense.engine.plots import plot_metrics
from dense.engine.problem import EpochRow, Problem
from dense.engine.published import PublishedTable
from dense.engine.recorder import read_log
from dense.engine.settings import TrainSettings, check_device
from dense.engine.tables import Result, Table, build_table
from dense.errors import UserError

__all__ = ["Defaults", "Report", "add_training_arguments", "at_least", "run_all", "run_folder", "settings_from"]

_Flag = argparse.BooleanOptionalAction


@dataclass(frozen=True)
class Defaults:
    """What a data set's recipe fixes, and what its smoke size puts in its place."""

    epochs: int
    lr: float
    batch_size: int
    cost_start: int
    smoke_epochs: int = 2
    smoke_batch_size: int = 4
    smoke_lr: float = 3e-3
    trigger: str = "any"


def at_least(low: int, option: str) -> Callable[[str], int]:
    """An argparse type: a whole number of at least ``low``; ``option`` is named where it is not."""

    def whole_number(text: str) -> int:
        value = int(text)  # argparse's own message where this fails
        if value < low:
            raise UserError(f"{option}: expected at least {low}, got {value}")
        return value

    return whole_number


def add_training_arguments(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
    """Add the method, recipe, machine and output options."""
    words = ", ".join((STL, *WORDS))
    what = parser.add_argument_group("what to train")
    what.add_argument(
        "--preset", nargs="+", metavar="ROW", default=[],
        help="methods as the published scripts run them: stl, ls, cagrad, nashmtl, fairgrad; '+cost' adds teleports",
    )  # fmt: skip
    what.add_argument(
        "--method", nargs="+", metavar="ROW", default=[], help=f"methods with cost_mtl's defaults: {words}; '+cost' too"
    )
    what.add_argument("--cost", action=_Flag, default=None, help="teleports on (off) in every multi-task row")
    what.add_argument("--seeds", nargs="+", type=at_least(0, "--seeds"), default=[0], metavar="N")
    what.add_argument("--smoke", action=_Flag, default=False, help="a tiny network and few tiny images: seconds")
    recipe = parser.add_argument_group("recipe (the defaults are the published ones)")
    recipe.add_argument("--epochs", type=at_least(1, "--epochs"), default=None, help=f"default {defaults.epochs}")
    recipe.add_argument("--lr", type=float, default=None, help=f"of Adam; default {defaults.lr:g}")
    recipe.add_argument(
        "--batch-size", type=at_least(1, "--batch-size"), default=None, help=f"default {defaults.batch_size}"
    )
    recipe.add_argument(
        "--cost-start", type=at_least(0, "--cost-start"), default=None, metavar="EPOCHS",
        help=f"epochs before the first teleport; default {defaults.cost_start} of {defaults.epochs}, in proportion",
    )  # fmt: skip
    recipe.add_argument(
        "--cost-cooldown", type=at_least(1, "--cost-cooldown"), default=1, metavar="EPOCHS",
        help="between teleports (default 1)",
    )  # fmt: skip
    recipe.add_argument(
        "--trigger", choices=("any", "smallest", "weak", "share", "always"), default=None,
        help=f"conflict that a teleport waits for; default {defaults.trigger}, always for --smoke",
    )  # fmt: skip
    recipe.add_argument(
        "--teleporter", choices=("lora", "dense", "difference"), default=None,
        help="default lora; dense for --smoke, since importing PEFT takes longer than all the rest of it",
    )  # fmt: skip
    recipe.add_argument("--rank", type=at_least(1, "--rank"), default=5, help="of the LoRA adapter (default 5)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    machine.add_argument(
        "--workers", type=at_least(0, "--workers"), default=2, help="loader processes (default %(default)s)"
    )
    machine.add_argument(
        "--threads", type=at_least(1, "--threads"), default=None, help="CPU threads (default: torch's; 1 for --smoke)"
    )
    machine.add_argument("--amp", choices=("off", "bf16", "fp16"), default="off", help="mixed precision (default off)")
    machine.add_argument("--compile", action=_Flag, default=False, help="torch.compile the forward pass")
    machine.add_argument("--deterministic", action=_Flag, default=False, help="deterministic CUDA kernels, slower")
    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=None, help="folder of checkpoints, logs, tables and plots")
    output.add_argument("--resume", action=_Flag, default=True, help="go on from the checkpoints in --out")
    output.add_argument(
        "--eval-every", type=at_least(1, "--eval-every"), default=1, metavar="EPOCHS", help="and always in the last ten"
    )
    output.add_argument("--tensorboard", action=_Flag, default=False)


def settings_from(args: argparse.Namespace, defaults: Defaults, seed: int) -> TrainSettings:
    """The settings of one seed.

    Raises:
        UserError: for values that make no sense together.
    """
    epochs = args.epochs if args.epochs is not None else defaults.smoke_epochs if args.smoke else defaults.epochs
    start = args.cost_start if args.cost_start is not None else epochs * defaults.cost_start // defaults.epochs
    return TrainSettings(
        epochs=epochs,
        lr=args.lr if args.lr is not None else defaults.smoke_lr if args.smoke else defaults.lr,
        seed=seed,
        device=check_device(args.device),
        amp=args.amp,
        compile=args.compile,
        deterministic=args.deterministic,
        eval_every=args.eval_every,
        cost_start=start,
        cost_cooldown=args.cost_cooldown,
        trigger=args.trigger or ("always" if args.smoke else defaults.trigger),
        teleporter=args.teleporter or ("dense" if args.smoke else "lora"),
        rank=args.rank,
        tensorboard=args.tensorboard,
        resume=args.resume,
    )


@dataclass(frozen=True)
class Report:
    """How the table and the plot are made.

    Attributes:
        split: whose metrics are plotted.
        published: rows beside the own ones.
        comparable: the data are the papers'.
        caption: lines above the table.
        extra: rows that are not trained (constant predictors).
    """

    split: str
    published: PublishedTable | None
    comparable: bool
    caption: tuple[str, ...] = ()
    extra: tuple[Result, ...] = ()


def run_all(
    args: argparse.Namespace,
    problem: Problem,
    defaults: Defaults,
    report: Report,
    identity: Mapping[str, Any],
    out: Path,
    default_rows: Sequence[str],
) -> list[Row]:
    """Train every row and seed, then write ``table.md``, ``table.csv``, ``results.json`` and ``metrics.png``.

    After each row the table is written anew: an interrupted set leaves the table of what is done.
    """
    if threads := args.threads or (1 if args.smoke else None):
        torch.set_num_threads(threads)  # tiny tensors: a second thread costs more than it brings
    presets = args.preset or ([] if args.method else list(default_rows))
    rows = parse_rows(presets, args.method, args.cost)
    results: list[Result] = []
    for number, row in enumerate(rows):
        seeds = {}
        for seed in args.seeds:
            settings = settings_from(args, defaults, seed)
            place = f"[row {number + 1}/{len(rows)}] "
            seeds[seed] = run_row(problem, row, settings, run_folder(out, row, seed), identity, place)
        histories = _histories(out, row, args.seeds, problem.tasks)
        results.append(Result(row.label, seeds, "stl" if row.word == STL else "mtl", _teleports(row, histories)))
        table = build_table(
            problem.metrics,
            [*report.extra, *results],
            shown=problem.shown,
            published=report.published,
            comparable=report.comparable,
            caption=report.caption,
        )
        write_table(out, table, results)
    print((out / "table.md").read_text().split("\n\nPublished rows")[0])
    lines = {result.label: _means(result, problem) for result in (*report.extra, *results) if result.kind != "mtl"}
    curves = {row.label: _histories(out, row, args.seeds, problem.tasks) for row in rows if row.word != STL}
    if curves:
        plot_metrics(out / "metrics.png", curves, problem.shown, report.split, lines=lines, title=report.caption[0])
    print(f"wrote {out}/table.md, table.csv, results.json" + (", metrics.png" if curves else ""))
    return rows


def run_folder(out: Path, row: Row, seed: int) -> Path:
    """Checkpoints and log of one row and seed."""
    return out / row.key / f"seed{seed}"


def write_table(out: Path, table: Table, results: Sequence[Result]) -> None:
    """Markdown, CSV, and every seed's numbers as JSON."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(table.markdown())
    (out / "table.csv").write_text(table.csv())
    plain = {
        result.label: {
            str(seed): {name: None if value != value else value for name, value in metrics.items()}
            for seed, metrics in result.seeds.items()
        }
        for result in results
    }
    (out / "results.json").write_text(json.dumps(plain, indent=1))


def _histories(out: Path, row: Row, seeds: Sequence[int], tasks: Sequence[str]) -> list[list[EpochRow]]:
    folders = [run_folder(out, row, seed) for seed in seeds]
    if row.word == STL:
        folders = [folder / task for folder in folders for task in tasks]
    return [read_log(folder / "log.jsonl") for folder in folders]


def _teleports(row: Row, histories: Sequence[Sequence[EpochRow]]) -> tuple[int, int] | None:
    if not row.cost:
        return None
    attempts = [teleport for history in histories for epoch in history for teleport in epoch.teleports]
    return sum(bool(teleport["accepted"]) for teleport in attempts), len(attempts)


def _means(result: Result, problem: Problem) -> dict[str, float]:
    return {metric.name: sum(result.values(metric.name)) / len(result.seeds) for metric in problem.shown}

"""Eleven properties of real molecules (QM9) from one network, with and without COST's teleports.

    python examples/qm9.py                                  # FairGrad, FairGrad + COST, single-task nets
    python examples/qm9.py --method ls cagrad nashmtl fairgrad --seeds 5
    python examples/qm9.py --no-cost --method nashmtl --seeds 3,4 --epochs 50

A subset of 6,000 molecules out of the package ``qm9pack`` (nothing is downloaded), 140 geometric features, an MLP
trunk 140-128-128-64 with eleven linear heads, Adam 1e-3 halved midway. Table (Markdown, CSV, JSON) and plot go to
``--out``. Ctrl-C prints the table of what is done; the same command again goes on where it was.

Reported are the mean absolute errors on the test molecules, averaged over the last five epochs, and Delta_m against
single-task networks of the same seed. Nothing was chosen on test molecules.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from qm9_data import TARGETS, DataSettings, load
from qm9_train import METHODS, RunSettings, execute
from reporting import Curves, Jump, Table, delta_m, mean_and_error, plot_training, save_table, with_error
from run_pool import run_all

LAST = 5  # epochs that a result is the mean of: single epochs are noisy
Result = dict[str, Any]


def parse_seeds(text: str) -> tuple[int, ...]:
    """ "3" -> 0, 1, 2; "4,7" or "4," -> just these."""
    try:
        listed = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        listed = []
    seeds = listed if "," in text else range(listed[0] if listed else 0)
    if not seeds or min(seeds) < 0:
        raise argparse.ArgumentTypeError(f"expected a count such as 3 or a list such as 0,4,7, got {text!r}")
    return tuple(dict.fromkeys(seeds))


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--method", nargs="+", choices=METHODS, default=["fairgrad"], help="weightings (default: fairgrad)")
    add(
        "--cost",
        action=argparse.BooleanOptionalAction,
        help="only with teleports, or only without (default: a row for each)",
    )
    add("--stl", action=argparse.BooleanOptionalAction, default=True, help="single-task networks, which Delta_m needs")
    add("--seeds", type=parse_seeds, default=(0, 1), help="a count, or a list such as 0,4,7 (default: 2)")
    add("--epochs", type=positive, default=25, help="default: 25")
    add("--molecules", type=positive, default=6000, help="default: 6000, of 130,831")
    add("--jobs", type=positive, default=os.cpu_count() or 1, help="runs at a time (default: one per core)")
    add("--data-dir", type=Path, default=Path("data"), help="cache of the features (default: ./data)")
    add("--out", type=Path, default=Path("runs/qm9"), help="results (default: ./runs/qm9)")
    add("--smoke", action="store_true", help="a few seconds to see that all of it works: 200 molecules, 2 epochs")
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> list[RunSettings]:
    """The runs, seed by seed, so that an interrupted command has whole seeds to show."""
    teleports = (False, True) if options.cost is None else (options.cost,)
    common: dict[str, Any] = {"epochs": options.epochs, "data": DataSettings(molecules=options.molecules)}
    if options.smoke:
        common = {"epochs": 2, "data": DataSettings(molecules=200), "batch": 25}
    runs = []
    for seed in options.seeds[:1] if options.smoke else options.seeds:
        if options.stl:
            runs.append(RunSettings("stl", False, seed, **common))
        runs += [RunSettings(method, cost, seed, **common) for method in options.method for cost in teleports]
    return runs


# ------------------------------------------------------------------------------------------------ results


def final_errors(result: Result, part: str = "test") -> np.ndarray:
    """[K] mean absolute errors, mean of the last epochs."""
    return np.mean(result[f"{part}_mae"][-LAST:], axis=0)


def delta(result: Result, results: Sequence[Result], part: str = "test") -> float | None:
    """Delta_m against the single-task networks of the same seed; None while there are none."""
    seed = result["settings"]["seed"]
    for other in results:
        if other["label"] == "STL" and other["settings"]["seed"] == seed:
            return delta_m(final_errors(result, part), final_errors(other, part))
    return None


def deltas(label: str, results: Sequence[Result], part: str = "test") -> dict[int, float]:
    """Delta_m of each seed of one row of the table."""
    pairs = {r["settings"]["seed"]: delta(r, results, part) for r in results if r["label"] == label}
    return {seed: value for seed, value in pairs.items() if value is not None}


def row(label: str, results: Sequence[Result]) -> list[str]:
    """One row of the table: means over the seeds."""
    mine = [result for result in results if result["label"] == label]
    errors = np.mean([final_errors(result) for result in mine], axis=0)
    cells = [f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in errors]
    seconds = f"{np.mean([result['seconds'] for result in mine]):.0f}"
    if label == "STL":
        return [label, str(len(mine)), *cells, "0", "-", "-", seconds]
    conflicts = np.mean([np.mean(np.array(result["min_cosine"]) < 0) for result in mine])
    tried = np.mean([len(result["teleports"]) for result in mine])
    accepted = np.mean([sum(teleport["accepted"] for teleport in result["teleports"]) for result in mine])
    change = with_error(list(deltas(label, results).values()))
    return [label, str(len(mine)), *cells, change, f"{conflicts:.1%}", f"{tried:.1f} / {accepted:.1f}", seconds]


def make_table(results: Sequence[Result]) -> Table:
    """A row for each method, in the order of the runs."""
    tasks = [f"{target.name} {target.unit}" for target in TARGETS]
    header = ["method", "seeds", *tasks, "Δm %", "conflicts", "teleports tried / accepted", "seconds"]
    return Table(header, [row(label, results) for label in dict.fromkeys(result["label"] for result in results)])


def comparisons(results: Sequence[Result]) -> list[str]:
    """One sentence for each method that ran with and without COST: the paired difference of Delta_m."""
    lines = []
    for method in METHODS.values():
        without, teleported = deltas(method.label, results), deltas(f"{method.label} + COST", results)
        pairs = [teleported[seed] - without[seed] for seed in without if seed in teleported]
        if pairs:
            lines.append(
                f"{method.label}: COST changes Δm by {with_error(pairs, 2)} points "
                f"(above 0 is worse; paired, n = {len(pairs)})."
            )
    if lines and len({result["settings"]["seed"] for result in results}) < 10:
        lines.append("Single runs differ by 1 to 2 points: ten seeds or more tell a gain from chance (--seeds 10).")
    return lines


def details(results: Sequence[Result]) -> Result:
    """The numbers behind the table, for a program to read."""
    rows = {}
    for label in dict.fromkeys(result["label"] for result in results):
        mine = [result for result in results if result["label"] == label]
        test, val = deltas(label, results), deltas(label, results, "val")
        mean, error = mean_and_error(list(test.values())) if test else (None, None)
        rows[label] = {
            "delta_m": {"mean": mean, "standard_error": None if error is None or math.isnan(error) else error},
            "delta_m_per_seed": test,
            "delta_m_validation_per_seed": val,
            "mae_per_seed": {result["settings"]["seed"]: final_errors(result).tolist() for result in mine},
            "teleports_per_seed": {result["settings"]["seed"]: result["teleports"] for result in mine},
            "seconds_per_seed": {result["settings"]["seed"]: result["seconds"] for result in mine},
        }
    tasks = [{"name": target.name, "unit": target.unit} for target in TARGETS]
    return {"tasks": tasks, "mean_of_last_epochs": LAST, "rows": rows}


def curves(results: Sequence[Result]) -> list[Curves]:
    """The multi-task runs for the plot; the last one, shown in detail, is one with teleports if there is one."""
    runs = [
        Curves(
            result["label"],
            np.array(result["train_loss"]),
            np.array(result["min_cosine"]),
            [Jump(t["step"], t["accepted"], t["min_cosine_before"]) for t in result["teleports"]],
        )
        for result in results
        if result["label"] != "STL"
    ]
    return sorted(runs, key=lambda run: "COST" in run.label)


def report(results: Sequence[Result], folder: Path, molecules: int) -> None:
    """Print and save the table, its numbers and the plot."""
    table = make_table(results)
    save_table(folder / "results", table, details(results))
    print(
        f"\nMean absolute errors on the test molecules (mean of the last {LAST} epochs). Δm: mean relative change "
        "against STL, a network for each task; lower is better, above 0 is worse than apart. Teleports: mean a run.\n"
    )
    print(table.markdown())
    for sentence in comparisons(results):
        print(sentence)
    names = ["results.md", "results.csv", "results.json"]
    runs = curves(results)
    if runs:
        title = f"QM9, {molecules:,} molecules, {len(TARGETS)} tasks"
        plot_training(folder / "training.png", title, runs, [target.name for target in TARGETS], "training loss")
        names.append("training.png")
    print("saved:", *(str(folder / name) for name in names))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 130 after a Ctrl-C, as the shell expects."""
    options = parse_arguments(arguments)
    try:
        runs = plan(options)
        load(runs[0].data, options.data_dir)  # here once, so that the processes find them in the cache
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    folder = options.out / "smoke" if options.smoke else options.out
    print(
        f"{len(runs)} runs of {runs[0].epochs} epochs on {runs[0].data.molecules:,} molecules, {options.jobs} at a time"
    )
    train = partial(execute, folders=(options.data_dir, folder / "runs"))
    outcome = run_all(runs, train, sum(run.epochs for run in runs), options.jobs)
    finished = [result for result in outcome.results if result is not None]
    if finished:
        report(finished, folder, runs[0].data.molecules)
    else:
        print("No run is finished yet.")
    return 130 if outcome.stopped else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Merging on real data: digits under six fixed image transforms, one task each.

A small network is pre-trained on a few images of all tasks, fine-tuned on each task alone, and merged by every method
of ``cost_mtl.merging``. Each method stands beside its controls: the same number of epochs without the iteration, random
directions of matched length, the individually fine-tuned models, one model trained on all tasks, and all weights of the
merge tuned on the data that the merges get for their coefficients. Coefficients are fitted on the ``fit`` images,
chosen on the ``selection`` images, and reported on ``test`` images that nothing else sees.

    python examples/merge_digits.py                      # six seeds, into runs/merge_digits
    python examples/merge_digits.py --data mnist --seeds 10
    python examples/merge_digits.py --smoke              # tiny, to see that it runs

Writes table.md, table.csv, table.json and iterations.png. Finished seeds are kept in the output folder and not run
again; after Ctrl-C the table is made of those that are done.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from merge_digits_data import (
    ALL,
    HEAD,
    SMOKE,
    TASKS,
    Batch,
    Loss,
    Sizes,
    accuracies,
    batches,
    logits_of,
    loss_on,
    network,
    split,
    train_weights,
    tune_all_weights,
)
from merge_digits_report import ROWS, plot, table
from reporting import save_table, write_whole
from run_pool import run_all
from torch import Tensor, nn

from cost_mtl.merging import (
    DVBASI,
    AnisotropicScaling,
    FitSettings,
    RankPruning,
    TaskVector,
    breadcrumbs,
    combine,
    dare,
    entropy,
    search_scale,
    ties,
)


@dataclass(frozen=True)
class Run:
    """One seed."""

    sizes: Sizes
    seed: int
    folder: Path

    @property
    def file(self) -> Path:
        """Where its results are kept: another size is another run."""
        key = json.dumps([dataclasses.asdict(self.sizes), ROWS, self.seed])
        return self.folder / "seeds" / f"{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


class InterruptedRunError(Exception):
    """Ctrl-C was pressed."""


# ------------------------------------------------------------------------------------------------ one seed


class Experiment:
    """The models, the data and the results of one seed, collected as the methods run."""

    def __init__(self, run: Run, report: Callable[[str], None]) -> None:
        self.sizes, self.seed, self.report = run.sizes, run.seed, report
        torch.manual_seed(run.seed)
        self.data = split(run.sizes, run.seed)
        self.fit_batches = batches(self.data["fit"], 50, run.seed)
        self.held_out = [self.data["selection"]]
        self.settings = FitSettings(max_epochs=run.sizes.max_epochs)
        self.rows: dict[str, list[float]] = {}
        self.curves: dict[str, list[float]] = {}
        self.epochs: dict[str, int] = {}
        self.selection: dict[str, list[float]] = {}

    def add(self, name: str, model: nn.Module) -> None:
        self.rows[name] = accuracies(model, self.data["test"])
        self.report(name)

    def mean_accuracy(self, model: nn.Module) -> float:
        return float(np.mean(accuracies(model, self.data["test"])))

    def fit(self, merged: AnisotropicScaling | RankPruning, loss: Loss, settings: FitSettings | None = None) -> int:
        return merged.fit(loss, self.fit_batches, self.held_out, settings=settings or self.settings).epochs

    def run(self) -> dict[str, Any]:
        """All methods."""
        began = time.perf_counter()
        sizes, every = self.sizes, range(len(TASKS))
        model = network(self.data["test"][0].shape[-1], sizes.width)
        base = train_weights(model, self.data["pretrain"], every, sizes.pretrain_epochs, head=True, seed=self.seed)
        self.add("pre-trained", base)

        def tune(tasks: Iterable[int]) -> nn.Module:
            return train_weights(base, self.data["finetune"], tasks, sizes.finetune_epochs, head=False, seed=self.seed)

        tuned = [tune([task]) for task in every]
        self.rows["individually fine-tuned"] = [self.own_accuracy(model, task) for task, model in enumerate(tuned)]
        self.report("individually fine-tuned")
        self.add("trained on all tasks jointly", tune(every))
        vectors = [TaskVector(base, model, exclude=HEAD) for model in tuned]
        arithmetic = self.fixed_merges(base, vectors)
        whole = tune_all_weights(arithmetic, self.data["fit"], self.data["selection"], sizes.max_epochs, self.seed)
        self.add("task arithmetic, all weights tuned", whole)
        scaling = self.learned_merges(base, vectors)
        one_shot = AnisotropicScaling(base, [TaskVector(base, arithmetic, exclude=HEAD)], init=1.0)
        self.continued(base, arithmetic, "task arithmetic", one_shot, earlier=tuned)
        self.continued(base, scaling.merged_model(), "anisotropic scaling", scaling, earlier=[arithmetic])
        self.single_task(base, tuned)
        return {
            "seed": self.seed,
            "accuracy": self.rows,
            "curves": self.curves,
            "epochs": self.epochs,
            "selection_loss": self.selection,
            "seconds": time.perf_counter() - began,
        }

    def own_accuracy(self, model: nn.Module, task: int) -> float:
        return accuracies(model, self.data["test"])[task]

    def fixed_merges(self, base: nn.Module, vectors: list[TaskVector]) -> nn.Module:
        """The methods with one scale, chosen on the selection images. Returns task arithmetic's merge."""

        def best(merged: TaskVector, largest: float = 1.0) -> nn.Module:
            grid = [largest * step / 20 for step in range(21)]
            with torch.no_grad():
                found = search_scale(base, [merged], lambda model: -float(ALL(model, self.data["selection"])), grid)
            return merged.apply_to(base, found.scale)

        ones = [1.0] * len(vectors)
        self.add("weight average", combine(vectors, ones).apply_to(base, 1 / len(vectors)))
        self.add("TIES", best(ties(vectors, 0.3), 4.0))  # a mean over tasks, so that it wants larger scales than a sum
        self.add("DARE", best(combine([dare(tau, 0.3, 100 * self.seed + i) for i, tau in enumerate(vectors)], ones)))
        self.add("Breadcrumbs", best(combine([breadcrumbs(tau, 0.5) for tau in vectors], ones), 2.0))
        arithmetic = best(combine(vectors, ones))
        self.add("task arithmetic", arithmetic)
        return arithmetic

    def learned_merges(self, base: nn.Module, vectors: list[TaskVector]) -> AnisotropicScaling:
        for name, loss in (("rank pruning, entropy", entropy_loss), ("rank pruning, supervised", ALL)):
            pruned = RankPruning(base, vectors)
            self.fit(pruned, loss)
            self.add(name, pruned.merged_model())
        unsupervised = AnisotropicScaling(base, vectors, init=0.3)
        self.fit(unsupervised, entropy_loss)
        self.add("anisotropic scaling, entropy", unsupervised.merged_model())
        scaling = AnisotropicScaling(base, vectors)
        self.epochs["anisotropic scaling"] = self.fit(scaling, ALL, FitSettings(max_epochs=self.sizes.scaling_epochs))
        self.add("anisotropic scaling", scaling.merged_model())
        return scaling

    def continued(
        self, base: nn.Module, start: nn.Module, name: str, control: AnisotropicScaling, earlier: Sequence[nn.Module]
    ) -> None:
        """DV-BASI from a merge, its other directions, and as many epochs of the control without the iteration."""
        self.iterate(base, start, f"{name} + DV-BASI", "difference")
        self.iterate(base, start, f"{name} + DV-BASI, random directions", "random_matched")
        self.iterate(base, start, f"{name} + DV-BASI, history", "history")
        self.iterate(base, start, f"{name} + DV-BASI, history with earlier points", "history", earlier=earlier)
        self.iterate(base, start, f"{name} + DV-BASI, entropy alone", "difference", entropy_loss)
        epochs = self.epochs[f"{name} + DV-BASI"]
        self.fit(control, ALL, FitSettings(max_epochs=epochs, patience=max(epochs, 1)))
        self.add(f"{name} + equal epochs without DV-BASI", control.merged_model())

    def iterate(
        self,
        base: nn.Module,
        start: nn.Module,
        name: str,
        direction: Any,
        loss: Loss = ALL,
        earlier: Sequence[nn.Module] = (),
    ) -> None:
        curve = [self.mean_accuracy(start)]
        result = DVBASI(self.sizes.iterations, direction, fit=self.settings, seed=self.seed).run(
            start,
            base,
            loss,
            self.fit_batches,
            self.held_out,
            history=earlier,
            exclude=HEAD,
            on_iteration=lambda _, model: curve.append(self.mean_accuracy(model)),
        )
        self.curves[name] = curve + curve[-1:] * (self.sizes.iterations + 1 - len(curve))
        self.epochs[name] = result.epochs
        self.selection[name] = [result.iterations[0].before, result.iterations[-1].after]
        self.add(name, result.model)

    def single_task(self, base: nn.Module, tuned: Sequence[nn.Module]) -> None:
        """DV-BASI on each fine-tuned model, with its own task's data."""
        dvbasi, row = DVBASI(self.sizes.iterations, fit=self.settings), []
        for task, model in enumerate(tuned):
            result = dvbasi.run(model, base, loss_on([task]), self.fit_batches, self.held_out, exclude=HEAD)
            row.append(self.own_accuracy(result.model, task))
        self.rows["individually fine-tuned + DV-BASI"] = row
        self.report("individually fine-tuned + DV-BASI")


def entropy_loss(model: nn.Module, batch: Batch) -> Tensor:
    return entropy(logits_of(model, batch[0], range(len(TASKS))))


def execute(run: Run, progress: Callable[[str, int], None], stopped: Callable[[], bool]) -> dict[str, Any] | None:
    """One seed, or what an earlier call left of it; None after Ctrl-C."""
    if run.file.exists():
        progress(f"seed {run.seed}", len(ROWS))
        return dict(json.loads(run.file.read_text()))

    def report(name: str) -> None:
        progress(f"seed {run.seed}: {name}", 1)
        if stopped():
            raise InterruptedRunError

    try:
        result = Experiment(run, report).run()
    except InterruptedRunError:
        return None
    write_whole(run.file, json.dumps(result))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=["digits", "mnist"], default="digits", help="8 x 8 or 28 x 28 pixels")
    parser.add_argument("--seeds", type=int, default=6, help="how many, from 0 (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="seeds run side by side (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/merge_digits"), help="default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="a tiny network and one seed")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.jobs < 1:
        parser.error("--seeds and --jobs: expected at least 1")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: expected a folder that can be written to ({error})")
    sizes = Sizes(data=args.data, **(SMOKE if args.smoke else {}))
    runs = [Run(sizes, seed, args.out) for seed in range(1 if args.smoke else args.seeds)]
    outcome = run_all(runs, execute, len(runs) * len(ROWS), args.jobs)
    results = [result for result in outcome.results if result is not None]
    if not results:
        print("no seed was finished", file=sys.stderr)
        return 130
    report = table(results)
    details = {"sizes": dataclasses.asdict(sizes), "results": results}
    save_table(args.out / "table", report, details)
    plot(args.out / "iterations.png", results)
    print(report.markdown())
    print(f"{len(results)} of {len(runs)} seeds; {args.out / 'table.md'}, table.csv, table.json and iterations.png")
    return 130 if outcome.stopped else 0


if __name__ == "__main__":
    sys.exit(main())

"""What ``nyuv2.py`` and ``cityscapes.py`` have in common: options, data, and the order of things."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dense.baselines import trivial_metrics
from dense.data.check import check_split
from dense.data.layout import Split, open_split
from dense.data.scenes import CLASSES
from dense.data.synthetic import SyntheticSettings, write_synthetic
from dense.engine.checkpoint import load_checkpoint
from dense.engine.cli import Defaults, Report, add_training_arguments, at_least, run_all, run_folder
from dense.engine.methods import SMOKE_ROWS, STL, Row
from dense.engine.published import PublishedTable, load_published
from dense.engine.settings import check_device
from dense.engine.tables import Result
from dense.errors import UserError
from dense.models import FILTERS
from dense.panels import plot_panels
from dense.problem import SMOKE_FILTERS, DenseOptions, DenseProblem
from dense.spec import DenseSpec

__all__ = ["add_dense_arguments", "train"]

SYNTHETIC = "synthetic"
SMOKE_IMAGES = {"train": 4, "val": 2}
_ROWS = ("fairgrad+cost",)
_Flag = argparse.BooleanOptionalAction


def add_dense_arguments(parser: argparse.ArgumentParser, defaults: Defaults, size: tuple[int, int]) -> None:
    """Data and model options, then the shared ones. ``size`` is that of the synthetic images."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", required=True, help=f"folder in MTAN's layout, or '{SYNTHETIC}': render scenes to disk and use those"
    )
    data.add_argument(
        "--check", choices=("full", "headers", "off"), default="full", help="of the files, before training"
    )
    data.add_argument("--augment", action=_Flag, default=True, help="random zoom, crop and flip")
    data.add_argument(
        "--faithful", action=_Flag, default=False, help="the public scripts' conventions, faults included"
    )
    data.add_argument("--scenes", nargs=2, type=int, default=None, metavar=("TRAIN", "VAL"), help="synthetic (300 60)")
    data.add_argument("--size", nargs=2, type=int, default=None, metavar=("H", "W"), help=f"synthetic {size}")
    data.add_argument("--data-seed", type=at_least(0, "--data-seed"), default=0, help="of the synthetic scenes")
    data.add_argument("--cache", type=Path, default=Path("data"), help="folder for the synthetic sets (default data)")
    data.add_argument(
        "--trivial", action=_Flag, default=None, help="row of constant predictors (default: synthetic only)"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        choices=("mtan", "segnet"),
        default=None,
        help="of the multi-task rows; default mtan, segnet for --smoke",
    )
    model.add_argument("--width", type=float, default=None, help="factor on the channels (64, 128, 256, 512, 512)")
    add_training_arguments(parser, defaults)


def train(args: argparse.Namespace, spec: DenseSpec, defaults: Defaults, size: tuple[int, int]) -> int:
    """Everything from the data to the plots.

    Raises:
        UserError: for anything the user can put right.
    """
    device = check_device(args.device)
    root = _synthetic(args, spec, size) if args.data == SYNTHETIC else Path(args.data)
    splits = {name: open_split(root, spec, name) for name in ("train", "val")}
    if args.smoke and args.scenes is None:  # of a real data set too: its first images tell whether all of it fits
        splits = {name: replace(split, indices=split.indices[: SMOKE_IMAGES[name]]) for name, split in splits.items()}
    for split in splits.values():
        check_split(split, spec, args.check)
    problem = DenseProblem(spec, splits, _options(args, defaults, device))
    out = args.out or Path("runs") / (spec.name + ("-smoke" if args.smoke else ""))
    report = _report(args, spec, splits, problem)
    rows = run_all(args, problem, defaults, report, problem.identity(root), out, SMOKE_ROWS if args.smoke else _ROWS)
    _panels(out, problem, rows, args.seeds[0], device)
    return 0


def _synthetic(args: argparse.Namespace, spec: DenseSpec, size: tuple[int, int]) -> Path:
    if spec.classes != CLASSES[spec.name]:
        raise UserError(f"--classes {spec.classes}: the synthetic scenes have {CLASSES[spec.name]} classes")
    height, width = args.size or ((32, 64) if args.smoke else size)
    train_count, val_count = args.scenes or (tuple(SMOKE_IMAGES.values()) if args.smoke else (300, 60))
    settings = SyntheticSettings(train_count, val_count, height, width, args.data_seed)
    name = f"synthetic-{spec.name}-{height}x{width}-{train_count}-{val_count}-{args.data_seed}"
    return write_synthetic(args.cache / name, spec, settings)


def _options(args: argparse.Namespace, defaults: Defaults, device: str) -> DenseOptions:
    batch_size = args.batch_size or (defaults.smoke_batch_size if args.smoke else defaults.batch_size)
    if args.width is not None and not 0 < args.width < math.inf:
        raise UserError(f"--width: expected a number > 0, got {args.width:g}")
    filters = SMOKE_FILTERS if args.smoke else FILTERS
    if args.width is not None:
        filters = tuple(max(8, round(channels * args.width)) for channels in FILTERS)
    return DenseOptions(
        model=args.model or ("segnet" if args.smoke else "mtan"),
        batch_size=batch_size,
        augment=args.augment,
        faithful=args.faithful,
        filters=filters,
        workers=0 if args.smoke else args.workers,  # starting processes takes longer than a smoke run
        pin_memory=device.startswith("cuda"),
    )


def _report(args: argparse.Namespace, spec: DenseSpec, splits: dict[str, Split], problem: DenseProblem) -> Report:
    synthetic = args.data == SYNTHETIC
    counts = tuple(len(splits[name].indices) for name in ("train", "val"))
    what = "synthetic scenes" if synthetic else args.data
    caption = [f"{spec.name}: {what}, {counts[0]} training and {counts[1]} validation images"]
    if not synthetic and counts != spec.counts:
        caption.append(f"**{counts} images instead of the official {spec.counts}.**")
    if args.faithful:
        caption.append("Metrics and augmentation as in the public scripts (--faithful).")
    trivial = args.trivial if args.trivial is not None else synthetic
    extra = (Result("constant", {0: trivial_metrics(problem)}, "trivial"),) if trivial else ()
    comparable = not synthetic and counts == spec.counts
    return Report("val", _published(spec), comparable, tuple(caption), extra)


def _published(spec: DenseSpec) -> PublishedTable | None:
    """The papers' rows are for 13 (NYUv2) and 7 (CityScapes) classes."""
    return load_published(spec.name) if spec.classes in (7, 13) else None


def _panels(out: Path, problem: DenseProblem, rows: Sequence[Row], seed: int, device: str) -> None:
    """Panels of the last multi-task row, from its checkpoint."""
    trained = [row for row in rows if row.word != STL]
    if not trained:
        return
    row = trained[-1]
    model = problem.model(problem.tasks).to(device)
    model.load_state_dict(load_checkpoint(run_folder(out, row, seed) / "checkpoint.pt", device)["model"])
    path = plot_panels(out / f"panels-{row.key}.png", problem, model, device)
    print(f"wrote {path}")

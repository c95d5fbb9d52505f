"""The command ``cost-mtl merge``: checkpoints in, a merged checkpoint out."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from tqdm import tqdm

from cost_mtl._version import __version__
from cost_mtl.merging.blocks import checked_factor
from cost_mtl.merging.checkpoint import CheckpointSource
from cost_mtl.merging.files import merge_checkpoint, open_vectors
from cost_mtl.merging.report import format_report, merge_report
from cost_mtl.merging.sparsify import breadcrumbs, dare
from cost_mtl.merging.task_vector import TaskVector, combine
from cost_mtl.merging.ties_merge import ties

__all__ = ["main"]

Number = TypeVar("Number", int, float)
Method = Callable[[Sequence[TaskVector], Sequence[float], argparse.Namespace], TaskVector]

_METHODS: dict[str, Method] = {
    "task_arithmetic": lambda taus, weights, _: combine(taus, weights),
    "average": lambda taus, weights, _: combine(taus, _shares(weights)),
    "ties": lambda taus, weights, args: ties(taus, _or(args.density, 0.2), weights),
    "dare": lambda taus, weights, args: combine(
        [dare(tau, _or(args.density, 0.1), _or(args.seed, 0) + number) for number, tau in enumerate(taus)], weights
    ),
    "breadcrumbs": lambda taus, weights, args: combine(
        [breadcrumbs(tau, _or(args.lower, 0.85), _or(args.upper, 0.993)) for tau in taus], weights
    ),
}


def _shares(weights: Sequence[float]) -> list[float]:
    """Weights of an average: they sum to 1, so that of one model several times it is that model."""
    factors = [checked_factor(weight, "weights") for weight in weights]
    if min(factors) < 0 or sum(factors) == 0:
        raise ValueError(f"--weights: expected numbers >= 0 that are not all 0 for an average, got {factors}")
    return [factor / sum(factors) for factor in factors]


_ONLY_FOR = {"density": ("ties", "dare"), "seed": ("dare",), "lower": ("breadcrumbs",), "upper": ("breadcrumbs",)}

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that end a process without cleaning up; Windows has no SIGHUP."""

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}

_EPILOG = """\
The result is base + SCALE * (merged task vectors), in the base's dtype, shards and metadata. Computed in float32, one
shard at a time. The output appears whole or not at all. A negative SCALE unlearns. The analogy C + B - A is
--base A --models B C.

exit status: 0 done, 1 an error (one line on standard error explains it), 2 wrong usage; 129, 130 or 143: ended by a
signal (SIGHUP, Ctrl-C, SIGTERM), with no temporary file left
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: the words after ``cost-mtl``; default: those of the process.

    Returns:
        The exit status: 0, 1 (an error, with one line that explains it), 130 (Ctrl-C).
    """
    args = _parser().parse_args(argv)
    try:
        with _signals_clean_up(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _merge(args)
    except (ValueError, TypeError, OSError) as error:
        print(f"cost-mtl merge: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cost-mtl merge: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cost-mtl", description="Multi-task tools.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser(
        "merge",
        help="merge fine-tunings of one model",
        description="Merge fine-tunings of one pre-trained model: safetensors in, safetensors out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = merge.add_argument
    add("--base", required=True, help="the pre-trained model: a folder, a .safetensors file or an index")
    add("--models", required=True, nargs="+", help="fine-tuned models, LoRA adapter folders, saved task vectors")
    add("--method", choices=sorted(_METHODS), default="task_arithmetic", help="default: %(default)s")
    add("--out", help="a folder, or a .safetensors file where the base is one; required unless --dry-run")
    add("--scale", type=float, default=1.0, help="factor of the merged task vectors (default: %(default)s)")
    add(
        "--weights",
        type=float,
        nargs="+",
        help="one factor for each model (default: 1 each); average normalises them",
    )
    add("--density", type=float, help="share of the weights kept by ties (default 0.2) and dare (default 0.1)")
    add("--lower", type=float, help="breadcrumbs: share dropped from below (default 0.85)")
    add("--upper", type=float, help="breadcrumbs: where outliers start (default 0.993)")
    add("--seed", type=int, help="of dare's masks (default 0)")
    add("--keys", choices=["strict", "intersection", "union"], default="strict", help="default: %(default)s")
    add(
        "--exclude",
        nargs="+",
        default=[],
        metavar="PATTERN",
        help="keys that keep the base's values, for example 'head.*'",
    )
    add("--buffers", choices=["keep", "average"], default="keep", help="BatchNorm statistics (default: %(default)s)")
    add("--dtype", choices=sorted(_DTYPES), help="dtype of the weights written (default: the base's)")
    add(
        "--overwrite",
        action="store_true",
        help="replace an earlier model at --out, never an input or other files",
    )
    add("--dry-run", action="store_true", help="report keys, norms and cosines, and write nothing")
    add("--json", action="store_true", help="the report of --dry-run as JSON")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def _merge(args: argparse.Namespace) -> None:
    if not args.out and not args.dry_run:
        raise ValueError("--out: expected a path, got none (or give --dry-run)")
    for option, methods in _ONLY_FOR.items():
        if getattr(args, option) is not None and args.method not in methods:
            raise ValueError(f"--{option}: expected --method {' or '.join(methods)}, got {args.method}")
    base = CheckpointSource(args.base, "base")
    vectors = open_vectors(base, args.models, args.keys, args.exclude)
    weights = [1.0] * len(vectors) if args.weights is None else args.weights
    if len(weights) != len(vectors):
        raise ValueError(f"--weights: expected one for each of the {len(vectors)} models, got {len(weights)}")
    merged = _METHODS[args.method](vectors, weights, args)
    if args.dry_run:
        report = merge_report(base, vectors, [str(path) for path in args.models])
        print(json.dumps(report, indent=2) if args.json else format_report(report))
        return
    total = len(base.infos) + sum(key not in base.infos for key in merged.added)
    with tqdm(total=total, unit="tensor", disable=args.quiet or None, desc=args.method) as progress:
        merge_checkpoint(
            base,
            merged,
            Path(args.out),
            scale=args.scale,
            buffers=args.buffers,
            dtype=_DTYPES[args.dtype] if args.dtype else None,
            overwrite=args.overwrite,
            note=f"{args.method} of {', '.join(Path(path).name for path in args.models)}",
            on_tensor=lambda _: progress.update() and None,
        )
    if not args.quiet:
        print(f"{args.method} of {len(vectors)} models: written to {args.out}", file=sys.stderr)


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


@contextmanager
def _signals_clean_up() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers only in the main thread
        yield
        return
    # A signal that is ignored (SIGHUP under nohup) stays ignored. None is a handler that Python could not restore.
    handlers = {number: signal.getsignal(number) for number in _ENDING}
    previous = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in previous:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number, handler in previous.items():
            if signal.getsignal(number) is _terminate:  # else the process is ending, see there
                signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    # A second signal would interrupt the removal of the temporary files. Not SIG_IGN: Python writes a traceback about a
    # signal that is pending when its handler becomes that.
    for other in _ENDING:
        signal.signal(other, _pass_over)
    raise SystemExit(128 + number)


def _pass_over(number: int, frame: FrameType | None) -> None:
    pass


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    print(f"cost-mtl merge: warning: {message}", file=sys.stderr)

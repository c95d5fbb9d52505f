"""Several training runs side by side, one progress bar, and a Ctrl-C that lets each save itself."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from tqdm import tqdm

Run = TypeVar("Run")
Result = TypeVar("Result")
Progress = Callable[[str, int], None]
Train = Callable[[Run, Progress, Callable[[], bool]], Result | None]


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """results[i] of runs[i], None where it was not finished; ``stopped`` after a Ctrl-C."""

    results: list[Result | None]
    stopped: bool


@contextmanager
def first_interrupt(stop: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C calls ``stop``; a second one ends the program as usual."""
    before = signal.getsignal(signal.SIGINT)

    def handle(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        tqdm.write("Stopping after this epoch; run the same command again to go on. Ctrl-C again quits at once.")
        stop()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_all(runs: Sequence[Run], train: Train[Run, Result], epochs: int, jobs: int) -> Outcome[Result]:
    """Train every run, ``jobs`` at a time, in processes of their own where that is more than one.

    Args:
        runs: settings, picklable.
        train: ``train(run, progress, stopped)``, picklable; see :func:`qm9_train.execute`.
        epochs: of all runs together, the length of the bar.
        jobs: processes, one thread each: these networks are too small to share one among several.
    """
    if jobs < 1:
        raise ValueError(f"jobs: expected at least 1, got {jobs}")
    torch.set_num_threads(1)
    interval = 0.1 if sys.stderr.isatty() else 10.0  # a log file keeps every line
    with tqdm(total=epochs, unit="epoch", mininterval=interval, bar_format="{l_bar}{bar:12}{r_bar}") as bar:

        def show(text: str, epochs_done: int) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(epochs_done)

        if jobs == 1 or len(runs) == 1:
            return _in_this_process(runs, train, show)
        return _in_processes(runs, train, show, jobs)


def _in_this_process(runs: Sequence[Run], train: Train[Run, Result], show: Progress) -> Outcome[Result]:
    stops: list[bool] = []
    with first_interrupt(lambda: stops.append(True)):
        results = [train(run, show, lambda: bool(stops)) for run in runs]
    return Outcome(results, bool(stops))


def _in_processes(runs: Sequence[Run], train: Train[Run, Result], show: Progress, jobs: int) -> Outcome[Result]:
    # spawn: a fork of a process whose torch has already used threads can hang
    context = multiprocessing.get_context("spawn")
    messages, stop = context.Queue(), context.Event()
    pool = ProcessPoolExecutor(min(jobs, len(runs)), context, initializer=_prepare, initargs=(messages, stop))
    with first_interrupt(stop.set):
        try:
            futures = [pool.submit(_work, train, run) for run in runs]
            while not (all(future.done() for future in futures) and messages.empty()):
                _raise_failed(futures)
                with suppress(queue.Empty):
                    show(*messages.get(timeout=0.2))
            return Outcome([future.result() for future in futures], stop.is_set())
        finally:
            stop.set()  # on an error, the other processes end with their epoch
            pool.shutdown(cancel_futures=True)


def _raise_failed(futures: Sequence[Future[Any]]) -> None:
    """Raise the error of a run that failed, without waiting for the others."""
    for future in futures:
        if future.done():
            future.result()


_messages: Any = None
_stop: Any = None


def _prepare(messages: Any, stop: Any) -> None:
    """In each process, once: keep what can only be handed over at its start, and leave Ctrl-C to the parent."""
    global _messages, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _messages, _stop = messages, stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that was killed can tell nobody to stop: without this, its processes would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _work(train: Train[Run, Result], run: Run) -> Result | None:
    return train(run, lambda *message: _messages.put(message), _stop.is_set)

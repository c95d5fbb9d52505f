"""A few gloo processes on the CPU, forked from the test: torch is imported once."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.nets import data, flat

TIMEOUT = 90.0


def spawn(world: int, work: Callable[..., Any], *args: Any, init: bool = True) -> list[Any]:
    """Run ``work(rank, *args)`` in ``world`` processes of one group; what it returns, by rank.

    An exception in a process fails the test with that process's traceback; a process that hangs fails it, too.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_process, args=(r, world, folder, work, args, init)) for r in range(world)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT)
        hung = [r for r, process in enumerate(processes) if process.is_alive()]
        for r in hung:
            processes[r].kill()
            processes[r].join()
        found = [_read(folder, r) for r in range(world)]
    errors = [text for _, text in found if text]
    if errors or hung:
        raise AssertionError("\n".join([f"processes {hung} hung" if hung else "", *errors]))
    return [result for result, _ in found]


def start_group(rank: int, world: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=30)
    )


def _process(rank: int, world: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...], init: bool) -> None:
    torch.set_num_threads(1)
    result, error = None, ""
    try:
        if init:
            start_group(rank, world, folder)
            result = work(rank, *args)
        else:
            result = work(rank, lambda: start_group(rank, world, folder), *args)
    except BaseException:
        error = f"process {rank}:\n{traceback.format_exc()}"
    torch.save((result, error), f"{folder}/{rank}.pt")
    os._exit(0)  # no destructors: a process whose partner failed would wait for it


def _read(folder: str, rank: int) -> tuple[Any, str]:
    path = f"{folder}/{rank}.pt"
    return torch.load(path, weights_only=False) if os.path.exists(path) else (None, f"process {rank} ended early")


def refused(work: Callable[[], Any], error: type[Exception]) -> str:
    """The message of the error that ``work`` has to raise."""
    try:
        work()
    except error as e:
        return str(e)
    raise AssertionError(f"expected {error.__name__}, nothing was raised")


N = 8
"""Samples per process."""


def share(rank, batch):
    """A process's part of the joined batch."""
    x, ys = batch
    rows = slice(rank * N, (rank + 1) * N)
    return x[rows], [y[rows] for y in ys]


def joined(seed, world, K=2, shape=(6,), dtype=torch.float64):
    x, ys = data(K, world * N, seed=seed, shape=shape)
    return x.to(dtype), [y.to(dtype) for y in ys]


def parameters(model):
    return flat(list(model.parameters()))


def assert_in_step(results):
    """Every process has the first one's, bit for bit."""
    for result in results[1:]:
        assert len(result) == len(results[0])
        for a, b in zip(results[0], result, strict=True):
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            assert same, (a, b)

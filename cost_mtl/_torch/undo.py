"""Entering and leaving, all or nothing: what is changed for a while is undone, whatever ends it, and at which bytecode.

An exception from a signal handler (Ctrl-C) may come anywhere: inside a ``finally`` block, between the call of a
context's ``__exit__`` and its first line. So what has to be undone is written down before it is done
(:func:`undoing`), crossed out once it is undone, and whatever is left on the list is undone at the end of the outermost
call (:func:`all_or_nothing`), which looks twice.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from cost_mtl._torch.autocast import Modes

P = ParamSpec("P")
T = TypeVar("T")

TRIES = 3
"""How often an undo is called that raises: one that was interrupted succeeds the next time."""

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF", "SIGCHLD")
    if hasattr(signal, name)
)
"""Those for which people (and PyTorch's DataLoader) have handlers that raise."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.pending: list[undoing] = []


_local = _Local()


def _nothing() -> None:
    pass


class undoing:  # noqa: N801  (used as a context)
    """Context at whose end ``undo()`` is called, once it returns without an exception.

    Args:
        undo: may be called at any time, several times, and before the change was made: it sets what is to be, and asks
            for nothing.
    """

    on_failure = False
    """Whether it is for a call that fails, so that success crosses it out."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self.undo = undo
        self.done = False
        self.tries = 0
        self.pending = _local.pending

    def __enter__(self) -> undoing:
        self.pending.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Undo, and be crossed out."""
        if not self.done:
            self.undo()
            self.done = True
            self.undo = _nothing  # no cycle of references stays
        self.drop()

    def drop(self) -> None:
        """Be crossed out."""
        if self in self.pending:
            self.pending.remove(self)


class _Failing(undoing):
    on_failure = True


class _Scope(undoing):
    """One call of an :func:`all_or_nothing` function: what comes after it on the list is its own."""


def undo_on_failure(undo: Callable[[], object]) -> None:
    """Have ``undo()`` called if the current :func:`all_or_nothing` call ends without :func:`commit`. Outside of one
    nothing is written down."""
    if any(isinstance(entry, _Scope) for entry in _local.pending):
        _Failing(undo).__enter__()


def commit() -> None:
    """The current call can't fail any more: what was written down for that case is crossed out."""
    for entry in _failing():
        entry.done = True
        entry.drop()


def roll_back() -> None:
    """What is written down for a failure is done now, latest first; the call goes on."""
    for entry in reversed(_failing()):
        entry.close()


def _failing() -> list[undoing]:
    pending = _local.pending
    start = max((i for i, entry in enumerate(pending) if isinstance(entry, _Scope)), default=0)
    return [entry for entry in pending[start:] if entry.on_failure]


def all_or_nothing(function: Callable[P, T]) -> Callable[P, T]:
    """A function after which nothing is pending, and grad mode and autocast are as they were, whatever ended it."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        import torch

        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        pending = _local.pending
        depth = len(pending)
        # The first look may be interrupted as anything else.
        try:
            try:
                _Scope(Modes.capture().restore).__enter__()
                return function(*args, **kwargs)
            finally:
                _settle(pending, depth)
        finally:
            _settle(pending, depth)

    wrapper.all_or_nothing = wrapper  # type: ignore[attr-defined]  # itself: wrappers around it copy its attributes
    return wrapper


def _settle(pending: list[undoing], depth: int) -> None:
    """Undo what was written down since the list had ``depth`` entries, latest first. One that fails for good does not
    keep the others from it; the first exception is raised at the end."""
    first: BaseException | None = None
    while len(pending) > depth:
        entry = pending[-1]
        try:
            entry.tries += 1
            entry.close()
        except BaseException as error:  # also KeyboardInterrupt, which is raised below
            first = first or error
            if entry.tries >= TRIES:
                entry.drop()
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback holds this frame


class uninterrupted:  # noqa: N801  (used as a context)
    """Context in which the handlers of signals wait for its end, so that no exception of theirs falls into it; a second
    signal of the same kind is let through. Python calls handlers in the main thread alone: elsewhere it does nothing.
    Inside of an :func:`all_or_nothing` call only."""

    def __enter__(self) -> None:
        self.waiting: list[int] = []
        self.handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self.handlers[number] = handler
        self.back = undoing(self._give_back).__enter__()
        for number in self.handlers:
            signal.signal(number, self._wait)

    def __exit__(self, *exception: object) -> None:
        if self.handlers:
            self.back.close()

    def _wait(self, number: int, frame: FrameType | None) -> None:
        if number in self.waiting:
            self.handlers[number](number, frame)
        else:
            self.waiting.append(number)

    def _give_back(self) -> None:
        for number, handler in self.handlers.items():
            if signal.getsignal(number) == self._wait:
                signal.signal(number, handler)
        while self.waiting:
            number = self.waiting.pop()
            self.handlers[number](number, None)

"""Earlier batches, each with the closure that it was given to: what a teleport verifies itself on.

The loss of an earlier batch is that of its own closure: a loop may give labelled batches to one and unlabelled ones to
another, and ``lambda *b, i=i: losses(b[i])`` means one micro-batch by its own ``i``. So the closure is kept with the
batch. It can be neither saved nor copied (most are lambdas, which hold the model): a checkpoint, a pickle and a
``deepcopy`` have its fingerprint in its place, and use the current closure where that has the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from cost_mtl.step.closure import Thunk

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_EMPTY = object()


@dataclass(frozen=True, eq=False)
class Remembered:
    """One earlier batch.

    Attributes:
        batch: what the closures were called with.
        names: the tasks that it gave; None: not known (checkpoints of earlier releases).
        closures: of its micro-batches, mostly one; None: they were not saved.
        fingerprints: of the closures that were not saved; None where nothing tells them from others.
    """

    batch: tuple[Any, ...]
    names: tuple[str, ...] | None
    closures: tuple[Callable[..., Any], ...] | None = None
    fingerprints: tuple[str, ...] | None = None

    def thunks(self, now: Sequence[Thunk], names: Sequence[str]) -> list[Thunk] | LeftOut:
        """How the batch is evaluated today, under the current autocast and loss scale; or why it is left out.

        Args:
            now: the current closures.
            names: the current tasks.
        """
        closures = self.closures
        if closures is None:
            if self.names is None or self.fingerprints is None:
                return LeftOut("closure", "it came from a checkpoint that does not tell which closure it was given to")
            closures = tuple(thunk.closure for thunk in now)
            if self.fingerprints != tuple(map(fingerprint, closures)):
                return LeftOut("closure", "it came from a checkpoint, where another closure than the current one had "
                                          "been given it")  # fmt: skip
        if self.names is None or set(self.names) != set(names):
            return LeftOut("tasks", f"it has the tasks {list(self.names or ())}, the current one {list(names)}")
        return [replace(now[0], closure=closure, batch=self.batch) for closure in closures]


@dataclass(frozen=True)
class LeftOut:
    """Why an earlier batch is not used: a word for the kind of reason, and the reason."""

    kind: str
    reason: str


def remember(
    memory: Sequence[Remembered], thunks: Sequence[Thunk], names: Sequence[str], most: int
) -> list[Remembered]:
    """The memory with the current batch, the last ``most`` of them."""
    new = Remembered(thunks[0].batch, tuple(names), tuple(thunk.closure for thunk in thunks))
    return [*memory, new][-most:] if most else []


def without_closures(memory: Sequence[Remembered]) -> list[Remembered]:
    """The memory as it can be saved: fingerprints in place of the closures.

    Closures that look alike and are not (one code with two models in it) get none.
    """
    marks = [_fingerprints(m) for m in memory]
    alike = [
        all(a != b or m.closures is None or n.closures is None or _same_all(m.closures, n.closures)
            for b, n in zip(marks, memory, strict=True))
        for a, m in zip(marks, memory, strict=True)
    ]  # fmt: skip
    return [
        replace(m, closures=None, fingerprints=a if ok else None) for m, a, ok in zip(memory, marks, alike, strict=True)
    ]


def _fingerprints(m: Remembered) -> tuple[str, ...] | None:
    return m.fingerprints if m.closures is None else tuple(map(fingerprint, m.closures))


def fingerprint(closure: Callable[..., Any]) -> str:
    """What tells a closure from another one in another process: its module and name, its code, and the plain values
    (numbers, strings) that it has caught or has as defaults."""
    if isinstance(closure, partial):
        return f"partial({fingerprint(closure.func)}, {_plain((*closure.args, *closure.keywords.items()))})"
    if isinstance(closure, MethodType):
        owner = type(closure.__self__)
        return f"{fingerprint(closure.__func__)} of {owner.__module__}.{owner.__qualname__}"
    if isinstance(closure, FunctionType):
        contents = _plain(caught(closure))
        return f"{closure.__module__}.{closure.__qualname__} {digest_of_code(closure.__code__)} {contents}"
    return f"an object of {type(closure).__module__}.{type(closure).__qualname__}"


def caught(function: FunctionType) -> tuple[Any, ...]:
    """The values in a function's cells and its defaults."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
    return (*map(_content, function.__closure__ or ()), *defaults)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # assigned later
        return _EMPTY


def _plain(values: Sequence[Any]) -> list[Any]:
    """What of the values has a meaning in another process; None for the rest."""
    return [_plain(value) if type(value) is tuple else _plain_one(value) for value in values]


def _plain_one(value: Any) -> str | None:
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__} {digest_of_code(value.__code__)}"
    return repr(value) if type(value) in _PLAIN else None


@lru_cache(maxsize=64)
def digest_of_code(code: CodeType) -> str:
    return hashlib.sha256(repr(_content_of(code)).encode()).hexdigest()[:16]


def _content_of(code: CodeType) -> tuple[Any, ...]:
    """All of a function's code but where it stands in the file."""
    constants = [
        _content_of(c) if isinstance(c, CodeType) else sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    ]
    return code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, constants


def _same_all(a: Sequence[Callable[..., Any]], b: Sequence[Callable[..., Any]]) -> bool:
    return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))


def _same(a: Any, b: Any) -> bool:
    """Whether two closures give the same losses for the same batch, as far as their contents tell."""
    if a is b:
        return True
    if isinstance(a, partial) and isinstance(b, partial):
        mine, theirs = (*a.args, *a.keywords.items()), (*b.args, *b.keywords.items())
        return _same(a.func, b.func) and _all_same(mine, theirs)
    if isinstance(a, MethodType) and isinstance(b, MethodType):
        return a.__func__ is b.__func__ and a.__self__ is b.__self__
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        return a.__code__ == b.__code__ and _all_same(caught(a), caught(b))
    return False


def _all_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(
        x is y
        or (type(x) is type(y) and type(x) in _PLAIN and x == y)
        or (type(x) is tuple and type(y) is tuple and _all_same(x, y))
        for x, y in zip(a, b, strict=True)
    )

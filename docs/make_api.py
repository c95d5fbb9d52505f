"""Writes docs/api.md: every public name with its signature and the first lines of its docstring.

    python docs/make_api.py

A test compares the page with what this would write, so that it can't fall behind.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cost_mtl
import cost_mtl.merging
from cost_mtl.base import Trigger, Weighting
from cost_mtl.teleport.base import Teleporter

PAGE = Path(__file__).with_name("api.md")
GROUPS = ("optimizer", "weighting", "triggers", "teleport", "gradients", "history", "base")
TITLES = {"optimizer": "The optimizer", "weighting": "Weightings", "triggers": "Triggers and schedule",
          "teleport": "Teleporters, objectives and solvers", "gradients": "For a loop of your own",
          "history": "Historical trajectory reuse", "base": "Protocols, settings and reports"}  # fmt: skip
PROTOCOLS = (Teleporter, Trigger, Weighting)


def summary(thing: Any) -> str:
    """The first paragraph of the docstring, on one line."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)  # reST roles: the last part of the name
    return text.replace("``", "`").replace("|", "\\|")


def signature(name: str, thing: Any) -> str:
    """Names and defaults, without annotations: those are in the docstring. Errors and protocols are not called."""
    if thing in PROTOCOLS or (isinstance(thing, type) and issubclass(thing, Exception)):
        return name
    parameters = [_bare(p) for p in inspect.signature(thing).parameters.values()]
    return f"{name}{inspect.Signature(parameters)}"


class _Short:
    """A default that is an object of settings, by the name of its class and what differs from its own defaults."""

    def __init__(self, value: Any) -> None:
        self.text = "..." if repr(value) == "<factory>" else f"{type(value).__name__}({', '.join(_changed(value))})"

    def __repr__(self) -> str:
        return self.text


def _changed(value: Any) -> Iterator[str]:
    """The settings that are not the defaults of their class."""
    for field in dataclasses.fields(value) if dataclasses.is_dataclass(value) else ():
        current = getattr(value, field.name)
        if field.default is not dataclasses.MISSING and current != field.default:
            yield f"{field.name}={current!r}"


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    plain = parameter.default is inspect.Parameter.empty or isinstance(
        parameter.default, bool | int | float | str | tuple | None
    )
    default = parameter.default if plain else _Short(parameter.default)
    return parameter.replace(annotation=inspect.Parameter.empty, default=default)


def entries(module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    """(group, name, thing) of every public name that has a docstring of its own; the rest are type aliases."""
    for name in module.__all__:
        thing = getattr(module, name)
        if (
            callable(thing)
            and (thing.__doc__ or "").strip()
            and getattr(thing, "__module__", "").startswith("cost_mtl")
        ):
            yield thing.__module__.split(".")[1], name, thing


def table(rows: list[tuple[str, Any]]) -> str:
    lines = ["| name | what it is |", "| --- | --- |"]
    return "\n".join(lines + [f"| `{signature(name, thing)}` | {summary(thing)} |" for name, thing in rows])


def page() -> str:
    parts = ["# Public names",
             "Made by `python docs/make_api.py`. `help(name)` has the arguments with their shapes, defaults, reasons, "
             "the errors and the sources. Whatever is not here may change without notice."]  # fmt: skip
    found: dict[str, list[tuple[str, Any]]] = {}
    for group, name, thing in entries(cost_mtl):
        found.setdefault(group, []).append((name, thing))
    if missing := found.keys() - set(GROUPS):
        raise ValueError(f"GROUPS: expected the folder of every public name, got none for {sorted(missing)}")
    for group in GROUPS:
        parts += [f"## {TITLES[group]}", table(sorted(found[group], key=lambda row: row[0].lower()))]
    merging = [(name, thing) for _, name, thing in entries(cost_mtl.merging)]
    parts += ["## cost_mtl.merging", table(sorted(merging, key=lambda row: row[0].lower()))]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

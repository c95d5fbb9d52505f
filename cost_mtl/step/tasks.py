"""Which tasks COST knows, and what a change of them does to the weighting's memory."""

from __future__ import annotations

from cost_mtl._torch.warn import warn
from cost_mtl.base import StatefulWeighting
from cost_mtl.step.parameters import few
from cost_mtl.step.state import Progress


def goes_by_name(weighting: StatefulWeighting) -> bool:
    """Whether its settings and its state go by task name, so that absent tasks can be left out of its inputs."""
    return bool(getattr(weighting, "by_name", False))


def register_tasks(progress: Progress, weighting: StatefulWeighting, names: tuple[str, ...], *, named: bool) -> None:
    """Write the tasks of a step into ``progress``.

    A weighting that goes by name keeps its state whoever is there. The state of any other is of tasks by their places,
    so with other tasks, or another order, it starts again.

    Args:
        names: the tasks of the step, in its order.
        named: whether the closure named them; if not, the names are places in a list.
    """
    p, K = progress, len(names)
    if p.num_tasks == K and not p.names:  # from a checkpoint of before they were kept
        p.names = p.present = list(names)
    if named and goes_by_name(weighting):
        if p.num_tasks is None:
            p.weighting = weighting.initial_state(K)
        p.names = _with_new(p.names, names)
    elif p.num_tasks is None or p.present != list(names):
        if p.num_tasks is not None and p.weighting:
            warn(f"closure: {_change(names, p.present)}; the weighting starts again")
        p.weights, p.weighting = None, weighting.initial_state(K)
        p.names = _with_new(p.names, names) if named else list(names)
    p.num_tasks, p.present = len(p.names), list(names)


def _with_new(known: list[str], names: tuple[str, ...]) -> list[str]:
    return [*known, *(name for name in names if name not in known)]


def _change(names: tuple[str, ...], before: list[str]) -> str:
    if len(names) != len(before):
        return f"{len(names)} losses instead of {len(before)}"
    return f"the tasks {few(names)} instead of {few(before)}, in this order"

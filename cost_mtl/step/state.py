"""What of COST goes into ``state_dict()["cost"]``: tensors, numbers, strings and plain containers only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from torch import Tensor

from cost_mtl._torch.warn import warn
from cost_mtl.base import State
from cost_mtl.step.memory import Remembered, without_closures
from cost_mtl.step.state_checks import Frame, check_progress, is_plain, refuse

__all__ = ["VERSION", "Progress", "beside", "detached", "is_plain", "name_of"]

VERSION = 1
ADDED = ("last_asked", "names", "present", "memory_of", "weights_of")
"""Fields that checkpoints of earlier releases of this version lack; they start at their default."""


def detached(value: Any) -> Any:
    """A copy of a plain value in which no tensor has a graph or shares memory with the original."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(detached(item) for item in value)
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    return copy.copy(value)


def name_of(weighting: Any) -> str:
    """What a checkpoint calls a weighting: the class that the user has chosen, without our adapter around it."""
    return type(getattr(weighting, "weighting", weighting)).__name__


def beside(value: Any, batch: Any) -> Any:
    """A remembered batch with its tensors on the devices that the current batch's are on: a checkpoint that was loaded
    with ``map_location="cpu"`` brings batches along that are not."""
    if isinstance(value, Tensor) and isinstance(batch, Tensor):
        return value.to(batch.device)
    if type(value) in (list, tuple) and type(value) is type(batch) and len(value) == len(batch):
        return type(value)(beside(v, b) for v, b in zip(value, batch, strict=True))
    if type(value) is dict and type(batch) is dict:
        return {key: beside(item, batch.get(key)) for key, item in value.items()}
    return value


@dataclass
class Progress:
    """All that COST remembers from step to step: the one place for it.

    Attributes:
        step: calls of ``step`` that ended, skipped ones included.
        skipped: steps left out because something was not finite.
        attempts: teleports attempted.
        last_attempt: number of the step of the last one.
        last_asked: number of the last step in which an earlier batch was asked whether it has the conflict, too.
        sigma: HTR's sigma for the coming step, where a teleport was made outside of ``step``; else None.
        direction: combined direction [m] of the last step, kept only for the HTR policies that need it.
        weights: task name -> its weight when it was last weighed, kept for ``every`` > 1.
        weighting: the weighting's own state.
        num_tasks: number of tasks known; None before the first step.
        names: the tasks known, in the order of their first appearance.
        present: the tasks of the last step, in its order.
        shared: indices of the shared parameters among the model's, where they are found from the graph.
        memory: the last batches, latest last, each with the closure that it was given to. Pickles, copies and
            checkpoints have no closures (see ``cost_mtl.step.memory``).
        iterates: earlier values of the shared parameters [m], latest last, for a teleporter that works with them.
    """

    step: int = 0
    skipped: int = 0
    attempts: int = 0
    last_attempt: int | None = None
    last_asked: int | None = None
    sigma: float | None = None
    direction: Tensor | None = None
    weights: dict[str, float] | None = None
    weighting: State = field(default_factory=dict)
    num_tasks: int | None = None
    names: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    memory: list[Remembered] = field(default_factory=list)
    iterates: list[Tensor] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"memory": without_closures(self.memory)}

    def restoring(self) -> Callable[[], None]:
        """What puts every field back as it is now."""
        return partial(vars(self).update, dict(vars(self)))

    def pack(self, method: str, weights_of: str = "") -> dict[str, Any]:
        """For ``state_dict()["cost"]``; ``method`` names the weighting whose state it is, ``weights_of`` the weighting
        with its settings (:func:`cost_mtl.step.identity.identity`).

        Batches that ``torch.load(weights_only=True)`` would refuse are counted, not saved.
        """
        packed = {f.name: detached(getattr(self, f.name)) for f in fields(self) if f.name != "memory"}
        savable = all(is_plain(m.batch) for m in self.memory)
        kept = without_closures(self.memory) if savable else []
        packed["memory"] = [detached(m.batch) for m in kept]
        packed["memory_of"] = [{"names": _listed(m.names), "closures": _listed(m.fingerprints)} for m in kept]
        lost = 0 if savable else len(self.memory)
        return packed | {"version": VERSION, "method": method, "weights_of": weights_of, "memory_lost": lost}

    @classmethod
    def unpack(cls, state: Any, method: str, frame: Frame | None = None, *, weights_of: str = "") -> Progress:
        """Read what :meth:`pack` made, all of which is looked at first. The state of another weighting than ``method``
        is left out: the coming step then starts this one's. Weights kept for ``every`` > 1 are left out as well where
        the settings differ (``weights_of``), and where a checkpoint of an earlier release does not tell: the coming
        step then solves for its own.

        Args:
            frame: what it has to fit.

        Raises:
            ValueError: it is something else, or of another version; the field is named.
        """
        if not isinstance(state, dict) or "version" not in state:
            raise ValueError(f"state_dict['cost']: expected what COST.state_dict() made, got {type(state).__name__}")
        if type(state["version"]) is not int or state["version"] != VERSION:
            raise ValueError(f"state_dict['cost']: expected version {VERSION}, got version {state['version']!r}")
        unknown = set(state) - {
            "version",
            "method",
            "memory_lost",
            "memory_of",
            "weights_of",
            *(f.name for f in fields(cls)),
        }
        if unknown:
            raise ValueError(f"state_dict['cost']: expected nothing but the fields of version {VERSION}, got "
                             f"{sorted(map(repr, unknown))} beside them")  # fmt: skip
        missing = [name for name in ("method", "memory_lost", *(f.name for f in fields(cls))) if name not in state]
        missing = [name for name in missing if name not in ADDED]
        if missing:
            raise ValueError(f"state_dict['cost']: incomplete, without {missing}")
        if type(state["method"]) is not str:
            refuse("['method']", "the name of a weighting", state["method"])
        if type(state.get("weights_of", "")) is not str:
            refuse("['weights_of']", "a string", state["weights_of"])
        check_progress(state, frame, same_method=state["method"] == method)
        if state["memory_lost"]:
            warn(
                f"state_dict['cost']: {state['memory_lost']} remembered batches were of a kind that can't be saved; "
                "teleports start with an empty memory, so this run will not be the undisturbed one bit for bit",
            )
        progress = cls(**{f.name: detached(state[f.name]) for f in fields(cls) if f.name in state})
        if isinstance(progress.weights, Tensor):  # as kept by releases that had no names for them
            w, names = progress.weights.tolist(), progress.names
            progress.weights = dict(zip(names, w, strict=True)) if len(names) == len(w) else None
        if state.get("weights_of") != weights_of:
            progress.weights = None
        progress.present = progress.present or progress.names
        if frame is not None and state["method"] == method and progress.num_tasks is not None:
            known = progress.names or [str(i) for i in range(progress.num_tasks)]
            read = getattr(frame.weighting, "read_state", None)
            progress.weighting = progress.weighting if read is None else read(progress.weighting, known)
        progress.memory = _remembered(progress.memory, state.get("memory_of"))
        if state["method"] != method:
            if progress.weighting:
                warn(
                    f"state_dict['cost']: the weighting's state is {state['method']}'s, and this is {method}: it "
                    "starts again",
                )
            progress.weighting, progress.weights, progress.num_tasks = {}, None, None
            progress.names, progress.present = [], []
        return progress


def _listed(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)


def _remembered(batches: Sequence[Any], of: Sequence[dict[str, Any]] | None) -> list[Remembered]:
    """Saved batches with what was saved of their closures (``of`` None: by an earlier release, nothing)."""
    if of is None:
        return [Remembered(batch, None) for batch in batches]
    pairs = zip(batches, of, strict=True)
    return [Remembered(batch, _tupled(m["names"]), None, _tupled(m["closures"])) for batch, m in pairs]


def _tupled(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)

"""The user's closure, bound to its batch, and evaluated one micro-batch at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost_mtl._torch.autocast import Autocast
from cost_mtl._torch.frameworks import refuse_accumulation
from cost_mtl.distributed.group import without_reducer
from cost_mtl.gradients.losses import TaskLosses, split_losses


@dataclass(frozen=True)
class Thunk:
    """A closure with its batch, called under the autocast that was on when it was bound.

    Attributes:
        scale: loss scale [] that its backward passes start with; None: 1.
    """

    closure: Callable[..., Any]
    batch: tuple[Any, ...] = ()
    scale: Tensor | None = None
    autocast: Autocast = field(default_factory=Autocast.capture)

    def __call__(self) -> Any:
        if not self.autocast.active:
            return self.closure(*self.batch)
        with self.autocast.restored():
            return self.closure(*self.batch)


def bind(closure: Any, batch: tuple[Any, ...], scale: Tensor | None = None) -> list[Thunk]:
    """The closure, or the closures of the micro-batches, with the batch bound.

    Raises:
        TypeError: not a function or a sequence of functions.
        RuntimeError: gradients are off for good (inference mode), or Accelerate accumulates them.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("closure: gradients can't be computed under torch.inference_mode()")
    if isinstance(closure, list | tuple) and closure and all(callable(c) for c in closure):
        return [Thunk(c, batch, scale) for c in closure]
    if not callable(closure):
        raise TypeError(
            "closure: expected a function that returns the K task losses, as in optimizer.step(closure, *batch), got "
            f"{type(closure).__name__}. Task gradients can't be taken from .grad, so a loop (or a trainer) that calls "
            "backward() and then step() has to hand the losses over instead (examples/accelerate_loop.py and "
            "examples/lightning_module.py show how)"
        )
    if "accelerate.state" in sys.modules:
        refuse_accumulation()
    return [Thunk(closure, batch, scale)]


def run(thunks: Sequence[Thunk], model: nn.Module) -> Iterator[TaskLosses]:
    """The losses of each micro-batch in turn, with their graph; the next is evaluated only when asked for.

    Whoever loops over it lets go of the losses (``del``) before asking for the next, as is done here: what the graph
    has saved would stay, and the memory of two micro-batches be needed.
    """
    names: tuple[str, ...] | None = None
    for thunk in thunks:
        # The cache of weights cast by autocast outlives an in-place change of the weights.
        torch.clear_autocast_cache()
        with torch.enable_grad(), without_reducer(model) if _may_be_wrapped() else nullcontext():
            tasks = split_losses(thunk(), scale=getattr(thunk, "scale", None), require_graph=False)
        if names is not None and tasks.names != names:
            raise ValueError(f"closure: expected the tasks {list(names)} in every micro-batch, got {list(tasks.names)}")
        names = tasks.names
        yield tasks
        del tasks


def _may_be_wrapped() -> bool:
    """Whether a model can be in DistributedDataParallel, which needs a process group."""
    return dist.is_available() and dist.is_initialized()

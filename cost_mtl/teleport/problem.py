"""The landscape that a teleporter works on (:class:`~cost_mtl.teleport.base.TeleportProblem`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from cost_mtl._torch.rng import ForwardState
from cost_mtl._torch.undo import undoing
from cost_mtl.distributed.collectives import mean_
from cost_mtl.distributed.failures import FailTogether, lacks_memory
from cost_mtl.gradients.backward import TaskGradients, collect, combined_backward
from cost_mtl.gradients.gramian import gramian
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.losses import TaskLosses
from cost_mtl.step.closure import Thunk, run
from cost_mtl.step.evaluate import Evaluation, mean_losses, measure
from cost_mtl.teleport.base import NoDoubleBackwardError
from cost_mtl.teleport.curvature import curvature


class UnrepeatableClosureError(RuntimeError):
    """The closure can't be evaluated again at other parameters, so no teleport can be verified."""


class UnusableBatchError(Exception):
    """An earlier batch can't be evaluated: the teleport is begun again without it.

    Attributes:
        batch: which.
        kind: a word for the kind of reason.
    """

    def __init__(self, batch: int, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.batch, self.kind = batch, kind


@dataclass
class Tally:
    """Evaluations of the closure."""

    calls: int = 0


@dataclass
class Problem:
    """Implements :class:`~cost_mtl.teleport.base.TeleportProblem`, whose docstrings apply.

    Attributes:
        own: the other trainable parameters, whose gradients are wanted at an accepted point.
        closures: per batch, the current one first, the closures of its micro-batches (mostly one), without arguments.
        state: random streams and buffers that every evaluation starts from.
        names: the current tasks. Those of an earlier batch are put in this order.
        fate: what happens in one process of the group happens in all; its group is averaged over.
        tally: evaluations done so far.
    """

    model: nn.Module
    layout: Layout
    own: Sequence[Tensor]
    closures: Sequence[Sequence[Thunk]]
    state: ForwardState
    names: tuple[str, ...]
    losses: Tensor
    gradients: Tensor
    gramian: Tensor
    scale: Tensor | None
    generator: torch.Generator
    fate: FailTogether
    iterates: Sequence[Tensor] = ()
    tally: Tally = field(default_factory=Tally)
    theta: list[Tensor] = field(init=False)
    _references: dict[int, Tensor] = field(init=False, default_factory=dict)
    _known: dict[int, tuple[Tensor, Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.theta = [p.detach().clone() for p in self.layout.params]
        self._references[0] = self.losses

    @property
    def params(self) -> tuple[Tensor, ...]:
        return self.layout.params

    @property
    def batches(self) -> int:
        return len(self.closures)

    @property
    def calls(self) -> int:
        return self.tally.calls

    @property
    def group(self) -> Any:
        return self.fate.group

    def without(self, batch: int, generator: torch.Generator) -> Problem:
        """The same problem without an earlier batch; the model stands at theta."""
        left = [closures for b, closures in enumerate(self.closures) if b != batch]
        return replace(self, closures=left, generator=generator)

    def reference(self, batch: int) -> Tensor:
        if batch not in self._references:
            with self.at_theta():
                self._references[batch] = _finite(batch, self.evaluate(batch), "a loss")
        return self._references[batch]

    def gramian_at_theta(self, batch: int) -> Tensor:
        """M [K, K], float64, on an earlier batch while the model stands at theta. Losses and gradients are kept for the
        teleporter that needs them next."""
        losses, G = self.evaluate_gradients(batch)
        self._references[batch] = _finite(batch, losses, "a loss")
        M = _finite(batch, gramian(G, dtype=torch.float64), "a gradient")
        self._known[batch] = losses, G
        return M

    def known_gradients(self, batch: int) -> tuple[Tensor, Tensor] | None:
        return (self.losses, self.gradients) if batch == 0 else self._known.pop(batch, None)

    @contextmanager
    def _evaluating(self, batch: int) -> Iterator[None]:
        """Context around what one process does by itself in an evaluation.

        Raises:
            UnusableBatchError: an earlier batch failed, in whatever way but a lack of memory.
        """
        elsewhere = "it failed in another process of the group"
        twins = (
            UnusableBatchError(batch, "error", elsewhere),
            NoDoubleBackwardError(elsewhere),
            UnrepeatableClosureError(elsewhere),
        )
        with self.fate.shared(twins):
            try:
                yield
            except (UnusableBatchError, NoDoubleBackwardError):
                raise
            except Exception as error:
                if batch == 0 or lacks_memory(error):
                    raise
                raise UnusableBatchError(batch, "error", f"it raised {type(error).__name__}: {error}") from error

    def _run(self, batch: int) -> Iterator[TaskLosses]:
        self.state.restore()
        self.tally.calls += 1
        began = _now()
        for tasks in run(self.closures[batch], self.model):
            ages = [_age(root) for root in tasks.roots if root is not None]
            if any(age is not None and age < began for age in ages):
                raise UnrepeatableClosureError(
                    "closure: returned losses that were computed before it was called; compute them inside, so that "
                    "they can be evaluated at other parameters"
                )
            yield self._in_order(tasks, batch)
            del tasks

    def _in_order(self, tasks: TaskLosses, batch: int) -> TaskLosses:
        """The losses in the order of the current tasks, which every batch must have."""
        if tasks.names == self.names:
            return tasks
        if batch == 0:
            raise UnrepeatableClosureError(
                f"closure: expected the same tasks when it is called again, {list(self.names)}, got {list(tasks.names)}"
            )
        if sorted(tasks.names) != sorted(self.names):
            raise UnusableBatchError(
                batch, "tasks", f"it has the tasks {list(tasks.names)}, the current one {list(self.names)}"
            )
        order = [tasks.names.index(name) for name in self.names]
        return replace(tasks, names=self.names, values=tasks.values[order], roots=tuple(tasks.roots[i] for i in order))

    def evaluate(self, batch: int = 0) -> Tensor:
        with self._evaluating(batch):
            values = []
            for tasks in self._run(batch):
                values.append(tasks.values)
                del tasks
        return mean_losses(values, self.group, torch.float64).to(self.losses.device)

    def measure(self, out: Tensor | None = None) -> Evaluation:
        """Losses and all gradients, of shared and other parameters, on batch 0 where the model stands."""
        self.state.restore()
        self.tally.calls += 1
        there = measure(self.closures[0], self.model, self.layout, self.own, self.group, out=out, single=False,
                        in_teleport=self._evaluating(0))  # fmt: skip
        self._in_order(TaskLosses(there.names, there.losses, ()), 0)
        return there

    def evaluate_gradients(
        self, batch: int = 0, *, wrt: Sequence[Tensor] | None = None, tasks: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Tensor]:
        layout = self.layout if wrt is None else Layout(wrt)
        factor = 1.0 / len(self.closures[batch])
        values: list[Tensor] = []
        result: TaskGradients | None = None
        G = torch.zeros(len(tasks or ()), layout.numel, dtype=layout.dtype, device=layout.device)
        with self._evaluating(batch):
            for split in self._run(batch):
                values.append(split.values)
                if tasks is None:
                    result = collect(split, layout, (), factor=factor, add_to=result)
                    G = result.matrix
                else:
                    self._add_sums(split, tasks, factor, layout, G)
                del split
        losses = mean_losses(values, self.group, torch.float64).to(self.losses.device)
        return losses, mean_(G, self.group)

    def evaluate_curvature(
        self, directions: Tensor, tasks: Sequence[Sequence[int]], batch: int = 0, *, wrt: Sequence[Tensor] | None = None
    ) -> Tensor:
        inputs = self.layout.params if wrt is None else tuple(wrt)
        layout = Layout(inputs)
        total = torch.zeros(1, layout.numel, dtype=layout.dtype, device=layout.device)
        parts = [self.layout.views(row) for row in directions]
        with self._evaluating(batch):
            for split in self._run(batch):
                for part, members in zip(parts, tasks, strict=True):
                    for k, grad in enumerate(curvature(split, members, self.layout.params, part, inputs)):
                        if grad is not None:
                            layout.view(total[0], k).add_(grad, alpha=1.0 / len(self.closures[batch]))
                del split
        return mean_(total, self.group)[0]

    @staticmethod
    def _add_sums(split: TaskLosses, groups: Sequence[Sequence[int]], factor: float, layout: Layout, G: Tensor) -> None:
        """G[r] += factor * gradient of the sum of the losses in groups[r]."""
        for r, group in enumerate(groups):
            roots = tuple(root if i in group else None for i, root in enumerate(split.roots))
            if all(root is None for root in roots):
                continue
            chosen = replace(split, roots=roots)
            weights: list[float | Tensor] = [factor] * len(split)
            grads = combined_backward(chosen, weights, layout.params, retain_graph=r < len(groups) - 1)
            for k, grad in enumerate(grads):
                if grad is not None:
                    layout.view(G[r], k).add_(grad.to_dense() if grad.is_sparse else grad)

    @contextmanager
    def at_theta(self) -> Iterator[None]:
        """Context in which the parameters stand at theta; afterwards they are back where they were."""
        with torch.no_grad():
            here = [p.detach().clone() for p in self.params]

        def back() -> None:
            with torch.no_grad():
                for p, value in zip(self.params, here, strict=True):
                    p.copy_(value)

        with undoing(back):
            self.reset()
            yield

    @contextmanager
    def at(self, delta: Tensor) -> Iterator[None]:
        with undoing(self.reset):
            self.place(delta)
            yield

    def place(self, delta: Tensor) -> None:
        """Put the parameters at theta + delta [m]."""
        with torch.no_grad():
            for p, start, change in zip(self.params, self.theta, self.layout.views(delta), strict=True):
                p.copy_(start + change.to(start.dtype) if start.dtype.itemsize >= 4 else start.float() + change)

    def reset(self) -> None:
        """Give the parameters their bits back."""
        with torch.no_grad():
            for p, start in zip(self.params, self.theta, strict=True):
                p.copy_(start)


def _finite(batch: int, values: Tensor, what: str) -> Tensor:
    """The values, those of an earlier batch; the same in every process."""
    if not bool(torch.isfinite(values).all()):
        raise UnusableBatchError(batch, "not finite", f"{what} of it is not finite")
    return values


def _age(root: Tensor | GradientEdge) -> int | None:
    """Number of the root's node in the order of their making; None for a leaf."""
    node = root.grad_fn if isinstance(root, Tensor) else root.node
    return None if node is None else int(node._sequence_nr())


def _now() -> int:
    """The number that the nodes made from now on do not go below."""
    with torch.enable_grad():
        age = _age(torch.zeros((), requires_grad=True) + 0.0)
    return age or 0

"""The landscape that a teleporter works on (:class:`cost_mtl.base.TeleportProblem`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from cost_mtl.agreement import short_of_memory_together
from cost_mtl.evaluation import Evaluation, Thunk, mean_losses, measure, run
from cost_mtl.gradients import Layout, TaskGradients, collect, combined_backward
from cost_mtl.losses import TaskLosses
from cost_mtl.parallel import mean_
from cost_mtl.teleport.curvature import curvature
from cost_mtl.teleport.replay import Moment
from cost_mtl.undo import undoing


class UnrepeatableClosureError(RuntimeError):
    """The closure can't be evaluated again at other parameters, so no teleport can be verified."""


@dataclass
class Problem:
    """Implements :class:`cost_mtl.base.TeleportProblem`, whose docstrings apply.

    Attributes:
        own: the other trainable parameters, whose gradients are wanted at an accepted point.
        closures: per batch, the current one first, the closures of its micro-batches (mostly one), without arguments.
        moment: random streams and buffers that every evaluation starts from.
        group: process group to average over, or None.
        calls: evaluations done so far.
    """

    model: nn.Module
    layout: Layout
    own: Sequence[Tensor]
    closures: Sequence[Sequence[Thunk]]
    moment: Moment
    losses: Tensor
    gradients: Tensor
    gramian: Tensor
    scale: Tensor | None
    generator: torch.Generator
    iterates: Sequence[Tensor] = ()
    group: Any = None
    calls: int = 0
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

    def reference(self, batch: int) -> Tensor:
        if batch not in self._references:
            with self.at_theta():
                self._references[batch] = self.evaluate(batch)
        return self._references[batch]

    def look_at(self, batch: int) -> Tensor:
        """G [K, m] on an earlier batch while the model stands at theta, kept for the teleporter that needs it next."""
        losses, G = self.evaluate_gradients(batch)
        self._references[batch] = losses
        self._known[batch] = losses, G
        return G

    def known_gradients(self, batch: int) -> tuple[Tensor, Tensor] | None:
        return (self.losses, self.gradients) if batch == 0 else self._known.pop(batch, None)

    def _run(self, batch: int) -> Iterator[TaskLosses]:
        self.moment.restore()
        self.calls += 1
        began = _now()
        for tasks in run(self.closures[batch], self.model):
            ages = [_age(root) for root in tasks.roots if root is not None]
            if any(age is not None and age < began for age in ages):
                raise UnrepeatableClosureError(
                    "closure: returned losses that were computed before it was called; compute them inside, so that "
                    "they can be evaluated at other parameters"
                )
            if len(tasks) != len(self.losses):
                raise ValueError(f"closure: returned {len(self.losses)} losses at first, then {len(tasks)}")
            yield tasks

    def evaluate(self, batch: int = 0) -> Tensor:
        with short_of_memory_together(self.layout.device, self.group):
            values = [tasks.values for tasks in self._run(batch)]
        return mean_losses(values, self.group, torch.float64).to(self.losses.device)

    def measure(self, out: Tensor | None = None) -> Evaluation:
        """Losses and all gradients, of shared and other parameters, on batch 0 where the model stands."""
        self.moment.restore()
        self.calls += 1
        return measure(
            self.closures[0], self.model, self.layout, self.own, self.group, out=out, single=False, in_teleport=True
        )

    def evaluate_gradients(
        self, batch: int = 0, *, wrt: Sequence[Tensor] | None = None, tasks: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Tensor]:
        layout = self.layout if wrt is None else Layout(wrt)
        factor = 1.0 / len(self.closures[batch])
        values: list[Tensor] = []
        result: TaskGradients | None = None
        G = torch.zeros(len(tasks or ()), layout.numel, dtype=layout.dtype, device=layout.device)
        with short_of_memory_together(layout.device, self.group):
            for split in self._run(batch):
                values.append(split.values)
                if tasks is None:
                    result = collect(split, layout, (), factor=factor, add_to=result)
                    G = result.matrix
                else:
                    self._add_sums(split, tasks, factor, layout, G)
        losses = mean_losses(values, self.group, torch.float64).to(self.losses.device)
        return losses, mean_(G, self.group)

    def evaluate_curvature(
        self, directions: Tensor, tasks: Sequence[Sequence[int]], batch: int = 0, *, wrt: Sequence[Tensor] | None = None
    ) -> Tensor:
        inputs = self.layout.params if wrt is None else tuple(wrt)
        layout = Layout(inputs)
        total = torch.zeros(1, layout.numel, dtype=layout.dtype, device=layout.device)
        parts = [self.layout.views(row) for row in directions]
        with short_of_memory_together(layout.device, self.group):
            for split in self._run(batch):
                for part, members in zip(parts, tasks, strict=True):
                    for k, grad in enumerate(curvature(split, members, self.layout.params, part, inputs)):
                        if grad is not None:
                            layout.view(total[0], k).add_(grad, alpha=1.0 / len(self.closures[batch]))
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


def _age(root: Tensor | GradientEdge) -> int | None:
    """Number of the root's node in the order of their making; None for a leaf."""
    node = root.grad_fn if isinstance(root, Tensor) else root.node
    return None if node is None else int(node._sequence_nr())


def _now() -> int:
    """The number that the nodes made from now on do not go below."""
    with torch.enable_grad():
        age = _age(torch.zeros((), requires_grad=True) + 0.0)
    return age or 0

"""The cheap step between two solves: one gradient for all tasks together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_mtl._torch.dtensor import like, local
from cost_mtl.gradients.backward import TaskGradients, combined_backward
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.losses import TaskLosses
from cost_mtl.step.closure import Thunk

ONE_PASS = 1e-15, 1e15
"""Weights within this range can be the factors of one backward pass in float32."""


@dataclass(frozen=True)
class Reused:
    """Weights of an earlier step, by task name, for the cheap steps between two solves (``every`` > 1).

    Attributes:
        weights: of the shared gradient.
        own: of the gradients of the tasks' own parameters.
    """

    weights: Mapping[str, float]
    own: Mapping[str, float]

    def covers(self, names: Iterable[str]) -> bool:
        """Whether every one of the tasks has a weight; one that has joined since needs a solve."""
        return all(name in self.weights for name in names)


def fit_one_pass(weights: Tensor) -> bool:
    """Whether weights [K] on the CPU can be the factors of one backward pass."""
    return all(w == 0 or ONE_PASS[0] <= abs(w) <= ONE_PASS[1] for w in weights.tolist())


class _Combined:
    """The cheap step between two solves: the gradient of sum_i w_i L_i for the shared parameters and of
    sum_i own_w_i L_i for the others, in two backward passes whatever K is (tasks are not kept apart)."""

    def __init__(
        self, weights: Tensor, own_weights: Tensor, layout: Layout, own: Sequence[Tensor], thunks: Sequence[Thunk]
    ) -> None:
        self.weights, self.both, self.layout, self.own = weights, (weights, own_weights), layout, own
        self.sums: list[Tensor | None] = [None] * (len(layout.params) + len(own))
        self.part = 1.0 / len(thunks)

    @classmethod
    def start(
        cls, reused: Reused, names: Sequence[str], layout: Layout, own: Sequence[Tensor], thunks: Sequence[Thunk]
    ) -> _Combined:
        """For tasks that the weights cover."""
        pick = [
            torch.tensor([by_name[n] for n in names], dtype=torch.float64) for by_name in (reused.weights, reused.own)
        ]
        return cls(pick[0], pick[1], layout, own, thunks)

    def add(self, tasks: TaskLosses) -> None:
        """One micro-batch."""
        shared, own = self.layout.params, self.own
        # Scaled losses, or half precision, times weights above 1 (those of small gradients are in the hundreds) would
        # overflow: the largest weight waits until the scale is off.
        scaled = tasks.scale is not None or any(r is not None and tasks.dtype_of(r).itemsize < 4 for r in tasks.roots)
        later = [max(1.0, float(w.abs().max())) if scaled else 1.0 for w in self.both]
        seeds = [(w / most * self.part).tolist() for w, most in zip(self.both, later, strict=True)]
        grads = combined_backward(tasks, seeds[0], shared, retain_graph=bool(own))
        grads += combined_backward(tasks, seeds[1], own)
        for k, grad in enumerate(grads):
            if grad is not None:
                if scaled:
                    grad = like(grad, local(grad) * later[k >= len(shared)])
                so_far = self.sums[k]
                self.sums[k] = grad if so_far is None else so_far + grad

    def result(self) -> TaskGradients:
        """G with one row, and the others' gradients as task 0's."""
        layout, m = self.layout, len(self.layout.params)
        result = TaskGradients(layout.buffer(1).zero_(), {}, {k for k in range(m) if self.sums[k] is not None})
        for k in result.reached:
            layout.view(result.matrix[0], k).copy_(_dense(self.sums[k]))
        result.own = {id(p): {0: grad} for p, grad in zip(self.own, self.sums[m:], strict=True) if grad is not None}
        return result


def _dense(grad: Tensor | None) -> Tensor:
    if grad is None:
        raise RuntimeError("expected a gradient")
    return local(grad.to_dense() if grad.is_sparse else grad)

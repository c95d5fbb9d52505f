"""One evaluation of the closure: losses and all gradients, micro-batches and processes averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl.gradients import Layout, TaskGradients, collect, combined_backward
from cost_mtl.losses import TaskLosses, refuse_reentrant_checkpoints, split_losses
from cost_mtl.parallel import mean_, mean_own, union, without_reducer

Thunk = Callable[[], Any]
"""A closure whose batch is bound."""


@dataclass
class Evaluation:
    """What one evaluation gave.

    Attributes:
        names: task names.
        losses: detached losses [K], mean over micro-batches and processes.
        layout: columns of G; empty with one task.
        gradients: G [K, m] and the gradients of the other parameters, likewise averaged.
    """

    names: tuple[str, ...]
    losses: Tensor
    layout: Layout
    gradients: TaskGradients


def run(thunks: Sequence[Thunk], model: nn.Module) -> Iterator[TaskLosses]:
    """The losses of each micro-batch in turn, with their graph; the next is evaluated only when asked for."""
    names: tuple[str, ...] | None = None
    for thunk in thunks:
        # The cache of weights cast by autocast outlives an in-place change of the weights.
        torch.clear_autocast_cache()
        with torch.enable_grad(), without_reducer(model):
            tasks = split_losses(thunk())
        if names is not None and tasks.names != names:
            raise ValueError(f"closure: expected the tasks {list(names)} in every micro-batch, got {list(tasks.names)}")
        names = tasks.names
        yield tasks


def mean_losses(values: Sequence[Tensor], group: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Mean over micro-batches and processes, [K]."""
    total = values[0].to(dtype or values[0].dtype)
    if len(values) > 1:
        total = torch.stack([v.to(total.dtype) for v in values]).mean(dim=0)
    return mean_(total.clone(), group)


def measure(
    thunks: Sequence[Thunk],
    model: nn.Module,
    layout: Layout,
    own: Sequence[Tensor],
    group: Any,
    *,
    out: Tensor | None = None,
    scale: Tensor | None = None,
    single: bool = True,
    look_closely: bool = False,
) -> Evaluation:
    """Losses and per-task gradients; the closure of each micro-batch is called once.

    Args:
        layout: the shared parameters.
        own: the other trainable parameters.
        out: buffer for G.
        scale: factor on the losses for the backward pass (loss scaling), taken off the gradients again.
        single: with one task nothing is shared: treat all parameters as its own.
        look_closely: where a parameter was not reached, make sure that no checkpointing hid it.
    """
    values: list[Tensor] = []
    names: tuple[str, ...] = ()
    result: TaskGradients | None = None
    factor: float | Tensor = 1.0 / len(thunks)
    for tasks in run(thunks, model):
        if single and len(tasks) == 1 and layout.numel:
            own, layout = [*layout.params, *own], Layout(())
        seed = factor if scale is None else scale * factor
        result = collect(tasks, layout, own, out=out, factor=seed, add_to=result)
        if look_closely and len(result.reached) + len(result.own) < len(layout.params) + len(own):
            refuse_reentrant_checkpoints(tasks.roots)
        names = tasks.names
        values.append(tasks.values)
    if result is None:
        raise ValueError("closure: expected at least one, got an empty sequence")
    mean_(result.matrix, group)
    mean_own(result.own, own, len(names), group)
    result.reached = union(result.reached, len(layout.params), layout.device, group)
    if scale is not None:
        _unscale_(result, scale)
    return Evaluation(names, mean_losses(values, group), layout, result)


def _unscale_(gradients: TaskGradients, scale: Tensor) -> None:
    with torch.no_grad():
        inverse = scale.double().reciprocal()
        gradients.matrix.mul_(inverse.to(gradients.matrix.dtype))
        for by_task in gradients.own.values():
            for grad in by_task.values():
                grad.mul_(inverse.to(grad.device, grad.dtype))


def measure_combined(
    thunks: Sequence[Thunk],
    model: nn.Module,
    shared: Sequence[Tensor],
    own: Sequence[Tensor],
    weights: Sequence[float],
    own_weights: Sequence[float],
    group: Any,
) -> tuple[tuple[str, ...], Tensor, list[Tensor | None]]:
    """The cheap step between two solves: gradient of sum_i w_i L_i for the shared parameters and of
    sum_i own_w_i L_i for the others, in one or two backward passes whatever K is."""
    inputs = [*shared, *own]
    sums: list[Tensor | None] = [None] * len(inputs)
    values: list[Tensor] = []
    names: tuple[str, ...] = ()
    for tasks in run(thunks, model):
        if len(tasks) != len(weights):
            raise ValueError(f"closure: expected {len(weights)} losses as in the step before, got {len(tasks)}")
        part = 1.0 / len(thunks)
        first = combined_backward(tasks, [w * part for w in weights], shared, retain_graph=True)
        second = combined_backward(tasks, [w * part for w in own_weights], own)
        for k, grad in enumerate([*first, *second]):
            if grad is not None:
                so_far = sums[k]
                sums[k] = grad if so_far is None else so_far + grad
        names = tasks.names
        values.append(tasks.values)
    present = union({k for k, g in enumerate(sums) if g is not None}, len(inputs), values[0].device, group)
    for k in sorted(present):
        grad = sums[k]
        sums[k] = mean_(torch.zeros_like(inputs[k]) if grad is None else grad.contiguous(), group)
    return names, mean_losses(values, group), sums

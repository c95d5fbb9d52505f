"""One evaluation of the closure: losses and all gradients, micro-batches and processes averaged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl.gradients import Layout, TaskGradients, collect, combined_backward
from cost_mtl.losses import TaskLosses, refuse_reentrant_checkpoints, split_losses
from cost_mtl.parallel import mean_, mean_own, union, without_reducer

Thunk = partial[Any]
"""A closure whose batch is bound."""


@dataclass
class Evaluation:
    """What one evaluation gave.

    Attributes:
        names: task names.
        losses: detached losses [K], mean over micro-batches and processes.
        layout: columns of G; empty with one task.
        gradients: G [K, m] and the gradients of the other parameters, likewise averaged.
        weights: None; or, from :func:`measure_combined`, the weights [K] that the gradients were combined with: G then
            has one row, and the other parameters' gradients count as task 0's.
    """

    names: tuple[str, ...]
    losses: Tensor
    layout: Layout
    gradients: TaskGradients
    weights: Tensor | None = None


def bind(closure: Any, batch: tuple[Any, ...]) -> list[Thunk]:
    """The closure, or the closures of the micro-batches, with the batch bound.

    Raises:
        TypeError: not a function or a sequence of functions.
        RuntimeError: gradients are off for good (inference mode).
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError("closure: gradients can't be computed under torch.inference_mode()")
    if isinstance(closure, list | tuple) and closure and all(callable(c) for c in closure):
        return [partial(c, *batch) for c in closure]
    if not callable(closure):
        raise TypeError(
            "closure: expected a function that returns the K task losses, as in optimizer.step(closure, *batch), got "
            f"{type(closure).__name__}. Task gradients can't be taken from .grad, so a loop (or a trainer) that calls "
            "backward() and then step() has to hand the losses over instead"
        )
    return [partial(closure, *batch)]


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


def reached_by_several(now: Evaluation, params: Sequence[Tensor]) -> list[int]:
    """Indices of the parameters that two losses or more have reached and that are not shared yet."""
    return [k for k, p in enumerate(params) if len(now.gradients.own.get(id(p), {})) > 1]


def promote(now: Evaluation, layout: Layout) -> Evaluation:
    """The same evaluation with more of the parameters counted as shared: those of ``layout``."""
    G = torch.zeros(len(now.names), layout.numel, dtype=layout.dtype, device=layout.device)
    reached = set()
    for k, p in enumerate(layout.params):
        old = now.layout.index.get(id(p))
        by_task = now.gradients.own.pop(id(p), {})
        if by_task or old in now.gradients.reached:
            reached.add(k)
        for i, row in enumerate(G):
            if old is not None:
                layout.view(row, k).copy_(now.layout.view(now.gradients.matrix[i], old))
            elif i in by_task:
                grad = by_task[i]
                layout.view(row, k).copy_(grad.to_dense() if grad.is_sparse else grad)
    return replace(now, layout=layout, gradients=replace(now.gradients, matrix=G, reached=reached))


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
    layout: Layout,
    own: Sequence[Tensor],
    weights: Tensor,
    own_weights: Tensor,
    group: Any,
) -> Evaluation:
    """The cheap step between two solves: gradient of sum_i w_i L_i for the shared parameters and of
    sum_i own_w_i L_i for the others, in two backward passes whatever K is (tasks are not kept apart)."""
    inputs = [*layout.params, *own]
    sums: list[Tensor | None] = [None] * len(inputs)
    values: list[Tensor] = []
    names: tuple[str, ...] = ()
    part = 1.0 / len(thunks)
    for tasks in run(thunks, model):
        if len(tasks) != len(weights):
            raise ValueError(f"closure: expected {len(weights)} losses as in the step before, got {len(tasks)}")
        shared_grads = combined_backward(tasks, list(weights * part), layout.params, retain_graph=True)
        own_grads = combined_backward(tasks, list(own_weights * part), own)
        for k, grad in enumerate([*shared_grads, *own_grads]):
            if grad is not None:
                so_far = sums[k]
                sums[k] = grad if so_far is None else so_far + grad
        names = tasks.names
        values.append(tasks.values)
    m = len(layout.params)
    result = TaskGradients(layout.buffer(1).zero_(), {}, {k for k in range(m) if sums[k] is not None})
    for k in result.reached:
        layout.view(result.matrix[0], k).copy_(_dense(sums[k]))
    for p, grad in zip(own, sums[m:], strict=True):
        if grad is not None:
            result.own[id(p)] = {0: grad}
    mean_(result.matrix, group)
    mean_own(result.own, own, 1, group)
    result.reached = union(result.reached, m, layout.device, group)
    return Evaluation(names, mean_losses(values, group), layout, result, weights)


def _dense(grad: Tensor | None) -> Tensor:
    if grad is None:
        raise RuntimeError("expected a gradient")
    return grad.to_dense() if grad.is_sparse else grad

"""One evaluation of the closure: losses and all gradients, micro-batches and processes averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl.agreement import (
    agree_on_tasks,
    communicates,
    refusing_foreign_wrappers,
    short_of_memory_together,
)
from cost_mtl.frameworks import refuse_accumulation
from cost_mtl.gradients import Layout, TaskGradients, collect, combined_backward
from cost_mtl.losses import (
    TaskLosses,
    other_parameters,
    refuse_reentrant_checkpoints,
    split_losses,
    warn_about_constants,
)
from cost_mtl.parallel import mean_, mean_own_, union, without_reducer
from cost_mtl.parameters import Trainable, warn_about_others
from cost_mtl.precision import Autocast
from cost_mtl.sharding import is_sharded, like, local, pieces_group
from cost_mtl.shares import Share, scatter_mean_


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
        with self.autocast.restored():
            return self.closure(*self.batch)


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
        pieces: the process group over which the gradients are in pieces (``fully_shard``), or None.
        share: the columns of G that are averaged on this process; None: all of them.
    """

    names: tuple[str, ...]
    losses: Tensor
    layout: Layout
    gradients: TaskGradients
    weights: Tensor | None = None
    pieces: Any = None
    share: Share | None = None

    def whole(self) -> Evaluation:
        """With all columns of G averaged."""
        if self.share is None:
            return self
        self.share.gather_all_(self.gradients.matrix)
        return replace(self, share=None)


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
        with torch.enable_grad(), without_reducer(model):
            tasks = split_losses(thunk(), scale=getattr(thunk, "scale", None), require_graph=False)
        if names is not None and tasks.names != names:
            raise ValueError(f"closure: expected the tasks {list(names)} in every micro-batch, got {list(tasks.names)}")
        names = tasks.names
        yield tasks
        del tasks


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
    trainable: Trainable | None = None,
    out: Tensor | None = None,
    single: bool = True,
    look_closely: bool = False,
    in_teleport: bool = False,
) -> Evaluation:
    """Losses and per-task gradients; the closure of each micro-batch is called once.

    Args:
        layout: the shared parameters.
        own: the other trainable parameters.
        trainable: finds them again where the closure changes ``requires_grad``.
        out: buffer for G.
        single: with one task nothing is shared: treat all parameters as its own.
        look_closely: for the first evaluation: refuse what would go wrong silently.
        in_teleport: the tasks are known, and a lack of memory in one process is to be everyone's.
    """
    values: list[Tensor] = []
    names: tuple[str, ...] = ()
    result: TaskGradients | None = None
    guard: AbstractContextManager[None]
    if in_teleport:
        guard, found = short_of_memory_together(layout.device, group), run(thunks, model)
    else:
        params = [*layout.params, *own]
        guard, found = nullcontext(), _checked(thunks, model, params, group, look_closely=look_closely)
    with guard:
        for tasks in found:
            changed = None if trainable is None else trainable.after(tasks, first=result is None)
            if changed is not None:
                layout, own = changed
            if single and len(tasks) == 1 and layout.params:
                own, layout = [*layout.params, *own], Layout(())
            if look_closely and result is None and not any(map(is_sharded, (*layout.params, *own))):
                warn_about_others(other_parameters(tasks.roots, [*layout.params, *own]))
                warn_about_constants(tasks)
            result = collect(tasks, layout, own, out=out, factor=1.0 / len(thunks), add_to=result)
            if look_closely and len(result.reached) + len(result.own) < len(layout.params) + len(own):
                refuse_reentrant_checkpoints(tasks.roots)
            names = tasks.names
            values.append(tasks.values)
            del tasks
    if result is None:
        raise ValueError("closure: expected at least one, got an empty sequence")
    return _averaged(names, values, layout, own, result, len(names), group, in_shares=not in_teleport)


def _checked(
    thunks: Sequence[Thunk], model: nn.Module, params: Sequence[Tensor], group: Any, *, look_closely: bool
) -> Iterator[TaskLosses]:
    """:func:`run`, with a look at whether the processes' losses can be averaged."""
    if look_closely:
        _refuse_hooks(params)
    device = params[0].device if params else torch.device("cpu")
    lockstep = group is not None and communicates(model, params)
    foreign = refusing_foreign_wrappers(model) if look_closely and group is not None else nullcontext()
    with foreign:
        unseen = True
        for tasks in run(thunks, model):
            if unseen or lockstep or group is None:
                agree_on_tasks(tasks, device, group, lockstep=lockstep)
            unseen = False
            yield tasks
            del tasks


def _refuse_hooks(params: Sequence[Tensor]) -> None:
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params):
        raise RuntimeError(
            "model: a parameter has a hook from register_post_accumulate_grad_hook (an optimizer in the backward pass, "
            "say), which would run once per task, with that task's gradient: remove it, or use "
            "optimizer.base.register_step_pre_hook, which sees the combined gradient"
        )


def _averaged(
    names: tuple[str, ...],
    values: Sequence[Tensor],
    layout: Layout,
    own: Sequence[Tensor],
    result: TaskGradients,
    tasks: int,
    group: Any,
    *,
    in_shares: bool = False,
) -> Evaluation:
    """The evaluation, averaged over the processes (FSDP has averaged sharded gradients itself)."""
    losses, share = mean_losses(values, group), None
    if group is not None:
        if layout.pieces_group is None:
            share = scatter_mean_(result.matrix, group) if in_shares else None
            if not in_shares:
                mean_(result.matrix, group)
        _fill_gaps(layout, own, result, tasks, group)
    return Evaluation(names, losses, layout, result, pieces=pieces_group([*layout.params, *own]), share=share)


def _fill_gaps(layout: Layout, own: Sequence[Tensor], result: TaskGradients, tasks: int, group: Any) -> None:
    """What some process has a gradient of, all have; the unshared ones are averaged."""
    params = [*layout.params, *own]
    if not params:
        return
    m = len(layout.params)
    flags = torch.zeros(m + len(own) * tasks)
    flags[sorted(result.reached)] = 1.0
    for r, p in enumerate(own):
        for task in result.own.get(id(p), {}):
            flags[m + r * tasks + task] = 1.0
    found = union(flags.to(params[0].device), group).nonzero().flatten().tolist()
    result.reached = {k for k in found if k < m}
    mean_own_(result.own, [(own[(k - m) // tasks], (k - m) % tasks) for k in found if k >= m], group)


def reached_by_several(now: Evaluation, params: Sequence[Tensor]) -> list[int]:
    """Indices of the parameters that two losses or more have reached and that are not shared yet.

    A gradient that is zero throughout does not count: in a compiled closure, or behind arithmetic on a tensor of
    stacked losses, every loss gives every parameter one.
    """
    candidates = [(k, list(now.gradients.own.get(id(p), {}).values())) for k, p in enumerate(params)]
    candidates = [(k, grads) for k, grads in candidates if len(grads) > 1]
    if not candidates:
        return []
    every = [_is_nonzero(grad).to(now.losses.device) for _, grads in candidates for grad in grads]
    nonzero = iter(union(torch.stack(every), now.pieces).tolist())
    return [k for k, grads in candidates if sum(next(nonzero) for _ in grads) > 1]


def _is_nonzero(grad: Tensor) -> Tensor:
    """1 or 0 []."""
    dense = local(grad)
    return (dense.coalesce().values() if dense.is_sparse else dense).ne(0).any().to(torch.uint8)


def promote(now: Evaluation, layout: Layout) -> Evaluation:
    """The same evaluation with other parameters counted as shared, those of ``layout`` (more or fewer)."""
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
                layout.view(row, k).copy_(_dense(by_task[i]))
    return replace(now, layout=layout, gradients=replace(now.gradients, matrix=G, reached=reached))


def measure_combined(
    thunks: Sequence[Thunk],
    model: nn.Module,
    layout: Layout,
    own: Sequence[Tensor],
    weights: Tensor,
    own_weights: Tensor,
    group: Any,
    trainable: Trainable,
) -> Evaluation:
    """The cheap step between two solves: gradient of sum_i w_i L_i for the shared parameters and of
    sum_i own_w_i L_i for the others, in two backward passes whatever K is (tasks are not kept apart)."""
    inputs = [*layout.params, *own]
    sums: list[Tensor | None] = []
    values: list[Tensor] = []
    names: tuple[str, ...] = ()
    part = 1.0 / len(thunks)
    for tasks in _checked(thunks, model, inputs, group, look_closely=False):
        if len(tasks) != len(weights):
            raise ValueError(f"closure: expected {len(weights)} losses as in the step before, got {len(tasks)}")
        changed = trainable.after(tasks, first=not values)
        if changed is not None:
            layout, own = changed
        sums = sums or [None] * (len(layout.params) + len(own))
        # Scaled losses, or half precision, times weights above 1 (those of small gradients are in the hundreds) would
        # overflow: the largest weight waits until the scale is off.
        scaled = tasks.scale is not None or any(r is not None and tasks.dtype_of(r).itemsize < 4 for r in tasks.roots)
        later = [w.abs().max().clamp_min(1.0) if scaled else torch.ones_like(w[0]) for w in (weights, own_weights)]
        shared_seeds, own_seeds = weights / later[0] * part, own_weights / later[1] * part
        shared_grads = combined_backward(tasks, list(shared_seeds), layout.params, retain_graph=bool(own))
        own_grads = combined_backward(tasks, list(own_seeds), own)
        for k, grad in enumerate([*shared_grads, *own_grads]):
            if grad is not None:
                if scaled:
                    most = later[k >= len(layout.params)]
                    grad = like(grad, local(grad) * most.to(grad.device, grad.dtype))
                so_far = sums[k]
                sums[k] = grad if so_far is None else so_far + grad
        names = tasks.names
        values.append(tasks.values)
        del tasks
    m = len(layout.params)
    result = TaskGradients(layout.buffer(1).zero_(), {}, {k for k in range(m) if sums[k] is not None})
    for k in result.reached:
        layout.view(result.matrix[0], k).copy_(_dense(sums[k]))
    result.own = {id(p): {0: grad} for p, grad in zip(own, sums[m:], strict=True) if grad is not None}
    return replace(_averaged(names, values, layout, own, result, 1, group), weights=weights)


def _dense(grad: Tensor | None) -> Tensor:
    if grad is None:
        raise RuntimeError("expected a gradient")
    return local(grad.to_dense() if grad.is_sparse else grad)

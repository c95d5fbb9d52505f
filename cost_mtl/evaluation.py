"""One evaluation of the closure: losses and all gradients, micro-batches and processes averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl._torch.autocast import Autocast
from cost_mtl._torch.dtensor import is_sharded, like, local, pieces_group
from cost_mtl._torch.frameworks import refuse_accumulation
from cost_mtl.distributed.collectives import mean_, mean_own_, union
from cost_mtl.distributed.consistency import agree_on_tasks, communicates, refusing_foreign_wrappers
from cost_mtl.distributed.group import without_reducer
from cost_mtl.distributed.shares import Share, scatter_mean_
from cost_mtl.gradients.backward import TaskGradients, collect, combined_backward
from cost_mtl.gradients.graph import other_parameters, refuse_reentrant_checkpoints
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.losses import TaskLosses, split_losses
from cost_mtl.parameters import Trainable, warn_about_others
from cost_mtl.step.warnings import warn_about_constants


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
        named: whether the closure named its tasks.
        graphs: for each task, whether a loss of it had a graph, on any process.
        weights: None; or the weights [K] of an earlier step that the gradients were combined with: G then has one row,
            and the other parameters' gradients count as task 0's.
        pieces: the process group over which the gradients are in pieces (``fully_shard``), or None.
        share: the columns of G that are averaged on this process; None: all of them.
    """

    names: tuple[str, ...]
    losses: Tensor
    layout: Layout
    gradients: TaskGradients
    named: bool = False
    graphs: tuple[bool, ...] = ()
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
    known: Iterable[str] = (),
    reused: Reused | None = None,
    look_closely: bool = False,
    in_teleport: AbstractContextManager[None] | None = None,
) -> Evaluation:
    """Losses and per-task gradients; the closure of each micro-batch is called once.

    Args:
        layout: the shared parameters.
        own: the other trainable parameters.
        trainable: finds them again where the closure changes ``requires_grad``.
        out: buffer for G.
        single: with one task nothing is shared: treat all parameters as its own.
        known: tasks seen in earlier steps: one task beside them is not alone, it is the one that has labels here.
        reused: weights to combine the losses with before the backward pass, where they cover the tasks.
        look_closely: for the first evaluation: refuse what would go wrong silently.
        in_teleport: the tasks are known, and this context makes the failure of one process everyone's.
    """
    values: list[Tensor] = []
    tasks: TaskLosses | None = None
    result: TaskGradients | None = None
    combined: _Combined | None = None
    graphs: set[int] = set()
    if in_teleport is not None:
        found = run(thunks, model)
    else:
        found = _checked(thunks, model, [*layout.params, *own], group, look_closely=look_closely)
    with in_teleport or nullcontext():
        for tasks in found:
            changed = None if trainable is None else trainable.after(tasks, first=not values)
            if changed is not None:
                layout, own = changed
            if single and layout.params and is_alone(tasks, known):
                own, layout = [*layout.params, *own], Layout(())
            if reused is not None and not values and reused.covers(tasks.names):
                combined = _Combined.start(reused, tasks.names, layout, own, thunks)
            if look_closely and not values and not any(map(is_sharded, (*layout.params, *own))):
                warn_about_others(other_parameters(tasks.roots, [*layout.params, *own]))
                warn_about_constants(tasks)
            if combined is not None:
                combined.add(tasks)
            else:
                result = collect(tasks, layout, own, out=out, factor=1.0 / len(thunks), add_to=result)
                if look_closely and len(result.reached) + len(result.own) < len(layout.params) + len(own):
                    refuse_reentrant_checkpoints(tasks.roots)
            names, named = tasks.names, tasks.named
            graphs |= {i for i, root in enumerate(tasks.roots) if root is not None}
            values.append(tasks.values)
            del tasks
    if not values:
        raise ValueError("closure: expected at least one, got an empty sequence")
    gradients = combined.result() if combined is not None else result
    if gradients is None:
        raise RuntimeError("expected gradients")
    found_graphs = tuple(i in graphs for i in range(len(names)))
    weights = None if combined is None else combined.weights
    now = Evaluation(names, mean_losses(values, group), layout, gradients, named, found_graphs, weights)
    return _averaged(now, own, group, in_shares=combined is None and in_teleport is None)


def is_alone(tasks: TaskLosses, known: Iterable[str]) -> bool:
    """Whether there is one task, and never were others (as far as names tell)."""
    return len(tasks) == 1 and not (tasks.named and set(known) - set(tasks.names))


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


def _averaged(now: Evaluation, own: Sequence[Tensor], group: Any, *, in_shares: bool) -> Evaluation:
    """The evaluation, averaged over the processes (FSDP has averaged sharded gradients itself); its losses are."""
    layout, result, share, graphs = now.layout, now.gradients, None, now.graphs
    if group is not None:
        if layout.pieces_group is None:
            share = scatter_mean_(result.matrix, group) if in_shares else None
            if not in_shares:
                mean_(result.matrix, group)
        graphs = _fill_gaps(layout, own, result, 1 if now.weights is not None else len(now.names), graphs, group)
    return replace(now, graphs=graphs, pieces=pieces_group([*layout.params, *own]), share=share)


def _fill_gaps(
    layout: Layout, own: Sequence[Tensor], result: TaskGradients, tasks: int, graphs: tuple[bool, ...], group: Any
) -> tuple[bool, ...]:
    """What some process has a gradient of, all have; the unshared ones are averaged. Which tasks had a graph on any
    process is returned."""
    params = [*layout.params, *own]
    if not params:
        return graphs
    m, K = len(layout.params), len(graphs)
    flags = torch.zeros(K + m + len(own) * tasks)
    flags[:K] = torch.tensor(graphs)
    flags[[K + k for k in sorted(result.reached)]] = 1.0
    for r, p in enumerate(own):
        for task in result.own.get(id(p), {}):
            flags[K + m + r * tasks + task] = 1.0
    found = union(flags.to(params[0].device), group).nonzero().flatten().tolist()
    result.reached = {k - K for k in found if K <= k < K + m}
    places = [k - K - m for k in found if k >= K + m]
    mean_own_(result.own, [(own[k // tasks], k % tasks) for k in places], group)
    return tuple(i in set(found) for i in range(K))


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

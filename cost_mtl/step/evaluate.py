"""One evaluation of the closure: losses and all gradients, micro-batches and processes averaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl._torch.dtensor import is_sharded, pieces_group
from cost_mtl.distributed.collectives import mean_, mean_own_, union
from cost_mtl.distributed.consistency import agree_on_tasks, communicates, refusing_foreign_wrappers
from cost_mtl.distributed.shares import Share, scatter_mean_
from cost_mtl.gradients.backward import TaskGradients, collect
from cost_mtl.gradients.graph import other_parameters, refuse_reentrant_checkpoints
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.losses import TaskLosses, no_graph
from cost_mtl.step.closure import Thunk, run
from cost_mtl.step.combined import Reused, _Combined
from cost_mtl.step.parameters import Parameters
from cost_mtl.step.warnings import warn_about_constants, warn_about_others


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

    def gathered(self) -> Evaluation:
        """With all columns of G averaged."""
        if self.share is None:
            return self
        self.share.gather_all_(self.gradients.matrix)
        return replace(self, share=None)


def mean_losses(values: Sequence[Tensor], group: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Mean over micro-batches and processes, [K]."""
    total = values[0].to(dtype or values[0].dtype)
    if len(values) > 1:
        total = torch.stack([v.to(total.dtype) for v in values]).mean(dim=0)
    return total.clone() if group is None else mean_(total.clone(), group)


def measure(
    thunks: Sequence[Thunk],
    model: nn.Module,
    layout: Layout,
    own: Sequence[Tensor],
    group: Any,
    *,
    parameters: Parameters | None = None,
    out: Tensor | None = None,
    single: bool = True,
    known: Iterable[str] = (),
    reused: Reused | None = None,
    first_step: bool = False,
    in_teleport: AbstractContextManager[None] | None = None,
) -> Evaluation:
    """Losses and per-task gradients; the closure of each micro-batch is called once.

    Args:
        layout: the shared parameters.
        own: the other trainable parameters.
        parameters: finds them again where the closure changes ``requires_grad``.
        out: buffer for G.
        single: with one task nothing is shared: treat all parameters as its own.
        known: tasks seen in earlier steps: one task beside them is not alone, it is the one that has labels here.
        reused: weights to combine the losses with before the backward pass, where they cover the tasks.
        first_step: for the first evaluation: refuse what would go wrong silently.
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
        found = _checked(thunks, model, [*layout.params, *own], group, first_step=first_step)
    with in_teleport or nullcontext():
        for tasks in found:
            if parameters is not None and parameters.after(tasks, first=not values):
                layout, own = parameters.layout, parameters.own
            if single and layout.params and is_alone(tasks, known):
                own, layout = [*layout.params, *own], Layout(())
            if reused is not None and not values and reused.covers(tasks.names):
                combined = _Combined.start(reused, tasks.names, layout, own, thunks)
            if first_step and not values and not any(map(is_sharded, (*layout.params, *own))):
                warn_about_others(other_parameters(tasks.roots, [*layout.params, *own]))
                warn_about_constants(tasks)
            if combined is not None:
                combined.add(tasks)
            else:
                result = collect(tasks, layout, own, out=out, factor=1.0 / len(thunks), add_to=result)
                if first_step and len(result.reached) + len(result.own) < len(layout.params) + len(own):
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
    return len(tasks.names) == 1 and not (tasks.named and set(known) - set(tasks.names))


def _checked(
    thunks: Sequence[Thunk], model: nn.Module, params: Sequence[Tensor], group: Any, *, first_step: bool
) -> Iterator[TaskLosses]:
    """:func:`run`, with a look at whether the processes' losses can be averaged."""
    if first_step:
        _refuse_hooks(params)
    device = params[0].device if params else torch.device("cpu")
    lockstep = group is not None and communicates(model, params)
    foreign = refusing_foreign_wrappers(model) if first_step and group is not None else nullcontext()
    with foreign:
        unseen = True
        for tasks in run(thunks, model):
            if group is None and not tasks.has_graph:
                raise ValueError(no_graph(tasks))
            if group is not None and (unseen or lockstep):
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

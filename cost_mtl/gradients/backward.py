"""Backward passes: task gradients into the rows of G, or one pass for a weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from cost_mtl._torch.autocast import no_autocast
from cost_mtl._torch.dtensor import local, sharded_among
from cost_mtl._torch.undo import all_or_nothing, undoing
from cost_mtl.base import Losses
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.losses import TaskLosses, split_losses


def backward(
    roots: Sequence[Tensor | GradientEdge],
    seeds: Sequence[Tensor],
    *,
    inputs: Sequence[Tensor] | None,
    retain_graph: bool,
) -> None:
    """One backward pass from several roots, outside of autocast; ``seeds[i]`` [] is the factor of ``roots[i]``.

    Raises:
        RuntimeError: the graph was freed before.
    """
    try:
        torch.autograd.backward(list(roots), list(seeds), retain_graph=retain_graph, inputs=inputs)  # type: ignore[arg-type]
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise RuntimeError(
            "closure: expected losses with their graph, got a graph that was freed before COST's backward passes. "
            "Does it call backward() itself, or return losses that are computed outside of it? It should "
            "compute the K losses in each call and return them; step makes the backward passes"
        ) from error


@dataclass
class TaskGradients:
    """Per-task gradients of one evaluation.

    Attributes:
        matrix: G [K, m] of the shared parameters.
        own: for each other parameter that was reached, task -> gradient.
        reached: indices (into the layout) of the shared parameters that some task reached.
    """

    matrix: Tensor
    own: dict[int, dict[int, Tensor]]
    reached: set[int]


@all_or_nothing
def task_gradients(losses: Losses, shared: Iterable[Tensor], *, out: Tensor | None = None) -> Tensor:
    """Gradient of every loss with respect to the shared parameters.

    The graph is freed afterwards. ``.grad`` of all parameters is left as it was.

    Args:
        losses: K scalar losses: a sequence or mapping of scalar tensors (preferred: tasks stay apart), or a tensor
            [K]; one made by ``torch.stack`` is taken apart again.
        shared: the parameters; their entries make up the m columns, in this order.
        out: optional buffer [K, m] to write into.

    Returns:
        G [K, m], float32 (float64 where a parameter is). A row, or a part of one, is zero where a task does not reach
        the parameter.

    Raises:
        TypeError, ValueError: ``losses`` is none of the above, or none of them has a graph; ``shared`` is empty.

    Example:
        >>> shared = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> G = cost_mtl.task_gradients([shared.sum(), (shared**2).sum()], [shared])
        >>> G
        tensor([[1., 1.],
                [2., 4.]])
    """
    params = tuple(shared)
    if not params:
        raise ValueError("shared: expected at least one parameter, got an empty iterable")
    tasks = split_losses(losses)
    return collect(tasks, Layout(params), (), out=out).matrix


def collect(
    tasks: TaskLosses,
    layout: Layout,
    own: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    factor: float = 1.0,
    add_to: TaskGradients | None = None,
) -> TaskGradients:
    """K backward passes. Shared gradients go to one row each, all others are kept apart by task.

    Each gradient is moved into its row of G as soon as autograd has finished it, by a hook, so that no second full
    gradient is ever alive: the peak is the one [K, m] buffer.

    Args:
        factor: every gradient is multiplied by it (1 / number of micro-batches).
        add_to: gradients of earlier micro-batches to add to (in place).
    """
    seeds = tasks.seeds(factor)
    result = add_to or TaskGradients(layout.buffer(len(tasks.names), out), {}, set())
    last = max((i for i, root in enumerate(tasks.roots) if root is not None), default=-1)
    with Capture(tasks, layout, own, result, adding=add_to is not None) as capture, no_autocast():
        for i, (root, seed) in enumerate(zip(tasks.roots, seeds, strict=True)):
            capture.begin(i)
            if root is not None and seed is not None:
                capture.backward([root], [seed], retain_graph=i < last)
            capture.end()
    return result


def _no_hook(p: Tensor) -> None:
    pass


class Capture:
    """While active, gradients that reach ``.grad`` of the parameters are taken from there. ``.grad`` itself is empty
    meanwhile (so that autograd hands over its tensor instead of adding) and is given back at the end."""

    def __init__(
        self, tasks: TaskLosses, layout: Layout, own: Sequence[Tensor], result: TaskGradients, *, adding: bool = False
    ) -> None:
        self.tasks, self.layout, self.result, self.adding = tasks, layout, result, adding
        self.inputs = [*layout.params, *own]
        self.sharded = sharded_among(self.inputs)
        self.targets = layout.views_of_rows(result.matrix) if layout.params else []
        self.unscale = None if tasks.scale is None else tasks.scale.reciprocal()

        self.active = False
        self.hook: Callable[[Tensor], None] = self._take  # one object, by which it is found again
        self.held: list[Tensor | None] = []

    def __enter__(self) -> Capture:
        _refuse_frozen(self.inputs)
        self.held = [p.grad for p in self.inputs]
        self.undoing = undoing(self._leave).__enter__()
        self.active = True
        for p in self.inputs:
            p.grad = None
            p.register_post_accumulate_grad_hook(self.hook)
        return self

    def __exit__(self, *exception: object) -> None:
        self.undoing.close()
        self.hook = _no_hook  # no cycle of references stays

    def _leave(self) -> None:
        self.active = False
        for p, grad in zip(self.inputs, self.held, strict=True):
            # Not by handles: one may be missing where the registration was interrupted.
            hooks = getattr(p, "_post_accumulate_grad_hooks", None) or {}
            for key in [key for key, hook in hooks.items() if hook is self.hook]:
                hooks.pop(key, None)
            p.grad = grad

    def begin(self, task: int) -> None:
        """Gradients are task's from here on."""
        self.task = task
        self.seen: set[int] = set()

    def end(self) -> None:
        """The task's row is complete: parameters that it did not reach have gradient zero."""
        if not self.adding:
            for k in range(len(self.layout.params)):
                if k not in self.seen:
                    self.targets[self.task][k].zero_()
        self.result.reached |= self.seen

    def backward(self, roots: Sequence[Tensor | GradientEdge], seeds: Sequence[Tensor], *, retain_graph: bool) -> None:
        """One backward pass from several roots; the loss scale that is in the seeds is taken off again."""
        # FSDP2's parameters are not in the graph themselves: they get .grad at the end of a full backward pass.
        backward(roots, seeds, inputs=None if self.sharded else self.inputs, retain_graph=retain_graph)
        for p in self.sharded:
            self._take(p)

    def _take(self, p: Tensor) -> None:
        if not self.active:
            return
        grad, p.grad = p.grad, None
        if grad is None:
            return
        if self.unscale is not None:
            piece = local(grad)
            piece.mul_(self.unscale.to(piece.device, piece.dtype))
        k = self.layout.index.get(id(p))
        if k is None:
            grads = self.result.own.setdefault(id(p), {})
            grads[self.task] = grads[self.task] + grad if self.task in grads else grad
            return
        self.seen.add(k)
        grad = grad.to_dense() if grad.is_sparse else grad
        if self.sharded:
            grad = local(grad)
        target = self.targets[self.task][k]
        target.add_(grad) if self.adding else target.copy_(grad)


def _refuse_frozen(params: Sequence[Tensor]) -> None:
    frozen = [list(p.shape) for p in params if not p.requires_grad]
    if frozen:
        raise ValueError(f"shared: expected parameters with requires_grad=True, got {len(frozen)} without (shapes "
                         f"{frozen[:5]}): they get no gradient")  # fmt: skip


def combined_backward(
    tasks: TaskLosses, weights: Sequence[float | Tensor], inputs: Sequence[Tensor], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """Gradient of sum_i weights[i] L_i in one backward pass; None for an input that no task reaches."""
    roots = [(root, w) for root, w in zip(tasks.roots, weights, strict=True) if root is not None]
    result = TaskGradients(torch.empty(0), {}, set())
    if inputs and roots:
        seeds = [tasks.seed(root, w) for root, w in roots]
        with Capture(tasks, Layout(()), inputs, result) as capture, no_autocast():
            capture.begin(0)
            capture.backward([root for root, _ in roots], seeds, retain_graph=retain_graph)
    return [result.own[id(p)][0] if id(p) in result.own else None for p in inputs]


def trainable(params: Iterable[Tensor]) -> list[nn.Parameter]:
    """The distinct parameters that need a gradient, in order."""
    seen: dict[int, nn.Parameter] = {}
    for p in params:
        if p.requires_grad:
            seen.setdefault(id(p), p)  # type: ignore[arg-type]
    return list(seen.values())

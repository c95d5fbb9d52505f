"""What a closure returned, taken apart into K separate roots of the autograd graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from cost_mtl._torch.frameworks import advice

EXPECTED = (
    "closure: expected K losses with their graph (a tensor [K], a sequence of scalar tensors or a mapping "
    "name -> scalar tensor)"
)


@dataclass(frozen=True)
class TaskLosses:
    """K losses of one evaluation.

    Attributes:
        names: K task names.
        values: detached losses [K].
        roots: where each task's backward pass starts; None for a loss without a graph (its gradient is zero).
        scale: loss scale []: backward passes start with it, and it is taken off the gradients again. None: 1.
        named: whether the closure named them; if not, the names are places in a list.
    """

    names: tuple[str, ...]
    values: Tensor
    roots: tuple[Tensor | GradientEdge | None, ...]
    scale: Tensor | None = None
    named: bool = False

    def __len__(self) -> int:
        return len(self.names)

    @property
    def has_graph(self) -> bool:
        """Whether any of the losses has a graph."""
        return any(root is not None for root in self.roots)

    def dtype_of(self, root: Tensor | GradientEdge) -> torch.dtype:
        """Of the loss that a root stands for."""
        return root.dtype if isinstance(root, Tensor) else self.values.dtype

    def seed(self, root: Tensor | GradientEdge, factor: float | Tensor) -> Tensor:
        """The scalar that a backward pass from ``root`` starts with: ``factor``, scaled, in the loss's own dtype."""
        like = root if isinstance(root, Tensor) else self.values
        if self.scale is not None:
            factor = self.scale * factor
        if isinstance(factor, Tensor):
            return factor.to(like.device, like.dtype)
        return torch.full((), factor, dtype=like.dtype, device=like.device)

    def seeds(self, factor: float) -> list[Tensor | None]:
        """:meth:`seed` of every root; None where a task has none."""
        return [None if root is None else self.seed(root, factor) for root in self.roots]


def split_losses(losses: object, *, scale: Tensor | None = None, require_graph: bool = True) -> TaskLosses:
    """Take apart whatever a closure may return (:data:`cost_mtl.base.Losses`).

    A tensor that ``torch.stack`` made of K scalars is taken back to the K scalars: a backward pass through the stack
    would walk every task's graph with zeros, turn ``None`` gradients into zeros, and leak one task's NaN into the
    others (0 * NaN). Any other tensor [K] is unbound, with just these drawbacks.

    Args:
        scale: loss scale [], see :class:`TaskLosses`.
        require_graph: one of the losses must have a graph.

    Raises:
        TypeError: not a tensor, sequence or mapping of tensors.
        ValueError: a wrong shape, no loss at all, or none that needs a gradient.
    """
    if isinstance(losses, Tensor):
        tasks = _from_tensor(losses)
    elif isinstance(losses, Mapping):
        tasks = replace(_from_scalars([str(name) for name in losses], list(losses.values())), named=True)
    elif isinstance(losses, Sequence) and not isinstance(losses, str | bytes):
        tasks = _from_scalars([str(i) for i in range(len(losses))], list(losses))
    else:
        raise TypeError(f"{EXPECTED}, got {_describe(losses)}")
    if require_graph and not tasks.has_graph:
        raise ValueError(no_graph(tasks))
    return tasks if scale is None else replace(tasks, scale=scale)


def no_graph(tasks: TaskLosses) -> str:
    """The error message for losses without a graph."""
    return (
        f"{EXPECTED}, got {len(tasks)} of which none has a graph (requires_grad is False): were they detached, turned "
        f"into numbers, or computed under no_grad?{advice()}"
    )


def _describe(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _from_scalars(names: list[str], scalars: list[object]) -> TaskLosses:
    if not scalars:
        raise ValueError(f"{EXPECTED}, got none")
    if len(set(names)) < len(names):
        raise ValueError(f"{EXPECTED}, got two tasks of the same name among {names}")
    roots: list[Tensor] = []
    for name, scalar in zip(names, scalars, strict=True):
        if not isinstance(scalar, Tensor):
            raise TypeError(f"{EXPECTED}, got {_describe(scalar)} as the loss of task {name!r}")
        if not scalar.dtype.is_floating_point:
            raise TypeError(f"{EXPECTED}, got a tensor of {scalar.dtype} (a metric?) as the loss of task {name!r}")
        if scalar.numel() != 1:
            raise ValueError(f"{EXPECTED}, got {_describe(scalar)} as the loss of task {name!r}, not a scalar: reduce "
                             "it to one number first, e.g. with .mean()")  # fmt: skip
        roots.append(scalar if scalar.dim() == 0 else scalar.reshape(()))
    device = next((root.device for root in roots if root.requires_grad), roots[0].device)
    values = torch.stack([root.detach().to(device, _real_dtype(root)) for root in roots])
    return TaskLosses(tuple(names), values, tuple(root if root.requires_grad else None for root in roots))


def _real_dtype(loss: Tensor) -> torch.dtype:
    # Losses of mixed precision are stacked for the report; float64 is kept, everything narrower becomes float32.
    return torch.float64 if loss.dtype == torch.float64 else torch.float32


def _from_tensor(losses: Tensor) -> TaskLosses:
    if losses.dim() > 1 or losses.numel() == 0:
        raise ValueError(f"{EXPECTED}, got {_describe(losses)}")
    if not losses.dtype.is_floating_point:
        raise TypeError(f"{EXPECTED}, got a tensor of {losses.dtype}")
    names = tuple(str(i) for i in range(losses.numel()))
    if not losses.requires_grad:
        return TaskLosses(names, losses.detach().reshape(-1), (None,) * losses.numel())
    if losses.dim() == 0:
        return TaskLosses(names, losses.detach().reshape(1), (losses,))
    edges = _unstack(losses)
    roots = losses.unbind() if edges is None else edges
    return TaskLosses(names, losses.detach(), tuple(roots))


def _unstack(losses: Tensor) -> list[GradientEdge | None] | None:
    """The K edges below a ``torch.stack``, None where the tensor is not directly one."""
    node = losses.grad_fn
    if node is None or node.name() != "StackBackward0" or len(node.next_functions) != losses.numel():
        return None
    return [None if below is None else GradientEdge(below, nr) for below, nr in node.next_functions]

"""What the autograd graph of the losses tells: the parameters it reaches, and what it can't be used with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node


def refuse_reentrant_checkpoints(roots: Sequence[Tensor | GradientEdge | None]) -> None:
    """Reentrant activation checkpointing hides its parameters from the graph, so that a backward pass to chosen
    parameters silently gives them no gradient.

    Raises:
        RuntimeError: the graph has such a node.
    """
    if any(node.name() == "CheckpointFunctionBackward" for node in _graph(roots)):
        raise RuntimeError(
            "model: expected non-reentrant activation checkpointing, got reentrant, under which parameters get no task "
            "gradients: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )


def other_parameters(roots: Sequence[Tensor | GradientEdge | None], known: Iterable[Tensor]) -> list[nn.Parameter]:
    """Parameters that the losses reach beside the known ones."""
    ids = {id(p) for p in known}
    return [leaf for k, leaf in leaves(roots).items() if k not in ids and isinstance(leaf, nn.Parameter)]


def leaves(roots: Sequence[Tensor | GradientEdge | None]) -> dict[int, Tensor]:
    """The tensors that a backward pass from the roots ends at, by id."""
    found = (getattr(node, "variable", None) for node in _graph(roots))
    direct = (root for root in roots if isinstance(root, Tensor) and root.is_leaf)
    return {id(leaf): leaf for leaf in (*direct, *found) if leaf is not None}


def _graph(roots: Sequence[Tensor | GradientEdge | None]) -> Iterator[Node]:
    """Every node of the graph."""
    nodes = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots if root is not None]
    seen: set[Node] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes.extend(below for below, _ in node.next_functions)

"""What is probably a mistake, and is warned of once."""

from __future__ import annotations

import warnings

from cost_mtl.gradients.losses import TaskLosses


def warn_about_constants(tasks: TaskLosses) -> None:
    """Say that a value without a graph counts as a task: a metric among the losses, probably. A task without labels,
    given as a constant zero, is no mistake."""
    for name, root, value in zip(tasks.names, tasks.roots, tasks.values.tolist(), strict=True):
        if root is None and value != 0:
            warnings.warn(
                f"closure: task {name!r} has no graph (requires_grad is False): nothing is learned from it, but it "
                "counts as a task. A metric? Leave it out of what the closure returns",
                stacklevel=8,
            )

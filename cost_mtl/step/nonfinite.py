"""Which tasks have a loss or a gradient that is not finite, and weights that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cost_mtl.distributed.collectives import union
from cost_mtl.gradients.reductions import entries_of
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.host_read import HostRead


def bad_tasks(now: Evaluation, host: HostRead, group: Any = None) -> list[int]:
    """Tasks whose loss or gradient is not finite, or whose gradient is too long for its square to be a number (1e154 in
    float64): nothing can be told from such a Gramian."""
    if host.finite:
        return []
    found = set(not_finite(now))
    if not found and now.weights is None and now.layout.params:
        found = set(torch.nonzero(~torch.isfinite(host.gramian.diagonal())).flatten().tolist())
    flags = torch.tensor([i in found for i in range(len(now.names))], dtype=torch.uint8, device=now.losses.device)
    return union(union(flags, now.pieces), group).nonzero().flatten().tolist()


def complaint(now: Evaluation, bad: Sequence[int], step: int) -> str:
    """The message for tasks that are not finite."""
    which = ", ".join(f"task {now.names[i]!r} (loss {float(now.losses[i]):g})" for i in bad)
    return (
        f"not finite: the loss or a gradient of {which} in step {step}. Parameters and optimizer state are as before; "
        "on_nonfinite='skip' leaves such steps out"
    )


def not_finite(evaluation: Evaluation) -> list[int]:
    """Tasks that have a loss or a gradient which is not finite, looked up entry by entry: the slow, exact answer."""
    if evaluation.weights is not None:
        return _not_finite_combined(evaluation)
    bad = []
    for i in range(len(evaluation.names)):
        grads = [by_task[i] for by_task in evaluation.gradients.own.values() if i in by_task]
        parts = [evaluation.losses[i], evaluation.gradients.matrix[i], *grads]
        if not all(bool(torch.isfinite(entries_of(p)).all()) for p in parts):
            bad.append(i)
    return bad


def _not_finite_combined(evaluation: Evaluation) -> list[int]:
    # The tasks' gradients were never apart: a loss tells on its task, a gradient on all of them.
    bad = torch.nonzero(~torch.isfinite(evaluation.losses)).flatten().tolist()
    grads = [evaluation.gradients.matrix, *(by_task[0] for by_task in evaluation.gradients.own.values())]
    fine = all(bool(torch.isfinite(entries_of(g)).all()) for g in grads)
    return bad if bad or fine else list(range(len(evaluation.names)))

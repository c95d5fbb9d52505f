"""Which combined gradients do not fit into the parameters' dtypes: the slow, exact answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl._torch.dtensor import local
from cost_mtl.distributed.collectives import union
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.parameters import names_of
from cost_mtl.step.write_grads import Reach


def overflowing(found: Sequence[tuple[Tensor, Tensor | None]], scale: float, now: Evaluation, group: Any) -> list[int]:
    """Indices of (parameter, gradient) pairs whose gradient, times the loss scale, is not finite; looked up entry by
    entry, in one host read. The same on all processes."""
    flags = []
    device = now.losses.device
    for _, grad in found:
        values = torch.zeros(1, device=device) if grad is None else local(grad)
        values = values.coalesce().values() if values.is_sparse else values
        flags.append((~torch.isfinite(values * scale if scale != 1.0 else values)).any().to(device, torch.uint8))
    if not flags:
        return []
    return union(union(torch.stack(flags), now.pieces), group).nonzero().flatten().tolist()


def complaint_of_overflow(
    now: Evaluation, reach: Reach, params: Sequence[Tensor], weights: Tensor, model: nn.Module, step: int
) -> str:
    """The message for gradients that do not fit."""
    tasks: set[int] = set()
    for p in params:
        by_task = now.gradients.own.get(id(p))
        least = min(reach.limit, max(reach.parts)) / len(reach.parts)
        tasks |= set(by_task) if by_task else {i for i, part in enumerate(reach.parts) if part >= least}
    if now.weights is not None or not tasks:
        tasks = set(range(len(now.names)))
    which = ", ".join(f"task {now.names[i]!r} (weight {float(weights[i]):g})" for i in sorted(tasks))
    names = names_of(model, params)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in params})
    return (
        f"not finite: the combined gradient of {', '.join(names[:3])}{more} does not fit into {' or '.join(kinds)} in "
        f"step {step}, although every loss and every task's gradient is finite: {which}. Parameters and optimizer "
        "state are as before; on_nonfinite='skip' leaves such steps out"
    )

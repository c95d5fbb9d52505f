"""Does a combined gradient fit into the parameters' dtypes? From numbers that the host has already, where they tell.

A combination of finite gradients can overflow: weights of 1e39, two float16 gradients of 4e4. The bounds
|d_j| <= sum_i |w_i| ||g_i|| and |sum_i g_ij| <= sqrt(K) ||(g_1, ..., g_K)|| rule it out for nearly every step without
another look at the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl._torch.dtensor import local
from cost_mtl.distributed.collectives import union
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.host_read import HostRead
from cost_mtl.step.parameters import names_of

ROOM = 0.5
"""Share of a dtype's range that a bound may reach: rounding is not a matter then."""

ONE_PASS = 1e-15, 1e15
"""Weights within this range can be the factors of one backward pass in float32."""


@dataclass(frozen=True)
class Reach:
    """How far the combined gradients of a step can reach.

    Attributes:
        parts: bound on what each task contributes to an entry of d, [K].
        shared: bound on the entries of d.
        own: bound on the entries of the other parameters' gradients.
        limit: what fits into every parameter's dtype, and is still finite times the loss scale.
        wide: weights or products need more than the range of G's dtype.
    """

    parts: tuple[float, ...]
    shared: float
    own: float
    limit: float
    wide: bool

    @classmethod
    def of(cls, now: Evaluation, host: HostRead, weights: Tensor, params: Iterable[Tensor], *, heads: bool) -> Reach:
        """From the host's numbers alone.

        Args:
            weights: w [K], float64, on the CPU.
            params: all parameters that get a gradient.
            heads: the own gradients are multiplied by the weights, too.
        """
        sizes = [abs(w) for w in weights.tolist()]  # plain numbers: a dozen small tensors would cost more
        norms = [math.sqrt(max(0.0, square)) for square in host.gramian.diagonal().tolist()]
        if now.weights is None:
            parts = [w * n for w, n in zip(sizes, norms, strict=True)] if now.layout.params else [0.0] * len(sizes)
            own = host.own_norm * math.sqrt(len(sizes)) * (max(sizes) if heads else 1.0)
        else:  # combined already
            parts, own = norms or [0.0], host.own_norm
        limit = min((torch.finfo(dtype).max for dtype in {p.dtype for p in params}), default=math.inf)
        limit *= ROOM / host.scale
        kind = torch.finfo(now.layout.dtype)
        odd = any(w > ROOM * kind.max or 0 < w < kind.tiny for w in sizes)
        shared = sum(parts)
        return cls(tuple(parts), shared, own, limit, now.weights is None and (odd or not shared <= ROOM * kind.max))

    def fits(self, max_norm: float | None) -> bool:
        """Whether the bounds alone say that everything fits."""
        shared = self.shared if max_norm is None else min(self.shared, max_norm)
        return shared <= self.limit and self.own <= self.limit


def fit_one_pass(weights: Tensor) -> bool:
    """Whether weights [K] on the CPU can be the factors of one backward pass."""
    return all(w == 0 or ONE_PASS[0] <= abs(w) <= ONE_PASS[1] for w in weights.tolist())


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

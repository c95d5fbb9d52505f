"""From weights and task gradients to ``.grad``.

Does the combination fit into the parameters' dtypes? Numbers that the host has already tell in nearly every step. A
combination of finite gradients can overflow: weights of 1e39, two float16 gradients of 4e4. The bounds
|d_j| <= sum_i |w_i| ||g_i|| and |sum_i g_ij| <= sqrt(K) ||(g_1, ..., g_K)|| rule it out without another look at the
device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cost_mtl._torch.dtensor import like, local, sum_pieces_
from cost_mtl.gradients.backward import TaskGradients
from cost_mtl.gradients.gramian import combine
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.reductions import LEAST, MOST, norm
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.host_read import HostRead
from cost_mtl.step.weigh import Weights, is_weighed

Found = list[tuple[Tensor, Tensor | None]]
"""Parameters and what is to become their ``.grad``."""


ROOM = 0.5
"""Share of a dtype's range that a bound may reach: rounding is not a matter then."""


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

    def exceeds_squares(self, max_norm: float | None) -> bool:
        """Whether the squares of d, or of what it is clipped to, may leave the range of float32."""
        return not LEAST < self.shared < MOST or (max_norm is not None and not LEAST < max_norm < MOST)

    def fits(self, max_norm: float | None) -> bool:
        """Whether the bounds alone say that everything fits."""
        shared = self.shared if max_norm is None else min(self.shared, max_norm)
        return shared <= self.limit and self.own <= self.limit


@dataclass(frozen=True)
class NewGrads:
    """What is to become ``.grad``.

    Attributes:
        grads: (parameter, gradient) pairs.
        direction: d [m], clipped; None where nothing is shared.
        reach: bounds on the entries; fits: whether all of it is certain to fit into the parameters' dtypes.
    """

    grads: Found
    direction: Tensor | None
    reach: Reach
    fits: bool


def new_grads(
    now: Evaluation, host: HostRead, weights: Weights, own: Sequence[Tensor], *, heads: str, max_norm: float | None
) -> NewGrads:
    """G^T w for the shared parameters, their own tasks' gradients for the others. G's first row is used up by it.

    Args:
        own: the parameters that are not shared; heads: ``"weighted"``: their gradients are times the tasks' weights.
    """
    weighed = weights.weighed
    own_weights = weighed.weights if heads == "weighted" and is_weighed(now) else None
    reach = Reach.of(now, host, weights.values, [*now.layout.params, *own], heads=own_weights is not None)
    grads = own_grads(own, now.gradients, own_weights, wide=reach.wide or reach.own > reach.limit)
    d = _direction(now, weights, reach, max_norm) if now.layout.params else None
    if d is not None:
        grads += shared_grads(now.layout, d, now.gradients.reached)
    grads += [(p, grad.detach().to(p.device, p.dtype)) for p, grad in weighed.parameter_grads]
    bounded = not weighed.parameter_grads and weighed.direction is None
    return NewGrads(grads, d, reach, bounded and reach.fits(max_norm))


def _direction(now: Evaluation, weights: Weights, reach: Reach, max_norm: float | None) -> Tensor:
    """d = G^T w [m], clipped."""
    G, given, shrunk = now.gradients.matrix, weights.weighed.direction, 1.0
    if now.weights is not None:
        d = G[0]  # the backward pass has combined them
    elif given is not None:
        if given.shape != G[0].shape:
            raise ValueError(f"weighting: expected a direction of shape {list(G[0].shape)}, got {list(given.shape)}")
        d = given.to(G.dtype)
    else:
        if reach.wide and max_norm is not None and max_norm < reach.shared < math.inf:
            shrunk = max_norm / reach.shared  # what is clipped need not fit before
        w = weights.values * shrunk if reach.wide else weights.weighed.weights
        # In the place of G's first row, which nobody reads after this: another [m] would be the step's peak of memory.
        mine = G if now.share is None else now.share.of(G)
        combine(mine, w, out=mine[0], wide=reach.wide)
        d = G[0] if now.share is None else now.share.gather_(G[0])
    return clip_(d, max_norm, now.pieces, scale=shrunk, exact=reach.exceeds_squares(max_norm))


def clip_(d: Tensor, max_norm: float | None, pieces: Any = None, *, scale: float = 1.0, exact: bool = False) -> Tensor:
    """Scale d [m], or this process's piece of it, in place so that ||d|| <= max_norm, without a host read.

    Args:
        scale: d has been multiplied by it, so that it fits; it is taken off again as far as the norm allows.
        exact: the squares of d leave the range of float32.
    """
    if max_norm is not None and max_norm != math.inf:  # inf / inf would be NaN
        length = norm(d, exact=exact)
        if pieces is not None:
            length = sum_pieces_(length.square(), pieces).sqrt()
        d.mul_((max_norm / length.clamp_min(max_norm * scale)).to(d.dtype))
    return d


def shared_grads(layout: Layout, d: Tensor, reached: set[int]) -> Found:
    """Of the shared parameters: views of d [m], or copies where dtype or device differ. None where no task's graph
    reached the parameter."""
    views = layout.views(d)
    found = [(p, views[k].to(p.device, p.dtype) if k in reached else None) for k, p in enumerate(layout.params)]
    if layout.pieces_group is None:
        return found
    return [(p, None if piece is None else like(p, piece)) for p, piece in found]


def own_grads(own: Sequence[Tensor], gradients: TaskGradients, weights: Tensor | None, *, wide: bool) -> Found:
    """Of the other parameters: the sum of the gradients of the tasks that reach it, times the tasks' weights [K] where
    given.

    Args:
        wide: weights or partial sums may leave the parameters' range.
    """
    return [(p, _summed_up(gradients.own.get(id(p), {}), weights, wide)) for p in own]


def _summed_up(by_task: Mapping[int, Tensor], weights: Tensor | None, wide: bool) -> Tensor | None:
    if not by_task:
        return None
    first = next(iter(by_task.values()))
    if weights is None and len(by_task) == 1:
        return first
    work = _working_dtype(first, wide)
    total: Tensor | None = None
    for task in sorted(by_task):
        grad = by_task[task]
        if work != grad.dtype:
            grad = like(grad, local(grad).to(work))
        if weights is not None:
            grad = like(grad, local(grad) * weights[task].to(grad.device, grad.dtype))
        total = grad if total is None else total + grad
    if total is None or work == first.dtype:
        return total
    return like(first, local(total).to(first.dtype))


def _working_dtype(grad: Tensor, wide: bool) -> torch.dtype:
    """Sums of half precision are taken in float32, and all in float64 where their range asks for it."""
    if grad.is_complex():
        return torch.complex128 if wide else grad.dtype
    if wide and grad.device.type != "mps":
        return torch.float64
    return torch.float32 if grad.dtype.itemsize < 4 else grad.dtype

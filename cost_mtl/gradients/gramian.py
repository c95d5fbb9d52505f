"""The Gramian of the task gradients, what can be read off it, and their combination."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from cost_mtl.gradients.layout import BLOCK

CHUNK = 1024
"""Columns per partial product of a Gramian. One float32 product over millions of columns is off by 0.3 to 0.7 % on CPU;
partial products of this width, summed in float64, are good to 3e-7, also for gradients that came out of bf16, whose
roundings add up (at 8192 columns they reach 4e-6)."""


NOISE = {torch.float32: 3e-7, torch.float64: 1e-14}
"""Rounding error of the entries of :func:`gramian`, relative to ||g_i|| ||g_j||, by the dtype of the products."""


EXACT_NOISE = {torch.float32: 1e-12, torch.float64: 1e-14}
"""The same of :func:`exact_gramian`. For gradients in float32 more than its sums leave (1e-15): the gradients have
errors of 1e-7 to 1e-6 themselves, and the square of a sum of them means nothing below the square of that."""


PRODUCTS = 2**18
"""Most entries of partial products alive at a time: 1 MB."""


def gramian(G: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """M = G G^T, accurate to 1e-6 relative to ||g_i|| ||g_j||, whatever m is.

    Partial products over :data:`CHUNK` columns in G's dtype, summed in float64. Autocast does not apply here.

    Args:
        G: task gradients [K, m].
        dtype: of the result; default G's own.

    Returns:
        M [K, K], symmetric, on G's device.

    Example:
        >>> G = torch.tensor([[1.0, 1.0], [2.0, 4.0]])
        >>> cost_mtl.gramian(G)
        tensor([[ 2.,  6.],
                [ 6., 20.]])
    """
    if G.dim() != 2:
        raise ValueError(f"G: expected task gradients [K, m], got shape {list(G.shape)}")
    wide = torch.float32 if G.device.type == "mps" else torch.float64
    work = G if G.dtype in (torch.float32, torch.float64) else G.float()
    K, m = G.shape
    whole = m - m % CHUNK
    # Many partial products in one call: threads share them, where a single skinny product leaves all but one idle.
    together = max(1, PRODUCTS // max(1, K * K))
    rows = max(1, K) if G.device.type != "cpu" else 4 if K <= 12 else 16  # at a time; K = 11: a fifth less time
    with torch.no_grad(), torch.autocast(G.device.type, enabled=False):
        rest = work[:, whole:]
        M = (rest @ rest.T).to(wide)
        for blocks in work[:, :whole].unflatten(1, (-1, CHUNK)).transpose(0, 1).split(together):
            for i in range(0, K, rows):  # M is symmetric: what is right of the diagonal tiles is not needed
                j = i + rows
                M[i:j, :j] += (blocks[:, i:j] @ blocks[:, :j].mT).sum(dim=0, dtype=wide)
    return (M.tril() + M.tril(-1).T).to(dtype or G.dtype)


def exact_gramian(G: Tensor) -> Tensor:
    """M [K, K] in float64 throughout: for gradients whose squares leave the range of float32 (about 1e-19 to 1e19), and
    for those that cancel so far that the digits of :func:`gramian` do not tell what is left. On G's device, or on the
    CPU where that has no float64 (mps)."""
    device = torch.device("cpu") if G.device.type == "mps" else G.device
    M = torch.zeros(len(G), len(G), dtype=torch.float64, device=device)
    with torch.no_grad(), torch.autocast(G.device.type, enabled=False):
        for part in G.split(BLOCK, dim=1):
            wide = part.to(device).double()
            M += wide @ wide.T
    return M


def gramian_noise(G: Tensor, *, exact: bool = False) -> float:
    """Rounding error of the entries of :func:`gramian` or :func:`exact_gramian`, relative to ||g_i|| ||g_j||."""
    known = EXACT_NOISE if exact else NOISE
    return known[torch.float64 if G.dtype == torch.float64 else torch.float32]


def norms(M: Tensor) -> Tensor:
    """Task gradient norms [K] from the Gramian [K, K]."""
    return M.diagonal().clamp_min(0).sqrt()


def cosines(M: Tensor) -> Tensor:
    """cos(g_i, g_0) [K] with the mean gradient g_0, from the Gramian [K, K]: g_i^T g_0 = (M 1)_i / K.

    0 where g_i or g_0 is zero. On M's device, without a synchronisation.

    Example:
        >>> cost_mtl.cosines(torch.tensor([[1.0, -2.0], [-2.0, 9.0]]))
        tensor([-0.4082,  0.9526])
    """
    total = M.sum(dim=1)
    lengths = norms(M) * total.sum().clamp_min(0).sqrt()
    defined = lengths > 0
    cos = total / torch.where(defined, lengths, torch.ones_like(lengths))
    return torch.where(defined, cos.clamp(-1, 1), torch.zeros_like(cos))


def combine(G: Tensor, weights: Tensor, *, out: Tensor | None = None, wide: bool | None = None) -> Tensor:
    """d = G^T w: finite wherever the result is, also where a weight is beyond the range of G's dtype (1e40 for a
    gradient of 1e-30, in float32).

    Args:
        G: task gradients [K, m].
        weights: w [K], any floating dtype.
        out: optional [m] to write into; a row of G itself is allowed (each block of columns is read before it is
            written), which is how an optimizer step gets by without another [m].
        wide: whether weights or partial sums leave the range of G's dtype, which takes products in float64, block by
            block. None (default): looked up in the weights, for which the host waits if they are on a device.

    Returns:
        d [m] in G's dtype.

    Raises:
        ValueError: ``weights`` is not [K].

    Example:
        >>> G = torch.tensor([[1.0, 1.0], [2.0, 4.0]])
        >>> cost_mtl.combine(G, torch.tensor([1.0, 0.5]))
        tensor([2., 3.])
    """
    if weights.shape != (len(G),):
        raise ValueError(f"weights: expected shape [{len(G)}], one for each row of G, got {list(weights.shape)}")
    d = torch.empty(G.shape[1], dtype=G.dtype, device=G.device) if out is None else out
    wide = _leaves_range(weights, G.dtype) if wide is None else wide
    product = _wide_product(weights, G) if wide else partial(torch.matmul, weights.detach().to(G.device, G.dtype))
    with torch.no_grad(), torch.autocast(G.device.type, enabled=False):
        for part, target in zip(G.split(BLOCK, dim=1), d.split(BLOCK), strict=True):
            target.copy_(product(part))
    return d


def _leaves_range(weights: Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight is too large or too small for the dtype."""
    used = weights.detach().double().abs() if weights.device.type != "mps" else weights.detach().cpu().double().abs()
    used = used[used > 0]
    return bool(((used > torch.finfo(dtype).max / 2) | (used < torch.finfo(dtype).tiny)).any())


def _wide_product(weights: Tensor, G: Tensor) -> Callable[[Tensor], Tensor]:
    """part [K, n] -> w @ part, in float64; on MPS, which has none, times two factors of every weight in turn, between
    which nothing leaves the range unless the result does."""
    if G.device.type != "mps":
        w = weights.detach().to(G.device, torch.float64)
        return lambda part: w @ part.double()
    w = weights.detach().cpu().double()
    first = torch.exp2((torch.frexp(w).exponent // 2).double())
    one, two = (f.to(G.device, G.dtype)[:, None] for f in (first, w / first))
    return lambda part: (part * one * two).sum(dim=0)

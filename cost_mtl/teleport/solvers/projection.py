"""Least-norm steps that keep the losses to first order, or bring them back."""

from __future__ import annotations

import torch
from torch import Tensor

from cost_mtl.gradients.gramian import gramian
from cost_mtl.gradients.reductions import dot, row_norms


def project_out(J: Tensor, u: Tensor, metric: Tensor | None = None) -> Tensor:
    """The part of P u that keeps J s = 0: s = P (u - J^T y) with J P J^T y = J P u.

    Args:
        J: [R, n]; rows of very different length are fine.
        u: [n].
        metric: diagonal of P [n]; None: identity.
    """
    return restore_step(J, None, u, metric)


def restore_step(J: Tensor, residual: Tensor | None, u: Tensor | None, metric: Tensor | None = None) -> Tensor:
    """Least-norm step in the metric P^-1 with J s = -residual, on top of the projection of u (either may be None)."""
    lengths = row_norms(J)
    unit = J / torch.where(lengths > 0, lengths, 1.0)
    weighted = unit if metric is None else unit * metric
    S = gramian(unit if metric is None else unit * metric.sqrt(), dtype=torch.float64)
    rhs = torch.zeros(len(J), dtype=torch.float64, device=J.device)
    if u is not None:
        rhs += torch.stack([dot(row, u) for row in weighted]).double()
    if residual is not None:
        rhs += torch.where(lengths[:, 0] > 0, residual / lengths[:, 0].double().clamp_min(1e-300), 0.0)
    y = _pinv_solve(S, rhs).to(J.dtype)
    step = -(weighted.T @ y)
    if u is not None:
        step += u if metric is None else u * metric
    return step


def _pinv_solve(S: Tensor, rhs: Tensor, rcond: float = 1e-6) -> Tensor:
    # Tasks with the same gradient are normal: S is then singular, and the pseudo-inverse simply counts them once.
    values, vectors = torch.linalg.eigh((S + S.T) / 2)
    keep = values > rcond * values[-1].clamp_min(0)
    inverse = torch.where(keep, 1 / torch.where(keep, values, 1.0), 0.0)
    solved: Tensor = vectors @ (inverse * (vectors.T @ rhs))
    return solved

"""FairGrad and Nash-MTL: M w = w^(-1/alpha)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cost_mtl.base import Solution, SolverReport

__all__ = ["FairGrad", "NashMTL"]


def _newton(M: NDArray[np.float64], p: float, ridge: float) -> tuple[NDArray[np.float64], int, float]:
    scale = np.diag(M) ** (-1 / (1 + p))
    A = scale[:, None] * M * scale
    r = np.diag(A).copy()
    A = A + np.diag(ridge * r)
    v = np.ones(len(r))
    best, best_residual, used = v, np.inf, 0
    for used in range(60):  # noqa: B007
        v = v * ((r * v ** (1 - p)).sum() / (v @ A @ v)) ** (1 / (1 + p))
        target = r * v**-p
        F = A @ v - target
        residual = float(np.abs(F / target).max())
        if residual < best_residual:
            best, best_residual = v, residual
        if residual < 1e-13:
            break
        step = np.linalg.solve(A + np.diag(p * target / v), -F)
        slope, low = float(-(F @ step)), float((step / v).min())
        limit = np.inf if low >= 0 else -1 / low
        lo, hi, t = 0.0, limit, min(1.0, 0.9 * limit)
        linear, quadratic = v @ A @ step, step @ A @ step
        for _ in range(8):
            z = v + t * step
            g = linear + t * quadratic - (r * z**-p * step).sum()
            if abs(g) < 0.1 * slope:
                break
            lo, hi = (lo, t) if g > 0 else (t, hi)
            t = t - g / (quadratic + p * (r * z ** (-p - 1) * step * step).sum())
            if not lo < t < hi:
                t = (lo + hi) / 2 if np.isfinite(hi) else 2 * lo + 1
        v = v + t * step
    return scale * best, used, best_residual


def _fair(gramian: Tensor, p: float) -> Solution:
    M = gramian.detach().to("cpu", torch.float64).numpy()
    for i, row in enumerate(M):
        if not np.isfinite(row[i]):
            raise ValueError(f"the gradient of task {i} is not finite: M[{i}, {i}] = {row[i]}")
    present = np.diag(M) > 0
    w = np.ones(len(M))
    used, residual, code = 0, 0.0, 0
    if present.any():
        sub = M[np.ix_(present, present)]
        try:
            solved, used, residual = _newton(sub, p, 0.0)
        except np.linalg.LinAlgError:
            solved, residual = w[present], np.inf
        if not residual < 1e-6:
            code = 1
            solved, used, residual = _newton(sub, p, 1e-11)
        w[:] = solved.mean()
        w[present] = solved
    return Solution(torch.from_numpy(w).to(gramian.device, gramian.dtype), SolverReport(used, residual, code))


@dataclass(frozen=True)
class FairGrad:
    """FairGrad (Ban & Ji 2024): M w = w^(-1/alpha)."""

    alpha: float = 2.0

    def __call__(self, gramian: Tensor) -> Tensor:
        return self.solve(gramian).weights

    def solve(self, gramian: Tensor) -> Solution:
        return _fair(gramian, 1 / self.alpha)


@dataclass(frozen=True)
class NashMTL:
    """Nash-MTL (Navon et al. 2022): M w = 1/w."""

    def __call__(self, gramian: Tensor) -> Tensor:
        return self.solve(gramian).weights

    def solve(self, gramian: Tensor) -> Solution:
        return _fair(gramian, 1.0)

"""CAGrad."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cost_mtl.base import Solution, SolverReport

__all__ = ["CAGrad"]


def _dual(C: NDArray[np.float64], b: NDArray[np.float64], a: NDArray[np.float64], c: float) -> NDArray[np.float64]:
    """q >= 0 with d = g_0 + G^T q: smoothed dual on the simplex, by mirror descent free interior Newton steps."""
    K = len(b)
    x, z, y, mu = np.ones(K) / a.sum(), np.ones(K), 0.0, 1.0
    for _ in range(100):
        n = np.sqrt(x @ C @ x + 1e-24)
        s = C @ x / n
        grad = b + c * s
        H = c * (C - np.outer(s, s)) / n + np.diag(z / x)
        rd = grad - z - y * a
        solved = np.linalg.solve(H, np.stack([a, -(rd + z - mu * 0.1 / x)], 1))
        dy = ((1 - a @ x) - a @ solved[:, 1]) / (a @ solved[:, 0])
        dx = solved[:, 1] + dy * solved[:, 0]
        dz = -z + (mu * 0.1 - z * dx) / x
        tp = min(1.0, 0.95 / max(1e-300, float((-dx / x).max())))
        td = min(1.0, 0.95 / max(1e-300, float((-dz / z).max())))
        x, z, y = x + tp * dx, z + td * dz, y + td * dy
        mu = float(x @ z) / K
        if mu < 1e-15 * n:
            break
    return np.asarray(c * x / np.sqrt(x @ C @ x + 1e-24))


@dataclass(frozen=True)
class CAGrad:
    """CAGrad (Liu et al. 2021): the official direction times K."""

    c: float = 0.4
    rescale: int = 1

    def __call__(self, gramian: Tensor) -> Tensor:
        return self.solve(gramian).weights

    def solve(self, gramian: Tensor) -> Solution:
        M = gramian.detach().to("cpu", torch.float64).numpy()
        for i, row in enumerate(M):
            if not np.isfinite(row[i]):
                raise ValueError(f"the gradient of task {i} is not finite: M[{i}, {i}] = {row[i]}")
        K = len(M)
        present = np.diag(M) > 0
        w = np.ones(K)
        sub = M[np.ix_(present, present)]
        total = sub.sum()
        if present.any() and total > 0 and self.c > 0:
            D = np.sqrt(np.diag(sub))
            q = _dual(sub / np.outer(D, D), sub.sum(1) / D / np.sqrt(total), D.min() / D, self.c)
            w[present] += np.sqrt(total) * q / D
        w /= {0: 1.0, 1: 1 + self.c**2, 2: 1 + self.c}[self.rescale]
        return Solution(torch.from_numpy(w).to(gramian.device, gramian.dtype), SolverReport(0, 0.0))

"""From a Gramian to a solver and back: checks, dtype, device, scale and report, for every solving weighting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cost_mtl.base import Solution, SolverReport
from cost_mtl.weighting._arrays import HOST, Array, Arrays, device_arrays
from cost_mtl.weighting._checks import check_shape, host_matrix

__all__ = ["CONVERGED", "NOT_CONVERGED", "STATIONARY", "Answer", "Problem", "Scale", "Solver", "check_scale", "solve"]

CONVERGED, STATIONARY, NOT_CONVERGED, NON_FINITE = range(4)
"""Indices into :attr:`cost_mtl.base.SolverReport.STATUSES`."""

Solver = Literal["auto", "host", "device", "cvxpy"]
"""``"auto"``: NumPy for a Gramian on the CPU, torch without any host read for one on a GPU; ``"host"`` and ``"device"``
force one of the two; ``"cvxpy"``: the slow reference, a conic solver, for tests and for doubters."""

Scale = Literal["raw", "tasks", "sum", "mean"]
"""What the solution is multiplied with: nothing; K; whatever makes the weights sum to K (comparable with the sum of the
losses); to 1 (comparable with their mean)."""

_ON_DEVICE = ("cuda", "xpu")  # the others (mps) have no float64: their Gramian is solved on the host


@dataclass(frozen=True)
class Problem:
    """A Gramian in float64 and the namespace to compute with.

    Attributes:
        arrays: NumPy or torch.
        M: [K, K], symmetric, float64.
        noise: relative rounding error of the entries that the solver was given.
    """

    arrays: Arrays
    M: Array
    noise: float


@dataclass(frozen=True)
class Answer:
    """Weights [K] (float64), residual [], iterations [] and code []: the fields of the report."""

    weights: Array
    residual: Array
    iterations: Array
    code: Array


def check_scale(scale: str, max_norm: float | None, solver: str) -> None:
    """Raises ValueError for a ``scale``, ``max_norm`` or ``solver`` that does not exist."""
    if scale not in ("raw", "tasks", "sum", "mean"):
        raise ValueError(f'scale must be "raw", "tasks", "sum" or "mean", got {scale!r}')
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, or None for no clipping, got {max_norm!r}")
    if solver not in ("auto", "host", "device", "cvxpy"):
        raise ValueError(f'solver must be "auto", "host", "device" or "cvxpy", got {solver!r}')


def _scaled(arrays: Arrays, w: Array, M: Array, scale: Scale, max_norm: float | None) -> Array:
    K = len(w)
    if scale == "tasks":
        w = w * K
    elif scale != "raw":
        w = w * ((K if scale == "sum" else 1) / w.sum())
    if max_norm is not None:
        squared_norm = arrays.at_least(w @ (M @ w), 0.0)
        w = w / arrays.at_least(squared_norm**0.5 / max_norm, 1.0)
    return w


def _as_tensor(weights: Array, like: Tensor) -> Tensor:
    w: Tensor = weights if isinstance(weights, Tensor) else torch.from_numpy(np.ascontiguousarray(weights))
    if like.dtype != torch.float64:
        w = w.clamp(max=torch.finfo(like.dtype).max)
    return w.to(like.device, like.dtype)


def solve(
    gramian: Tensor,
    method: Callable[[Problem], Answer],
    reference: Callable[[Array], Array],
    scale: Scale,
    max_norm: float | None,
    solver: Solver,
) -> Solution:
    """Runs ``method`` where the Gramian lives (or ``reference`` on the host) and reports.

    Raises:
        TypeError, ValueError: see :func:`check_shape`; on the CPU also for a matrix that is not finite (the task is
            named) or no Gramian. On a GPU nothing is read back: a Gramian that is not finite gives NaN weights and the
            status "non_finite".
    """
    check_shape(gramian)
    noise = torch.finfo(gramian.dtype).eps
    on_device = solver == "device" or (solver == "auto" and gramian.device.type in _ON_DEVICE)
    if on_device:
        arrays = device_arrays(gramian.device)
        M = gramian.detach().to(torch.float64)
        finite = torch.isfinite(M).all()
        M = torch.where(finite, (M + M.T) / 2, 1.0)
        answer = method(Problem(arrays, M, noise))
        w = torch.where(finite, _scaled(arrays, answer.weights, M, scale, max_norm), torch.nan)
        code = torch.where(finite, answer.code, NON_FINITE)
        return Solution(_as_tensor(w, gramian), SolverReport(answer.iterations, answer.residual, code))
    matrix = host_matrix(gramian, noise)
    with np.errstate(all="ignore"):  # the solvers take overflow and 0/0 for what they are: a bad iterate
        slow = solver == "cvxpy"
        answer = Answer(reference(matrix), np.nan, 0, CONVERGED) if slow else method(Problem(HOST, matrix, noise))
        w = _scaled(HOST, answer.weights, matrix, scale, max_norm)
    report = SolverReport(int(answer.iterations), float(answer.residual), int(answer.code))
    return Solution(_as_tensor(w, gramian), report)

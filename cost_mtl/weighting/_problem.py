"""From a Gramian to a solver and back: checks, dtype, device, scale and report, for every solving weighting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cost_mtl.base import Solution, SolverReport
from cost_mtl.weighting._arrays import HOST, Array, Arrays, device_arrays
from cost_mtl.weighting._checks import check_shape, host_matrix
from cost_mtl.weighting._rounding import round_to_float32

__all__ = [
    "CONVERGED",
    "NOT_CONVERGED",
    "STATIONARY",
    "Answer",
    "Problem",
    "Scale",
    "SolvedWeighting",
    "Solver",
    "Units",
]

CONVERGED, STATIONARY, NOT_CONVERGED, NON_FINITE = range(4)
"""Indices into :attr:`cost_mtl.base.SolverReport.STATUSES`."""

Solver = Literal["auto", "host", "device", "cvxpy"]
"""``"auto"``: NumPy for a Gramian on the CPU, torch without any host read for one on a GPU; ``"host"`` and ``"device"``
force one of the two; ``"cvxpy"``: the slow reference, a conic solver, for tests and for doubters."""

Scale = Literal["raw", "tasks", "sum", "mean"]
"""What the solution is multiplied with: nothing; K; whatever makes the weights sum to K (comparable with the sum of the
losses); to 1 (comparable with their mean)."""

_ON_DEVICE = ("cuda", "xpu")  # the others (mps) have no float64: their Gramian is solved on the host


class Units(NamedTuple):
    """The gradients at unit length.

    Attributes:
        present: [K], which tasks have a gradient at all.
        norms: [K], their norms, 1 for the others.
        inverse: [K], 1 over the norms, 0 for the others.
        shortest: [], the least norm of the present ones.
        cosines: [K, K], the Gramian of the unit gradients. A task without gradient takes the place of one that is
            orthogonal to all others, so that it leaves them alone.
    """

    present: Array
    norms: Array
    inverse: Array
    shortest: Array
    cosines: Array


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

    def units(self, diagonal: float = 0.0) -> Units:
        """See :class:`Units`; ``diagonal`` is added to the cosine of each present task with itself."""
        where, squares = self.arrays.where, self.M.diagonal()
        present = squares > 0
        norms = where(present, squares, 1.0) ** 0.5
        inverse = where(present, 1 / norms, 0.0)
        shortest = where(present, norms, norms.max()).min()
        cosines = inverse[:, None] * self.M * inverse
        return Units(
            present, norms, inverse, shortest, self.arrays.add_diagonal(cosines, where(present, diagonal, 1.0))
        )

    def ones(self) -> Array:
        """[K]"""
        return self.M[0] * 0 + 1

    def filled(self, w: Array, present: Array, otherwise: float) -> Array:
        """w [K] with the mean weight of the present tasks for the absent ones, ``otherwise`` for all if none is."""
        arrays = self.arrays
        inside = arrays.where(present, w, 0.0)
        count = arrays.where(present, 1.0, 0.0).sum()
        mean = inside.sum() / arrays.at_least(count, 1.0)
        return arrays.where(present, w, arrays.where(count > 0, mean, otherwise))


@dataclass(frozen=True)
class Answer:
    """Weights [K] (float64), residual [], iterations [] and code []: the fields of the report."""

    weights: Array
    residual: Array
    iterations: Array
    code: Array


@dataclass(frozen=True, kw_only=True)
class SolvedWeighting:
    """What the weightings that solve something share: where to solve it, and what to do with the solution.

    Args:
        scale: what the solution is multiplied with, see :data:`Scale`.
        max_norm: bound on ||G^T w||, which is taken from the Gramian; None for none.
        solver: where to solve, see :data:`Solver`.

    Raises:
        ValueError: one of them does not exist.
    """

    scale: Scale = "raw"
    max_norm: float | None = None
    solver: Solver = "auto"

    _keeps_rates: ClassVar[bool] = False
    """Whether the method's equation is about the rates M w, which rounding w can spoil: see _rounding.py."""

    def __post_init__(self) -> None:
        if self.scale not in ("raw", "tasks", "sum", "mean"):
            raise ValueError(f'scale must be "raw", "tasks", "sum" or "mean", got {self.scale!r}')
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, or None for no clipping, got {self.max_norm!r}")
        if self.solver not in ("auto", "host", "device", "cvxpy"):
            raise ValueError(f'solver must be "auto", "host", "device" or "cvxpy", got {self.solver!r}')

    def __call__(self, gramian: Tensor) -> Tensor:
        """Weights [K] for the Gramian [K, K], in its dtype, on its device. Raises as :meth:`solve` does."""
        return self.solve(gramian).weights

    def solve(self, gramian: Tensor) -> Solution:
        """Weights [K] and how the solve went.

        Raises:
            TypeError, ValueError: the argument is no floating-point tensor [K, K]; on the CPU also where it is not
                finite (the task is named) or no Gramian. On a GPU nothing is read back: a Gramian that is not finite
                gives NaN weights and the status "non_finite".
        """
        check_shape(gramian)
        noise = torch.finfo(gramian.dtype).eps
        if self.solver == "device" or (self.solver == "auto" and gramian.device.type in _ON_DEVICE):
            return self._on_device(gramian, noise)
        M = host_matrix(gramian, noise)
        with np.errstate(all="ignore"):  # the solvers take overflow and 0/0 for what they are: a bad iterate
            if self.solver == "cvxpy":
                answer = Answer(self._reference(M), np.nan, 0, CONVERGED)
            else:
                answer = self._method(Problem(HOST, M, noise))
            w = self._scaled(HOST, answer.weights, M)
            if gramian.dtype == torch.float32 and self._keeps_rates:
                w = round_to_float32(np.minimum(w, np.finfo(np.float32).max), M)
        report = SolverReport(int(answer.iterations), float(answer.residual), int(answer.code))
        return Solution(_as_tensor(torch.from_numpy(np.ascontiguousarray(w)), gramian), report)

    def _on_device(self, gramian: Tensor, noise: float) -> Solution:
        arrays = device_arrays(gramian.device)
        M = gramian.detach().to(torch.float64)
        finite = torch.isfinite(M).all()
        M = torch.where(finite, (M + M.T) / 2, 1.0)
        answer = self._method(Problem(arrays, M, noise))
        w = torch.where(finite, self._scaled(arrays, answer.weights, M), torch.nan)
        code = torch.where(finite, answer.code, NON_FINITE)
        return Solution(_as_tensor(w, gramian), SolverReport(answer.iterations, answer.residual, code))

    def _scaled(self, arrays: Arrays, w: Array, M: Array) -> Array:
        K = len(w)
        if self.scale == "tasks":
            w = w * K
        elif self.scale != "raw":
            w = w * ((K if self.scale == "sum" else 1) / w.sum())
        if self.max_norm is not None:
            norm = arrays.at_least(w @ (M @ w), 0.0) ** 0.5
            w = w / arrays.at_least(norm / self.max_norm, 1.0)
        return w

    def _method(self, problem: Problem) -> Answer:
        """The method's own solution, before any scaling."""
        raise NotImplementedError

    def _reference(self, M: Array) -> Array:
        """The same by the slow twin: [K]."""
        raise NotImplementedError


def _as_tensor(w: Tensor, like: Tensor) -> Tensor:
    if like.dtype != torch.float64:
        w = w.clamp(max=torch.finfo(like.dtype).max)
    return w.to(like.device, like.dtype)

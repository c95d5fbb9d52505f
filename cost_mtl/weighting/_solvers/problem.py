"""From a Gramian to a solver and back: checks, precision, dtype, device, scale and report, for every solving weighting.

Everything is solved on the host, in float64: these are K x K problems, and COST has read M for the host in any case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cost_mtl._validation import finite, one_of, positive
from cost_mtl.base import DETERMINED, Solution, SolverReport
from cost_mtl.weighting._checks import as_tensor, host_matrix
from cost_mtl.weighting._solvers.matrix import EPS, Array, add_diagonal
from cost_mtl.weighting._solvers.rounding import round_to_float32

__all__ = ["CONVERGED", "DETERMINED", "NOT_CONVERGED", "STATIONARY", "Answer", "Problem", "Scale", "SolvedWeighting"]

CONVERGED, STATIONARY, NOT_CONVERGED = range(3)
"""Indices into :attr:`cost_mtl.base.SolverReport.STATUSES`."""

Scale = Literal["raw", "tasks", "sum", "mean", "project"]
"""What the solution is multiplied with: nothing; K; whatever makes the weights sum to K (comparable with the sum of the
losses); to 1 (comparable with their mean); or whatever makes d the projection of the plain sum's gradient on its own
line, see :func:`projection`."""

_VANISHING_DIRECTION = 1e-6
"""Least squared norm of d relative to sum_i w_i^2 ||g_i||^2 that a projection divides by."""


def projection(w: Array, M: Array) -> float:
    """The factor for weights w [n], of sizes around 1, with which d = G^T w is as long as the projection on its line of
    the plain sum's gradient: ||d|| = ||s|| |cos(d, s)|, s = G^T 1.

    A learning rate that the plain sum bears then keeps working: s^T d = ||d||^2, so for every eta < 2 / L that makes
    gradient descent on the sum fall, the step -eta d lowers the sum, too (L its smoothness), wherever d has a positive
    product with s. d vanishes where no direction is left. Measured beside ten other rules in docs/default_scale.md.

    Equal weights become exactly 1.
    """
    if (w == w[0]).all() and w[0] != 0:
        return 1.0 / float(w[0])
    rates = M @ w
    size = max(float(w @ rates), _VANISHING_DIRECTION * float(w**2 @ M.diagonal()))
    return abs(float(rates.sum())) / size if size > 0 else 1.0


@dataclass(frozen=True)
class Problem:
    """A Gramian of the tasks that have a gradient, its precision, and the gradients at unit length.

    Attributes:
        M: [n, n], symmetric, positive semidefinite, float64; the n <= K tasks whose gradient is not zero.
        noise: the entries may be off by this, relative to ||g_i|| ||g_j||. A combination of unit gradients with
            coefficients that sum to 1 then has a squared norm that is off by this at most.
        norms: [n], ||g_i||.
        cosines: [n, n], the Gramian of the unit gradients.
        present: [K], which tasks the n are.
    """

    M: Array
    noise: float
    norms: Array
    cosines: Array
    present: NDArray[np.bool_]

    @classmethod
    def of(cls, M: Array, noise: float) -> Problem:
        """The problem for a checked Gramian [K, K].

        A negative eigenvalue of the cosines proves rounding errors of its size, whatever the caller stated: ``noise``
        becomes at least that large, and the diagonal is raised until M is positive semidefinite.
        """
        present = M.diagonal() > 0
        if not present.all():
            M = M[np.ix_(present, present)]
        norms: Array = np.sqrt(M.diagonal())
        cosines: Array = M / norms[:, None] / norms
        if not _is_semidefinite(cosines):
            shown = 1.001 * max(0.0, -float(np.linalg.eigvalsh(cosines)[0])) + 4 * len(M) * EPS
            noise = max(noise, shown)
            M, cosines = add_diagonal(M, shown * norms**2), add_diagonal(cosines, shown)
        return cls(M, noise, norms, cosines, present)

    def __len__(self) -> int:
        """n"""
        return len(self.norms)

    def filled(self, w: Array, absent: float | None = None) -> Array:
        """w [K] from the weights [n] of the tasks that have a gradient; the others get ``absent``, None: the mean."""
        if len(w) == len(self.present):
            return w
        filled = np.full(len(self.present), w.mean() if absent is None else absent)
        filled[self.present] = w
        return filled


def _is_semidefinite(C: Array) -> bool:
    rounding = 4 * len(C) * EPS
    if len(C) <= 2:  # nothing, 1, or one cosine: this is faster
        return bool((abs(C) <= 1 + rounding).all())
    try:
        np.linalg.cholesky(add_diagonal(C, rounding))
    except np.linalg.LinAlgError:
        return False
    return True


@dataclass(frozen=True)
class Answer:
    """Weights [K], and the fields of the report."""

    weights: Array
    residual: float = 0.0
    iterations: int = 0
    code: int = CONVERGED
    rounding: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SolvedWeighting:
    """What the weightings that solve something share: what to do with the solution.

    Args:
        scale: what the solution is multiplied with, see :data:`Scale`.
        max_norm: bound on ||G^T w||, which is taken from the Gramian; None for none.

    Raises:
        ValueError: there is no such ``scale``, or ``max_norm`` is not a number > 0.
    """

    scale: Scale = "raw"
    max_norm: float | None = None

    _keeps_rates: ClassVar[bool] = False
    """Whether the method's equation is about the rates M w, which rounding w can spoil: see _rounding.py."""

    _sums_to_one: ClassVar[bool] = False
    """Whether the method's own solution is normalised, so that "raw" and "mean" are the same, and "tasks" and "sum"."""

    def __post_init__(self) -> None:
        one_of("scale", self.scale, get_args(Scale))
        positive("max_norm", self.max_norm, or_none=True)

    def __call__(self, gramian: Tensor) -> Tensor:
        """Weights [K] for the Gramian [K, K], in its dtype, on its device. Raises as :meth:`solve` does."""
        return self.solve(gramian).weights

    def solve(self, gramian: Tensor, *, noise: float | None = None) -> Solution:
        """Weights [K] and how the solve went.

        Args:
            gramian: M [K, K], on any device; it is copied to the host, and the weights come back to its device.
            noise: how far its entries may be off, relative to ||g_i|| ||g_j||: a Gramian in float64 may have been
                summed in float32. None: the precision of its dtype. In both cases never less than what M itself shows:
                a Gramian that is not positive semidefinite is that far from the true one.

        Raises:
            TypeError, ValueError: the Gramian is no floating-point tensor [K, K], not finite (the task is named) or no
                Gramian; ``noise`` is negative or not finite.
        """
        if noise is not None:
            finite("noise", noise, least=0)
        M = host_matrix(gramian)
        known = float(torch.finfo(gramian.dtype).eps)
        with np.errstate(all="ignore"):  # the solvers take overflow and 0/0 for what they are: a bad iterate
            problem = Problem.of(M, known if noise is None else max(noise, EPS))
            answer = self._method(problem) if len(problem) else Answer(self._weight_of_nothing(len(M)))
            w = self._scaled(answer.weights, problem)
            if gramian.dtype == torch.float32 and self._keeps_rates:
                kind = np.finfo(np.float32)
                w = round_to_float32(np.where(w > 0, np.clip(w, kind.smallest_subnormal, kind.max), w), M)
        report = SolverReport(answer.iterations, float(answer.residual), answer.code, float(answer.rounding))
        return Solution(as_tensor(torch.from_numpy(np.ascontiguousarray(w)), gramian), report)

    def _scaled(self, w: Array, problem: Problem) -> Array:
        K = len(w)
        if self.scale == "project":
            w = w / (float(abs(w).max()) or 1.0)
            w = w * (projection(w[problem.present], problem.M) if len(problem) else 1.0)
        elif self.scale == "tasks" or (self.scale == "sum" and self._sums_to_one):
            w = w * K
        elif self.scale != "raw" and not self._sums_to_one:  # the other methods' weights are positive: no sum is 0
            w = w * ((K if self.scale == "sum" else 1) / w.sum())
        if self.max_norm is not None:
            # The largest norm that fits M's digits: near a stationary point it is all that M tells.
            part = w[problem.present]
            square = float(part @ (problem.M @ part)) + problem.noise * float(abs(part) @ problem.norms) ** 2
            w = w / max(math.sqrt(max(square, 0.0)) / self.max_norm, 1.0)
        return w

    def _method(self, problem: Problem) -> Answer:
        """The method's own solution, before any scaling: weights [K]. One task at least has a gradient."""
        raise NotImplementedError

    def _weight_of_nothing(self, K: int) -> Array:
        """The weights [K] where no task has a gradient: K equal ones."""
        return np.full(K, 1 / K if self._sums_to_one else 1.0)

"""IMTL-G: a direction with the same projection on every task's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cost_mtl.weighting._solvers.matrix import add_diagonal
from cost_mtl.weighting._solvers.problem import CONVERGED, DETERMINED, STATIONARY, Answer, Problem, SolvedWeighting

__all__ = ["IMTLG"]

_RIDGE = 1e-8
_ACCURATE = 1e-6
_VANISHING = 1e-10


@dataclass(frozen=True)
class IMTLG(SolvedWeighting):
    """IMTL-G (Liu et al., "Towards Impartial Multi-task Learning", ICLR 2021): g_i^T d / ||g_i|| is the same for all i.

    With C the matrix of cosines and w_i = v_i / ||g_i||, that is C v = 1, divided by |sum w|: the weights can be
    negative. Where C is singular but the equation solvable (duplicated tasks), the v of least norm is taken.

    Differs from the paper, which divides by the sum itself. Where that is negative, although no two tasks need be in
    conflict, the paper's direction raises every loss; here d = G^T w has a positive projection on every gradient, and
    the weights sum to -1 instead of 1.

    Status "stationary": no direction has equal projections other than zero, or none that M's digits determine to 1 %,
    or the weights cancel in their sum (below 1e-10 of the sum of their sizes, which then takes its place). The weights
    are finite, of sizes that sum to 1 at least, and mean little.

    The residual is max |C v - 1|. A task with a zero gradient gets 1/K, and the others, which are solved as if it were
    absent, share what it leaves of the 1 (or -1).

    Args:
        scale: ``"raw"`` or ``"mean"`` (default ``"raw"``): as above; ``"sum"``, ``"tasks"``: times K.
            ``"project"``: a length of d for which the learning rate of the plain sum keeps working
            (docs/default_scale.md).
        max_norm: bound on ||G^T w||, None for none.

    Example:
        >>> M = torch.tensor([[1.0, -0.5], [-0.5, 4.0]], dtype=torch.float64)  # Gramian of two tasks in conflict
        >>> w = IMTLG()(M)
        >>> (M @ w) / M.diagonal().sqrt()  # the same projection on every gradient
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    _sums_to_one: ClassVar[bool] = True

    def _method(self, problem: Problem) -> Answer:
        return _equal_projections(problem)


def _equal_projections(problem: Problem) -> Answer:
    C, norms, noise, n = problem.cosines, problem.norms, problem.noise, len(problem)
    regularised = add_diagonal(C, max(_RIDGE, 4 * n * noise))
    v = np.linalg.solve(regularised, np.ones(n))
    for _ in range(3):  # refinement: the ridge's error shrinks by ridge / eigenvalue, null directions stay out
        v = v + np.linalg.solve(regularised, 1 - C @ v)
    residual = float(abs(C @ v - 1).max())
    rounding = noise * float(abs(v).sum())  # the largest change of a projection, of 1
    w = v * (norms.min() / norms)
    # The sum can vanish without any of the weights doing so; the sum of their sizes cannot.
    total, size = abs(w.sum()), abs(w).sum()
    vanishing = total <= max(_VANISHING, noise) * size
    K = len(problem.present)
    weights = problem.filled(w / (size if vanishing else total) * (n / K), 1 / K)
    solved = residual <= max(_ACCURATE, n * noise) and rounding <= DETERMINED and not vanishing
    return Answer(weights, residual, 0, CONVERGED if solved else STATIONARY, rounding)

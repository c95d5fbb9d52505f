"""Nash-MTL: the task gradients bargain over the direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cost_mtl.weighting._solvers.fairness import solve_fairness
from cost_mtl.weighting._solvers.problem import Answer, Problem, SolvedWeighting

__all__ = ["NashMTL"]


@dataclass(frozen=True)
class NashMTL(SolvedWeighting):
    """Nash-MTL (Navon et al., ICML 2022, arXiv 2202.01017): M w = 1/w elementwise (their Eqn 2).

    The same equation as FairGrad's at alpha = 1, and the same solver: relative residual max_i |w_i (M w)_i - 1| below
    1e-6, usually 1e-13, where the authors take up to 20 rounds of a conic solver. The direction of an exact solution
    has the norm sqrt(K), whatever the scale of the losses: M -> s M gives w -> w / sqrt(s). With two tasks at angle
    phi, w_i = 1 / (||g_i|| sqrt(1 + cos phi)).

    Near a Pareto-stationary point, for tasks with zero gradients and for a Gramian in less than float64, the answer is
    the one that :class:`~cost_mtl.weighting.fairgrad.FairGrad` describes.

    Args:
        scale: ``"raw"`` (default): the solution itself; ``"tasks"``: times K; ``"sum"``, ``"mean"``: weights that sum
            to K or to 1. ``"project"``: a length of d for
            which the learning rate of the plain sum keeps working (docs/default_scale.md).
        max_norm: bound on ||G^T w||, None (default) for none. The authors' is 1; since ||G^T w|| = sqrt(K), it always
            acts for K > 1.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> M = torch.tensor([[1.0, -0.5], [-0.5, 4.0]], dtype=torch.float64)  # Gramian of two tasks in conflict
        >>> w = NashMTL()(M)
        >>> torch.allclose(M @ w, 1 / w)
        True
    """

    _keeps_rates: ClassVar[bool] = True

    @classmethod
    def official(cls) -> NashMTL:
        """The recipe of the authors' scripts: the direction clipped to norm 1. They also weight the tasks' own
        parameters, which is ``COST(heads="weighted")``."""
        return cls(max_norm=1.0)

    def _method(self, problem: Problem) -> Answer:
        return solve_fairness(problem, 1.0)

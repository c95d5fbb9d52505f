"""PCGrad: gradients lose what conflicts with the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cost_mtl._validation import integer, one_of
from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._keyed import keyed_generator

__all__ = ["PCGrad", "project_conflicts"]


@dataclass(frozen=True)
class PCGrad:
    """Projecting conflicting gradients (Yu et al., "Gradient Surgery", NeurIPS 2020, arXiv 2001.06782, Algorithm 1).

    Each task's gradient is taken through the other tasks in a random order, and wherever the inner product is negative,
    loses its component along the other's original gradient. The direction is the sum of what remains. All of it is
    inner products, so the Gramian is enough: the result is a weighted sum of the original gradients.

    The orders depend on (``seed``, step): no global random stream is touched, and a resumed run goes on as it would.

    Args:
        scale: ``"sum"`` (default): the sum of the projected gradients, as the authors; ``"mean"``: divided by K.
        seed: of the orders.

    Raises:
        ValueError: there is no such ``scale``, or ``seed`` is not an integer.

    Example:
        >>> from cost_mtl.base import WeightingInputs
        >>> inputs = WeightingInputs(torch.tensor([[1.0, -1.0], [-1.0, 4.0]]), torch.ones(2), torch.ones(2, 5), step=0)
        >>> PCGrad().weigh(inputs, {}).weights
        tensor([2.0000, 1.2500])
    """

    scale: str = "sum"
    seed: int = 0

    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("scale", self.scale, ("sum", "mean"))
        integer("seed", self.seed)

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K] from the Gramian [K, K]."""
        M = inputs.gramian
        generator = keyed_generator(self.seed, inputs.step)
        orders = torch.stack([torch.randperm(len(M), generator=generator, device="cpu") for _ in range(len(M))])
        w = project_conflicts(M.to(torch.float64), orders.to(M.device, non_blocking=True)).sum(0)
        if self.scale == "mean":
            w = w / len(M)
        return Weighed(w.to(M.dtype), state)


def project_conflicts(M: Tensor, orders: Tensor) -> Tensor:
    """Coefficients W [K, K] of the projected gradients: row i gives task i's as a sum of the original ones.

    Args:
        M: Gramian [K, K].
        orders: row i is the order (a permutation of the K tasks) in which task i meets the others. All tasks take one
            step of their order at a time, so there are K rounds of [K]-sized work and nothing is read back.
    """
    tasks = torch.arange(len(M), device=M.device)
    W = torch.eye(len(M), dtype=M.dtype, device=M.device)
    norms = M.diagonal()[orders]
    # -1 / ||g_j||^2; 0 where task i meets itself, or a task without gradient: nothing is taken off there.
    factors = torch.where((orders != tasks[:, None]) & (norms > 0), -1 / norms, 0.0)
    for others, factor in zip(orders.T, factors.T, strict=True):
        inner = (W * M[others]).sum(1)  # (sum_k W_ik g_k)^T g_j, j = others[i]
        W.scatter_add_(1, others[:, None], (inner.clamp(max=0) * factor)[:, None])
    return W

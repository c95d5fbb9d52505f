"""Thinning out one task vector before it is added: DARE and Model Breadcrumbs."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from cost_mtl._validation import integer, share
from cost_mtl.merging.blocks import check_real
from cost_mtl.merging.task_vector import TaskVector
from cost_mtl.merging.ties_merge import check_density

__all__ = ["breadcrumbs", "dare"]


def dare(vector: TaskVector, density: float = 0.1, seed: int = 0) -> TaskVector:
    """Drops weights at random and rescales the rest: τ · m / density, m ~ Bernoulli(density) (Yu et al., 2024,
    arXiv 2311.03099), computed by peft. Its expectation is τ.

    Masks are drawn on the CPU and keyed on (seed, block), so a vector from files gives the same values at each access,
    and on any device; torch's random state is left as it was.

    Args:
        vector: the task vector.
        density: share of the weights kept, in (0, 1]; default 0.1, the published drop rate of 0.9.
        seed: give each of several vectors its own: with one seed they would keep the same weights.

    Example:
        >>> one = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
        >>> dare(one, density=1.0).blocks["w"]
        tensor([1., 2., 3., 4.])
        >>> thinned = dare(one, density=0.5, seed=0).blocks["w"]
        >>> bool(((thinned == 0) | (thinned == 2 * one.blocks["w"])).all())
        True
    """
    check_density(density)
    integer("seed", seed)
    if density == 1:
        return vector

    def thin(block: str, tau: Tensor) -> Tensor:
        from peft.utils.merge_utils import prune  # heavy, and only some merges need it

        check_real(tau.dtype, repr(block))
        key = hashlib.sha256(f"{seed}:{block}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(key[:7], "big"))
            thinned: Tensor = prune(tau.cpu(), density, method="random", rescale=True)
        return thinned.to(tau.device)

    return vector.map_blocks(thin)


def breadcrumbs(vector: TaskVector, lower: float = 0.85, upper: float = 0.993) -> TaskVector:
    """Keeps the middle of each block: neither the smallest changes nor the outliers (Davari & Belilovsky, 2024,
    arXiv 2312.06795, the mask m_{β,γ}).

    Of the n weights of a block, by |τ|, the ⌊lower · n⌋ smallest and the ⌊(1 − upper) · n⌋ largest become zero. (The
    authors' code ranks within each row of a matrix instead.)

    Args:
        vector: the task vector.
        lower: β, the share dropped from below. The defaults, 0.85 and 0.993, are inside what the authors' code searches
            (5 to 20 % kept, 0.1 to 1 % of outliers dropped, beginning with 15 % and 0.6 %); it has no default itself.
        upper: γ, where the outliers start; lower < upper <= 1.

    Example:
        >>> one = TaskVector({"w": torch.zeros(4)}, {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])})
        >>> breadcrumbs(one, lower=0.25, upper=0.75).blocks["w"]
        tensor([0., 2., 3., 0.])
    """
    share("lower", lower, zero=True)
    share("upper", upper, zero=False)
    if not lower < upper:
        raise ValueError(f"lower, upper: expected lower < upper, got {lower} and {upper}")

    def thin(block: str, tau: Tensor) -> Tensor:
        check_real(tau.dtype, repr(block))
        order = tau.abs().reshape(-1).argsort(stable=True)
        count = order.numel()
        kept = order[_floor(lower * count) : count - _floor((1 - upper) * count)]
        result = torch.zeros_like(tau, memory_format=torch.contiguous_format)
        result.view(-1)[kept] = tau.reshape(-1)[kept]
        return result

    return vector.map_blocks(thin)


def _floor(share: float) -> int:
    """⌊share⌋, where 0.2 · 10 computed as (1 − 0.8) · 10 is still 2."""
    return math.floor(share + 1e-9)

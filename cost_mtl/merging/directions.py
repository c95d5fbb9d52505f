"""The directions along which DV-BASI scales."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cost_mtl.merging.blocks import check_real
from cost_mtl.merging.source import Model
from cost_mtl.merging.task_vector import TaskVector

__all__ = ["difference_direction", "history_directions", "random_matched_direction"]


def difference_direction(pretrained: Model, point: nn.Module, exclude: Sequence[str] = ()) -> TaskVector:
    """δ = θ − θ_pre.

    Raises:
        ValueError: δ is zero.
    """
    delta = TaskVector(pretrained, point, exclude=exclude, name="model").without_base()
    if delta.norm() == 0:
        raise ValueError(
            "model: expected one that differs from pretrained, got an equal one: there is no difference vector to scale"
        )
    return delta


def history_directions(
    delta: TaskVector, earlier: Sequence[Model], point: nn.Module, exclude: Sequence[str] = ()
) -> list[TaskVector]:
    """δ, then θ − θ_i for each earlier point θ_i that is another than θ."""
    steps = [TaskVector(model, point, exclude=exclude, name="model").without_base() for model in earlier]
    return [delta, *(step for step in steps if step.norm() > 0)]


def random_matched_direction(delta: TaskVector, seed: int, iteration: int) -> TaskVector:
    """Gaussian blocks, each with the norm of δ's; keyed on (seed, iteration, block) and drawn on the CPU."""

    def draw(block: str, tau: Tensor) -> Tensor:
        check_real(tau.dtype, repr(block))
        key = hashlib.sha256(f"{seed}:{iteration}:{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
        noise = torch.randn(tau.shape, generator=generator, dtype=torch.float64)
        length = float(noise.norm())
        if length == 0:  # an empty block
            return torch.zeros_like(tau)
        matched: Tensor = noise * (tau.double().cpu().norm() / length)
        return matched.to(tau)

    return delta.map_blocks(draw)

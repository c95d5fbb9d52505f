"""The parameters that an optimizer and a model hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    pass


def held_by(base: Optimizer) -> list[Tensor]:
    """The parameters in the optimizer's groups, in order."""
    return [p for group in base.param_groups for p in group["params"]]


def at_rest(base: Optimizer) -> set[int]:
    """Ids of the parameters in groups with learning rate 0, where other groups have one above: these are meant to stay
    where they are. Where all are 0 (the first step of a warm-up, say) that tells nothing."""
    rates = [group.get("lr") for group in base.param_groups]
    still = [rate is not None and float(rate) == 0.0 for rate in rates]
    if all(still):
        return set()
    return {id(p) for group, rests in zip(base.param_groups, still, strict=True) if rests for p in group["params"]}


def all_trainable(base: Optimizer, model: nn.Module) -> list[Tensor]:
    """The distinct trainable parameters of the model and of the optimizer (learned loss weights, say), in order."""
    every = {id(p): p for p in (*model.parameters(), *held_by(base)) if p.requires_grad}
    return list(every.values())

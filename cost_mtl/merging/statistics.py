"""BatchNorm's running statistics in a merged model: kept, averaged, or measured again.

They are averages over data, not weights. The sum of two task vectors of ``running_var`` can be negative, and the model
then returns NaN; so they are no part of a task vector, and what becomes of them is a choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from cost_mtl._validation import one_of

__all__ = ["BufferPolicy", "average_statistics", "check_policy", "differing_statistics", "recalibrate_batchnorm"]

BufferPolicy = Literal["keep", "average", "recalibrate"]
_POLICIES = ("keep", "average", "recalibrate")


def check_policy(policy: str, allowed: Sequence[str] = _POLICIES) -> None:
    """Raises ValueError when a policy is not one of those allowed."""
    one_of("buffers", policy, allowed)


def differing_statistics(base: Mapping[str, Tensor], models: Sequence[Mapping[str, Tensor]]) -> list[str]:
    """Keys under which a fine-tuned model's statistics are not the base's."""
    return [
        key
        for key, value in base.items()
        if any(key in model and not torch.equal(model[key].to(value.device, value.dtype), value) for model in models)
    ]


def average_statistics(key: str, base: Tensor, models: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Mean of one statistic over the fine-tuned models, in the base's dtype and on its device.

    The mean of variances is never negative, but it lacks the variance between the models' means, and a merged model's
    activations are none of theirs: recalibrate where there is data.
    """
    values = [model[key].to(base.device, torch.float64) for model in models if key in model]
    if not values:
        return base.clone()
    return torch.stack(values).mean(dim=0).to(base.dtype)


def recalibrate_batchnorm(model: nn.Module, batches: Iterable[Any]) -> None:
    """Measures the running statistics of every BatchNorm layer again, in place (torch's ``update_bn``).

    The model runs in training mode, dropout included, as it did when the statistics were first taken.

    Args:
        model: the merged model.
        batches: inputs [n, ...], or tuples whose first entry is the inputs, on the model's device.

    Raises:
        ValueError: no BatchNorm layer keeps statistics, ``batches`` is empty, or the result is not finite.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm1d(1))
        >>> recalibrate_batchnorm(model, [torch.tensor([[1.0], [3.0]])])
        >>> model[0].running_mean
        tensor([2.])
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}
    if not layers:
        raise ValueError("model: expected BatchNorm layers with running statistics, found none")
    batches = list(batches)
    if not batches:  # update_bn would leave means 0 and variances 1
        raise ValueError("batches: expected at least one batch, got none")
    with torch.no_grad():
        update_bn(batches, model)
    for name, layer in layers.items():
        for statistic in (layer.running_mean, layer.running_var):
            if statistic is not None and not torch.isfinite(statistic).all():
                raise ValueError(
                    f"batches: expected finite statistics of {name!r} after recalibration, got NaN or infinity"
                )

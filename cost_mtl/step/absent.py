"""Tasks that are absent from a batch: they lose nothing, and the others are weighed as if they were not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl.base import StatefulWeighting, Weighed, WeightingInputs
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.host_read import HostRead


def present_rows(now: Evaluation, host: HostRead) -> list[int]:
    """The tasks that have something to say in this batch; all of them where none has.

    A task is absent if its shared gradient is exactly zero, and its loss is exactly zero as well (masked, no labels) or
    has no graph. Zero gradient alone is not enough: a task behind a ``detach()`` still trains its own parameters.
    """
    silent = (host.gramian.diagonal() == 0).tolist()
    losses = host.losses.tolist()
    rows = [i for i in range(len(now.names)) if not (silent[i] and (losses[i] == 0 or not now.graphs[i]))]
    return rows or list(range(len(now.names)))


def weigh_present(
    weighting: StatefulWeighting, inputs: WeightingInputs, state: dict[str, object], rows: Sequence[int], K: int
) -> Weighed:
    """The weights [K] of all tasks: 0 for those whose rows are not among the inputs.

    Raises:
        TypeError: the weighting does not return a :class:`~cost_mtl.base.Weighed`.
    """
    weighed = weighting.weigh(inputs, state)
    if not isinstance(weighed, Weighed):
        raise TypeError(f"weighting: expected weigh() to return a Weighed, got {type(weighed).__name__}")
    if len(rows) == K:
        return weighed
    weights = weighed.weights.new_zeros(K)
    weights[torch.tensor(rows, device=weights.device)] = weighed.weights
    return replace(weighed, weights=weights)


@contextmanager
def keeping_entries(base: Optimizer, at_rest: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Context around the base optimizer's step that puts entries of parameters, and of its state of them, back.

    Args:
        at_rest: (parameter, mask) pairs; the entries where the mask is True stay.
    """
    kept = [(p, mask.to(p.device), p.detach().clone(), _entries(base, p)) for p, mask in at_rest]
    yield
    with torch.no_grad():
        for p, mask, value, entries in kept:
            p.copy_(torch.where(mask, value, p))
            now = _entries(base, p, copy=False)
            for key, old in entries.items():
                now[key].copy_(torch.where(mask, old, now[key]))


def _entries(base: Optimizer, p: nn.Parameter, *, copy: bool = True) -> dict[str, Tensor]:
    """The optimizer's state of the parameter that has one number for each of its entries."""
    state = base.state.get(p, {})
    same = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
    return {k: v.clone() for k, v in same.items()} if copy else same

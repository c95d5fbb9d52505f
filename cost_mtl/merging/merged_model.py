"""A model whose weights are a differentiable function of a few coefficients."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cost_mtl.merging.adapter_layers import check_no_adapter
from cost_mtl.merging.blocks import all_finite, compute_dtype
from cost_mtl.merging.fitting import fit
from cost_mtl.merging.opening import open_source
from cost_mtl.merging.task_vector import TaskVector

__all__ = ["MergedModel"]


class MergedModel(nn.Module, ABC):
    """θ(c) = θ_pre + (a function of the coefficients c and of the task vectors), usable like the model itself.

    The model is called through ``torch.func.functional_call`` and never changed; ``parameters()`` are only the
    coefficients: train them by :meth:`fit`, or in your own loop by ``torch.optim.Adam(merged.parameters())``.
    Parameters of the model that no task vector has (heads, for example) are used unchanged.

    Args:
        model: at θ_pre. Its buffers and its mode (train or eval) are not changed; see :meth:`forward`.
        vectors: T task vectors; brought into memory, on the model's device.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no vectors, a block that the model lacks, or of another shape.

    Attributes:
        blocks: the B names of the blocks, those of the first vector first.

    Example:
        >>> base, one, two = (nn.Linear(2, 1) for _ in range(3))
        >>> vectors = [TaskVector(base, one), TaskVector(base, two)]
        >>> scaling = AnisotropicScaling(base, vectors, init=0.3)  # one of the merged models
        >>> isinstance(scaling, MergedModel), scaling(torch.randn(5, 2)).shape
        (True, torch.Size([5, 1]))
    """

    blocks: tuple[str, ...]

    fit = fit  # a method: the merged model is its first argument

    def __init__(self, model: nn.Module, vectors: Sequence[TaskVector]) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a module to run, got {type(model).__name__}")
        if not vectors:
            raise ValueError("vectors: expected at least one task vector, got none")
        check_no_adapter(open_source(model, "model"))
        # In a tuple: as an attribute the model would be a submodule, and its weights trainable parameters of this one.
        self._model = (model,)
        self._slots = _slots(model)
        first_name = {slot: names[0] for names in self._slots.values() for slot in names}
        self.blocks = tuple(dict.fromkeys(block for vector in vectors for block in vector.blocks))
        base = dict(model.named_parameters())
        self._base: dict[str, Tensor] = {}
        for block in self.blocks:
            if first_name.get(block) not in base:
                raise ValueError(
                    f"model: expected every block of the task vectors, got a model without the parameter {block!r}"
                )
            self._base[block] = base[first_name[block]].detach()
        self._names = {block: first_name[block] for block in self.blocks}
        if len(set(self._names.values())) < len(self.blocks):
            twice = [b for b in self.blocks if list(self._names.values()).count(self._names[b]) > 1]
            raise ValueError(
                f"model: expected separate weights for two blocks of the task vectors, got {twice[0]!r} and "
                f"{twice[1]!r} tied"
            )
        self._cached: dict[str, Tensor] | None = None

    def _stacked(self, block: str, vectors: Sequence[TaskVector]) -> tuple[slice | list[int], Tensor]:
        """Which n vectors have the block, and their values [n, *shape] in the dtype to compute in."""
        base = self._base[block]
        rows = [t for t, vector in enumerate(vectors) if block in vector.blocks]
        taus = [vectors[t].blocks[block] for t in rows]
        for tau in taus:
            if tau.shape != base.shape:
                raise ValueError(
                    f"{block!r}: expected the model's shape {list(base.shape)}, got {list(tau.shape)} in a vector"
                )
        dtype = compute_dtype(base.dtype, *(tau.dtype for tau in taus), label=repr(block))
        stack = torch.stack([tau.to(base.device, dtype) for tau in taus])
        return (slice(None) if len(rows) == len(vectors) else rows), stack  # a slice is a view: no gather, no scatter

    @abstractmethod
    def merged_block(self, block: str) -> Tensor:
        """θ(c) of one block, in float32 or wider, with its graph to the coefficients."""

    def starting_points(self) -> list[list[Tensor]]:
        """Coefficients that :meth:`fit` evaluates before training, its best candidate never being worse than these."""
        return [[parameter.detach().clone() for parameter in self.parameters()]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output at θ(c). In training mode it updates the model's buffers, in eval mode not."""
        tensors = self._merged() if self._cached is None else self._cached
        values = {slot: tensors[block] for block in self.blocks for slot in self._slots[self._names[block]]}
        # Each slot is named once, so torch need not tie anything: with its own tying, a layer that is reached under
        # two names would keep plain tensors in place of its parameters.
        return functional_call(self._model[0], values, args, kwargs, tie_weights=False)

    def _merged(self) -> dict[str, Tensor]:
        return {block: self.merged_block(block).to(self._base[block].dtype) for block in self.blocks}

    @contextmanager
    def merged_once(self) -> Iterator[None]:
        """Context in which θ(c) is computed once for any number of calls, as in a loss that sums over tasks."""
        self._cached = self._merged()
        try:
            yield
        finally:
            self._cached = None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context in which every module of the model is in eval mode; each gets its own mode back."""
        modes = {module: module.training for module in self._model[0].modules()}
        self._model[0].eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode

    @torch.no_grad()
    def merged_state(self) -> dict[str, Tensor]:
        """The model's state_dict at θ(c), in its dtypes, with memory of its own."""
        merged = self.merged_model().state_dict()
        return {key: value.detach() for key, value in merged.items()}

    @torch.no_grad()
    def merged_model(self) -> nn.Module:
        """A copy of the model at θ(c).

        Raises:
            ValueError: a merged weight is not finite.
        """
        model = copy.deepcopy(self._model[0])
        parameters = dict(model.named_parameters())
        for block, value in self._merged().items():
            if not all_finite(value):
                raise ValueError(f"{block!r}: expected finite merged weights, got NaN or infinity in {value.dtype}")
            parameters[self._names[block]].copy_(value)
        return model


def _slots(model: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """First name of each parameter -> the names of all places that hold it, each place once.

    A tied weight sits in two modules (two places); a module that is reached under two names is one place.
    """
    places: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
    return {names[0]: tuple(names) for names in places.values()}

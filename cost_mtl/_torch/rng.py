"""Evaluating a closure again as if for the first time: random streams and buffers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl._torch.param_groups import all_trainable


@dataclass(frozen=True)
class RandomStreams:
    """States of the generators that a closure may draw from: torch's (CPU and the given GPUs), NumPy's, Python's."""

    cpu: Tensor
    gpu: tuple[tuple[torch.device, Tensor], ...]
    numpy: Any
    python: Any

    @classmethod
    def capture(cls, devices: Iterable[torch.device] = ()) -> RandomStreams:
        gpu = tuple((d, torch.cuda.get_rng_state(d)) for d in devices if d.type == "cuda")
        return cls(torch.get_rng_state(), gpu, np.random.get_state(), random.getstate())

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.gpu:
            torch.cuda.set_rng_state(state, device)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class Buffers:
    """The buffers of some modules, to be put back bit for bit and object for object.

    All are copied every time: batch norm's kernels write running statistics without raising the version counter, so
    nothing tells which were changed.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._saved = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Put every buffer back. Not between a forward pass and its backward: autograd would rightly object."""
        with torch.no_grad():
            for module, name, buffer, value in self._saved:
                module._buffers[name] = buffer
                buffer.copy_(value)


@dataclass(frozen=True)
class ForwardState:
    """What a forward pass starts from beside parameters and batch: random streams and buffers."""

    streams: RandomStreams
    buffers: Buffers

    @classmethod
    def capture(cls, modules: Iterable[nn.Module], devices: Iterable[torch.device]) -> ForwardState:
        return cls(RandomStreams.capture(devices), Buffers(modules))

    def restore(self) -> None:
        self.streams.restore()
        self.buffers.restore()


def forward_state(base: Optimizer, model: nn.Module) -> ForwardState:
    """Random streams and buffers as they are now."""
    return ForwardState.capture(model.modules(), {p.device for p in all_trainable(base, model)})

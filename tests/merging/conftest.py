"""Small models that the merging tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

State = dict[str, Tensor]


class TiedModel(nn.Module):
    """An embedding whose weight is the output layer's too, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


def perturbed(model: nn.Module, seed: int, size: float = 0.1) -> nn.Module:
    """A copy whose parameters have moved."""
    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * size
            parameter.add_(noise.to(parameter.dtype))
    return other


@pytest.fixture
def perturb() -> Callable[..., nn.Module]:
    return perturbed


@pytest.fixture
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


@pytest.fixture
def normed() -> nn.Sequential:
    """With BatchNorm: running statistics, and an integer counter."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.fixture
def tied() -> TiedModel:
    torch.manual_seed(0)
    return TiedModel()


@pytest.fixture
def state() -> Callable[..., State]:
    """Random state_dicts of three blocks."""

    def make(seed: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> State:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 3, 2)}
        return {
            key: (torch.randn(shape, generator=generator, dtype=torch.float64) * size).to(dtype)
            for key, shape in shapes.items()
        }

    return make

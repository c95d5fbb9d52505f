"""Small models that the merging tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_mtl.merging import AnisotropicScaling, TaskVector
from tests.merging.merging_files import write_sharded

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


@pytest.fixture
def folders(tmp_path: Path, state: Callable[..., State]) -> tuple[list[Path], list[State]]:
    """A base and two fine-tunings in bfloat16, two shards each, and their state_dicts."""
    states = [state(seed, torch.bfloat16) for seed in (0, 1, 2)]
    names = ["base", "one", "two"]
    return [write_sharded(tmp_path / name, values) for name, values in zip(names, states, strict=True)], states


@pytest.fixture
def problem(mlp: nn.Module, perturb: Callable[..., nn.Module]) -> tuple[Any, ...]:
    """A model, two task vectors, and data that a certain scaling of them explains exactly."""
    vectors = [TaskVector(mlp, perturb(mlp, seed, 0.5)) for seed in (1, 2)]
    blocks = list(vectors[0].blocks)
    target = torch.tensor([[0.9, 0.2, 0.5, 0.7], [0.1, 0.8, 0.3, -0.4]])
    truth = AnisotropicScaling(mlp, vectors, init=target).merged_model()
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(40, 5, generator=generator) for _ in range(4)]
    batches = [(x, truth(x).detach()) for x in inputs]
    assert len(blocks) == 4
    return mlp, vectors, target, batches[:3], batches[3:]

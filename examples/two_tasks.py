"""The model and the data of the small recipes beside it: a regression and a classification that share their input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class TwoTasks(nn.Module):
    """A trunk with a regression head and a classification head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.value, self.kind = nn.Linear(32, 1), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 8] -> predicted values [B], logits [B, 3]."""
        z = self.trunk(x)
        return self.value(z)[:, 0], self.kind(z)


def task_losses(model: nn.Module, x: Tensor, value: Tensor, kind: Tensor) -> dict[str, Tensor]:
    """The losses by name, not their sum."""
    predicted, logits = model(x)
    return {"value": F.mse_loss(predicted, value), "kind": F.cross_entropy(logits, kind)}


def batches(size: int = 256, batch_size: int = 32) -> DataLoader:
    """Synthetic (x, value, kind); values are large, so that the classification at times conflicts with the mean."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 8, generator=generator)
    value = 6 * x[:, :4].sum(dim=1).sin()
    kind = (x[:, 2:6].sum(dim=1) > 0).long() + (x[:, 0] > 1).long()
    return DataLoader(TensorDataset(x, value, kind), batch_size)

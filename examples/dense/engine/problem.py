"""What the training loop asks of a data set. NYUv2, CityScapes, CelebA and QM9 each implement it once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Batch", "EpochRow", "Meter", "Metric", "Problem", "mean_of_last"]

Batch = Mapping[str, Tensor]
"""A flat mapping of tensors: COST can keep it in its memory and in its checkpoint."""


@dataclass(frozen=True)
class Metric:
    """One column of a table.

    Attributes:
        name: key in the results and column of the files in ``published/`` (without the arrow suffix).
        label: column head.
        higher_is_better: the sign in Delta m.
        digits: decimals printed in the papers' tables.
        task: the task it measures; single-task baselines fill only their own columns.
    """

    name: str
    label: str
    higher_is_better: bool
    digits: int
    task: str


@dataclass
class EpochRow:
    """What one epoch left behind: a line of the JSONL log.

    Attributes:
        epoch: 1 for the first.
        lr: learning rate during the epoch.
        train: task -> mean training loss over the steps.
        metrics: split -> metric -> value; empty where the epoch was not evaluated.
        conflict: share of the steps in which some task conflicts with the mean gradient (NaN with one task).
        teleports: one mapping per attempt: step, accepted, reason, drift, drift_heldout, sigma, seconds.
        seconds: wall time of training and of evaluation.
    """

    epoch: int
    lr: float
    train: dict[str, float]
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    conflict: float = float("nan")
    teleports: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class Meter(Protocol):
    """Accumulates the metrics of one pass."""

    def update(self, output: Any, batch: Batch) -> None: ...

    def compute(self) -> dict[str, float]: ...


class EpochLoader(Protocol):
    """A DataLoader whose order depends on (seed, epoch) only."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Any: ...


class Problem(Protocol):
    """A data set with its tasks, model, losses, metrics and schedule.

    Attributes:
        name: of the published tables and the default output folder.
        tasks: in the order of the losses.
        metrics: what MR and Delta m are made of.
        shown: the table's columns and the plot's panels.
        splits: what is evaluated after an epoch.
    """

    name: str
    tasks: tuple[str, ...]
    metrics: tuple[Metric, ...]
    shown: tuple[Metric, ...]
    splits: tuple[str, ...]

    def model(self, tasks: Sequence[str]) -> nn.Module:
        """A freshly initialised model for these tasks; one task is a single-task baseline."""
        ...

    def train_loader(self, seed: int, epoch: int) -> EpochLoader: ...

    def eval_loader(self, split: str) -> EpochLoader: ...

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The model's output for a batch on its device."""
        ...

    def losses(self, output: Any, batch: Batch) -> dict[str, Tensor]:
        """Task -> scalar loss."""
        ...

    def meter(self, tasks: Sequence[str]) -> Meter: ...

    def scheduler(self, optimizer: torch.optim.Optimizer, epochs: int) -> LRScheduler | None: ...

    def schedule_value(self, row: EpochRow, tasks: Sequence[str]) -> float | None:
        """What ``scheduler.step`` is given (a plateau schedule's criterion), or None."""
        ...

    def summary(self, history: Sequence[EpochRow], tasks: Sequence[str]) -> dict[str, float]:
        """A run's result from its epochs: metric -> value."""
        ...


def mean_of_last(history: Sequence[EpochRow], split: str, count: int = 10) -> dict[str, float]:
    """Mean of each metric over the last ``count`` evaluated epochs (fewer if there are fewer): the papers' result."""
    rows = [row.metrics[split] for row in history if split in row.metrics][-count:]
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} if rows else {}

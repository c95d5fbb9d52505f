"""Training the coefficients of a merged model, with held-out data for stopping and selection."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cost_mtl._validation import at_least, finite, positive

__all__ = ["FitReport", "FitSettings", "Fittable", "Loss", "fit"]

Loss = Callable[[Any, Any], Tensor]
"""``loss(model, batch)`` -> scalar; ``model`` is called like the model that is merged, any number of times."""


class Fittable(Protocol):
    """What a fit needs of a model with coefficients; :class:`cost_mtl.merging.MergedModel` has it."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """The coefficients."""
        ...

    def starting_points(self) -> list[list[Tensor]]:
        """Coefficients to evaluate before training, those that training starts from first."""
        ...

    def evaluating(self) -> AbstractContextManager[None]:
        """Context in which the model is in eval mode."""
        ...

    def merged_once(self) -> AbstractContextManager[None]:
        """Context in which the weights are computed once for any number of calls."""
        ...


@dataclass(frozen=True)
class FitSettings:
    """How coefficients are trained: Adam, clipping, early stopping on held-out data.

    Attributes:
        lr: Adam's learning rate; default 0.01, as published for aTLAS and DV-BASI.
        max_epochs: the budget; default 60, as published.
        patience: epochs in which the held-out value sets no new minimum of the training's course, after which training
            stops; default 5, as published (there it is the training loss that is watched).
        clip: largest norm of the gradient; default 1, as published. None clips nothing.
        l1, l2: weights of Σ|c| and Σc² in the loss, for an optional penalty; default 0.
        weight_decay: AdamW's, default 0: decay pulls the coefficients of a merge towards its start, and what a later
            iteration seems to gain is then only what the decay had taken.

    Example:
        >>> base, one, two = (nn.Linear(2, 1) for _ in range(3))
        >>> vectors = [TaskVector(base, one), TaskVector(base, two)]
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean()
        >>> train, held_out = ([(torch.randn(16, 2), torch.randn(16, 1))] for _ in range(2))
        >>> settings = FitSettings(lr=0.1, max_epochs=3)
        >>> report = AnisotropicScaling(base, vectors).fit(loss, train, held_out, settings=settings)
        >>> report.epochs <= 3
        True
    """

    lr: float = 0.01
    max_epochs: int = 60
    patience: int = 5
    clip: float | None = 1.0
    l1: float = 0.0
    l2: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        finite("lr", self.lr, above=0)
        at_least("max_epochs", self.max_epochs, 0)
        at_least("patience", self.patience, 1)
        positive("clip", self.clip, or_none=True)
        for name in ("l1", "l2", "weight_decay"):
            finite(name, getattr(self, name), least=0)


@dataclass(frozen=True)
class FitReport:
    """How a fit went.

    Attributes:
        starts: selection values of the starting points: of the coefficients that training started from, then of the
            other candidates (for anisotropic scaling: all zero).
        best: the smallest selection value seen; the model's coefficients are those that gave it.
        best_epoch: the epoch that it was seen after; 0: before training, so that nothing was gained.
        train: mean training loss of each epoch.
        selection: selection value after each epoch.
        stopped: "patience", "budget", or "non_finite" (the loss was NaN or infinite: with a warning).

    Example:
        >>> base, one, two = (nn.Linear(2, 1) for _ in range(3))
        >>> vectors = [TaskVector(base, one), TaskVector(base, two)]
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean()
        >>> train, held_out = ([(torch.randn(16, 2), torch.randn(16, 1))] for _ in range(2))
        >>> report = AnisotropicScaling(base, vectors).fit(loss, train, held_out)
        >>> report.best == min(*report.starts, *report.selection)
        True
    """

    starts: tuple[float, ...]
    best: float
    best_epoch: int
    train: tuple[float, ...]
    selection: tuple[float, ...]
    stopped: str

    @property
    def epochs(self) -> int:
        """Epochs done."""
        return len(self.train)


def fit(
    merged: Fittable,
    loss: Loss,
    train: Iterable[Any],
    held_out: Iterable[Any] | None = None,
    *,
    selection: Callable[[Any], float] | None = None,
    settings: FitSettings | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> FitReport:
    """Trains the coefficients, and leaves the best ones seen on the selection data in ``merged``.

    1. Evaluate the starting points (for anisotropic scaling the given coefficients, and zero).
    2. Each epoch: one Adam step per training batch; then the selection value.
    3. Stop after ``patience`` epochs without progress, or at the budget; put back the best coefficients.

    So the selection value never ends above where it started. The model runs in eval mode (no dropout, BatchNorm with
    its running statistics), its weights and their ``.grad`` are not touched.

    Args:
        merged: the coefficients to train.
        loss: the training objective; see :data:`Loss`. Unsupervised: :func:`cost_mtl.merging.entropy` of the outputs.
        train: batches; iterated once per epoch, so a list or a DataLoader, not a generator.
        held_out: batches for stopping and selection by the mean of ``loss``; not those of ``train``.
        selection: instead of ``held_out``: merged model -> value, smaller is better (a labelled loss beside an
            unsupervised objective, or 1 − accuracy).
        settings: default :class:`FitSettings`.
        on_epoch: called with the epoch (from 1) and the selection value.

    Raises:
        ValueError: not exactly one of ``held_out`` and ``selection``, no batches, a loss that is no scalar or does not
            depend on the coefficients, or a selection value that is not finite at the start.
    """
    settings = settings or FitSettings()
    evaluate = _selection(merged, loss, held_out, selection)
    parameters = list(merged.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
    starts, best, best_point = _best_start(merged, parameters, evaluate)
    best_epoch, stopped = 0, "budget"
    # Patience counts from the lowest value of the training itself, which may start above a candidate (λ = 0).
    lowest, lowest_epoch = starts[0], 0
    train_losses: list[float] = []
    values: list[float] = []
    for epoch in range(1, settings.max_epochs + 1):
        train_losses.append(_train_epoch(merged, parameters, optimizer, loss, train, settings))
        values.append(evaluate())
        if on_epoch is not None:
            on_epoch(epoch, values[-1])
        if not (math.isfinite(train_losses[-1]) and math.isfinite(values[-1])):
            warnings.warn(
                f"the loss is not finite in epoch {epoch}: the best coefficients so far are kept", stacklevel=2
            )
            stopped = "non_finite"
            break
        if values[-1] < best:
            best, best_epoch, best_point = values[-1], epoch, [p.detach().clone() for p in parameters]
        if values[-1] < lowest:
            lowest, lowest_epoch = values[-1], epoch
        if epoch - lowest_epoch >= settings.patience:
            stopped = "patience"
            break
    _put(parameters, best_point)
    return FitReport(starts, best, best_epoch, tuple(train_losses), tuple(values), stopped)


def _selection(
    merged: Fittable,
    loss: Loss,
    held_out: Iterable[Any] | None,
    selection: Callable[[Any], float] | None,
) -> Callable[[], float]:
    if (held_out is None) == (selection is None):
        given = "neither" if held_out is None else "both"
        raise ValueError(f"held_out, selection: expected exactly one of them, got {given}")

    @torch.no_grad()
    def evaluate() -> float:
        with merged.evaluating(), merged.merged_once():
            if selection is not None:
                return float(selection(merged))
            values = [_scalar(loss(merged, batch)) for batch in held_out or ()]
        if not values:
            raise ValueError("held_out: expected at least one batch, got none")
        return sum(values) / len(values)

    return evaluate


def _best_start(
    merged: Fittable, parameters: Sequence[Tensor], evaluate: Callable[[], float]
) -> tuple[tuple[float, ...], float, list[Tensor]]:
    """Selection values of the starting points, and the best of these; the coefficients stay where they were."""
    points = merged.starting_points()
    values = []
    for point in points:
        _put(parameters, point)
        values.append(evaluate())
    _put(parameters, points[0])
    if not math.isfinite(min(values)):
        raise ValueError(f"selection: expected a finite value before training, got {values}")
    best = values.index(min(values))
    return tuple(values), values[best], points[best]


def _train_epoch(
    merged: Fittable,
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    train: Iterable[Any],
    settings: FitSettings,
) -> float:
    values = []
    for batch in train:
        with torch.enable_grad(), merged.evaluating(), merged.merged_once():
            value = loss(merged, batch)
            values.append(_scalar(value))
            if not value.requires_grad:
                raise ValueError("loss: expected one that depends on the coefficients, got one that does not: call "
                                 "the model that it is given")  # fmt: skip
            penalty = sum(settings.l1 * p.abs().sum() + settings.l2 * p.square().sum() for p in parameters)
            # Not backward(): the model's own parameters (heads) would collect gradients.
            gradients = torch.autograd.grad(value + penalty, parameters, allow_unused=True)
        if not math.isfinite(values[-1]):
            break
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not values:
        raise ValueError("train: expected at least one batch in every epoch, got none (a generator that is used up?)")
    return sum(values) / len(values)


def _scalar(value: Any) -> float:
    if not isinstance(value, Tensor) or value.dim() != 0:
        what = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"loss: expected a scalar tensor, got {what}")
    return float(value.detach())


def _put(parameters: Sequence[Tensor], point: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, point, strict=True):
            parameter.copy_(value)

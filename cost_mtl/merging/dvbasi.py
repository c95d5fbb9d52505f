"""DV-BASI: improving a merge that has stagnated, by scaling its difference vector (AAAI-26, arXiv 2511.17987).

::

    theta = start                              # a merged model, or one fine-tuned model
    for m in 1..M:
        delta = theta - theta_pre              # the difference vector, one block per weight
        train lambda on L(theta + lambda * delta), from lambda = 0.1
        theta += lambda * delta

Algebra: δ_{m+1} = (I + Λ_m) δ_m, so the iteration stays among the block-wise multiples of the first difference δ_0.
``direction="history"`` with earlier points of the way, and ``"random_matched"``, leave that set.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cost_mtl._validation import at_least, finite, integer, one_of
from cost_mtl.merging.anisotropic import AnisotropicScaling
from cost_mtl.merging.directions import difference_direction, history_directions, random_matched_direction
from cost_mtl.merging.fitting import FitReport, FitSettings, Loss
from cost_mtl.merging.merged_model import MergedModel
from cost_mtl.merging.source import Model
from cost_mtl.merging.task_vector import TaskVector

__all__ = ["DVBASI", "DVBASIResult", "Iteration"]

Direction = Literal["difference", "history", "random_matched"]


@dataclass(frozen=True)
class Iteration:
    """One iteration.

    Attributes:
        number: from 1.
        coefficients: λ [D, B] of its D directions, as applied; zeros where no step was better than none.
        blocks: the B names of the columns.
        before, after: selection value before and after; after <= before.
        fit: how the training went.

    Example:
        >>> pretrained, merged = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean()
        >>> train, held_out = ([(torch.randn(16, 2), torch.randn(16, 1))] for _ in range(2))
        >>> result = DVBASI(iterations=1).run(merged, pretrained, loss, train, held_out)
        >>> (step,) = result.iterations
        >>> step.number, step.coefficients.shape, step.blocks
        (1, torch.Size([1, 2]), ('weight', 'bias'))
    """

    number: int
    coefficients: Tensor
    blocks: tuple[str, ...]
    before: float
    after: float
    fit: FitReport

    @property
    def moved(self) -> bool:
        """Whether the model was moved."""
        return bool(self.coefficients.any())


@dataclass(frozen=True)
class DVBASIResult:
    """Where the iteration ended: the best point it saw on the selection data.

    Attributes:
        model: a copy of the given model at that point.
        iterations: what each iteration did.
        stopped: "budget", or "stagnated": λ = 0 was best, and the next iteration would be the same.

    Example:
        >>> pretrained, merged = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean()
        >>> train, held_out = ([(torch.randn(16, 2), torch.randn(16, 1))] for _ in range(2))
        >>> result = DVBASI(iterations=1).run(merged, pretrained, loss, train, held_out)
        >>> result.stopped in ("budget", "stagnated"), result.epochs == result.iterations[0].fit.epochs
        (True, True)
    """

    model: nn.Module
    iterations: tuple[Iteration, ...]
    stopped: str

    @property
    def epochs(self) -> int:
        """Training epochs over all iterations, the budget that a control should get too."""
        return sum(iteration.fit.epochs for iteration in self.iterations)


@dataclass(frozen=True)
class DVBASI:
    """The iteration's settings; :meth:`run` runs it.

    Differs from the published code: stopping and selection are on held-out data (there: training loss and test set),
    λ = 0 is always a candidate, the best coefficients are kept rather than the last, and there is no weight decay.

    Attributes:
        iterations: M; default 4, the published range is 3 to 5.
        direction: "difference" (default, the published one): δ = θ − θ_pre. "history": also θ − each earlier point of
            the run and of ``history``. "random_matched": Gaussian blocks with the norms of δ's, new in each iteration:
            the control for whether the direction matters.
        init: λ at the start of each iteration, along the first direction (0 along the others); default 0.1, published
            as insensitive between 0.1 and 1.
        fit: how λ is trained.
        seed: of the random directions, keyed on (seed, iteration).

    Example:
        >>> pretrained, merged = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> def loss(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().mean()
        >>> train, held_out = ([(torch.randn(16, 2), torch.randn(16, 1))] for _ in range(2))
        >>> result = DVBASI(iterations=2).run(merged, pretrained, loss, train, held_out)
        >>> result.iterations[-1].after <= result.iterations[0].before
        True
    """

    iterations: int = 4
    direction: Direction = "difference"
    init: float = 0.1
    fit: FitSettings = field(default_factory=FitSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        at_least("iterations", self.iterations, 1)
        one_of("direction", self.direction, get_args(Direction))
        finite("init", self.init)
        if not isinstance(self.fit, FitSettings):
            raise ValueError(f"fit: expected FitSettings, got {type(self.fit).__name__}")
        integer("seed", self.seed)

    def run(
        self,
        model: nn.Module,
        pretrained: Model,
        loss: Loss,
        train: Iterable[Any],
        held_out: Iterable[Any] | None = None,
        *,
        selection: Callable[[MergedModel], float] | None = None,
        history: Sequence[Model] = (),
        exclude: Sequence[str] = (),
        on_iteration: Callable[[Iteration, nn.Module], None] | None = None,
    ) -> DVBASIResult:
        """Runs the iteration from ``model``, which itself is not changed.

        Args:
            model: at the start: a merged model, or one model fine-tuned on one task (the single-task form).
            pretrained: θ_pre.
            loss, train, held_out, selection: see :meth:`cost_mtl.merging.MergedModel.fit`.
            history: earlier points of the way to the start (merges tried before, fine-tuned models) for
                ``direction="history"``. Without any, its directions are block-wise multiples of δ_0, and it can reach
                nothing that "difference" can't.
            exclude: patterns of parameters that are not changed, for example heads.
            on_iteration: called after each iteration with it and a model at the new point.

        Returns:
            The result; its selection value is never above that of the start.

        Raises:
            TypeError: ``model`` is no module.
            ValueError: the model equals ``pretrained`` (there is no difference to scale), ``history`` without the
                direction of that name, or what ``fit`` and TaskVector raise.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a module to run, got {type(model).__name__}")
        if history and self.direction != "history":
            raise ValueError(f'history: expected direction="history" with it, got direction={self.direction!r}')
        point = copy.deepcopy(model)
        earlier: list[Model] = list(history)
        done: list[Iteration] = []
        stopped = "budget"
        for number in range(1, self.iterations + 1):
            directions = self._directions(number, pretrained, point, earlier, exclude)
            iteration, moved = self._iterate(number, point, directions, loss, train, held_out, selection)
            done.append(iteration)
            if on_iteration is not None:
                on_iteration(iteration, moved)
            if not iteration.moved and self.direction != "random_matched":
                stopped = "stagnated"
                break
            if iteration.moved:
                if self.direction == "history":
                    earlier.append(point)
                point = moved
        return DVBASIResult(point, tuple(done), stopped)

    def _directions(
        self, number: int, pretrained: Model, point: nn.Module, earlier: Sequence[Model], exclude: Sequence[str]
    ) -> list[TaskVector]:
        with warnings.catch_warnings():  # buffers differ from the pre-trained model's, and stay the start's
            warnings.simplefilter("ignore", UserWarning)
            delta = difference_direction(pretrained, point, exclude)
            if self.direction == "history":
                return history_directions(delta, earlier, point, exclude)
            if self.direction == "random_matched":
                return [random_matched_direction(delta, self.seed, number)]
            return [delta]

    def _iterate(
        self,
        number: int,
        point: nn.Module,
        directions: list[TaskVector],
        loss: Loss,
        train: Iterable[Any],
        held_out: Iterable[Any] | None,
        selection: Callable[[MergedModel], float] | None,
    ) -> tuple[Iteration, nn.Module]:
        blocks = len({block for direction in directions for block in direction.blocks})
        init = torch.zeros(len(directions), blocks)
        init[0] = self.init
        scaling = AnisotropicScaling(point, directions, init=init)
        report = scaling.fit(loss, train, held_out, selection=selection, settings=self.fit)
        coefficients = scaling.coefficients.detach().clone()
        # The last starting point is λ = 0, the point itself.
        iteration = Iteration(number, coefficients, scaling.blocks, report.starts[-1], report.best, report)
        return iteration, scaling.merged_model()

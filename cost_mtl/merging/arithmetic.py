"""Task arithmetic: addition, negation, analogy, and the choice of the scale (Ilharco et al., 2023)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cost_mtl.merging.apply import apply_vector
from cost_mtl.merging.blocks import checked_factor
from cost_mtl.merging.source import Model, TensorSource
from cost_mtl.merging.statistics import BufferPolicy
from cost_mtl.merging.task_vector import TaskVector, combine

__all__ = ["ScaleSearch", "as_vectors", "search_scale", "task_analogy", "task_arithmetic"]

GRID = tuple(step / 20 for step in range(21))
"""0, 0.05, ..., 1: the published grid."""


def task_arithmetic(
    base: Model,
    vectors: Iterable[TaskVector | Model],
    scale: float | Sequence[float] = 1.0,
    *,
    buffers: BufferPolicy = "keep",
    batches: Iterable[Any] | None = None,
) -> nn.Module | dict[str, Tensor]:
    """θ_pre + α Σ τ_i, or θ_pre + Σ α_i τ_i.

    A negative scale is negation, the published way to unlearn a task: ``task_arithmetic(base, [tau], -0.5)``.

    Args:
        base: θ_pre: a module gives a new module, a state_dict or a path a new state_dict.
        vectors: T task vectors; a model among them stands for its task vector from ``base``.
        scale: α, or one α_i per vector. The default 1 makes one vector give its fine-tuned model back; with several,
            choose it on held-out data (:func:`search_scale`; published merges of eight tasks use about 0.3).
        buffers, batches: see :meth:`TaskVector.apply_to`.

    Raises:
        TypeError, ValueError: see :class:`TaskVector` and :meth:`TaskVector.apply_to`.

    Example:
        >>> base = {"w": torch.zeros(2)}
        >>> models = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}]
        >>> task_arithmetic(base, models, 0.5)
        {'w': tensor([0.5000, 1.0000])}
    """
    taus = as_vectors(base, vectors)
    return apply_vector(base, combine(taus, _scales(scale, len(taus))), 1.0, buffers, batches)


def _scales(scale: float | Sequence[float], count: int) -> list[float]:
    if not isinstance(scale, Iterable):
        return [checked_factor(scale, "scale")] * count
    scales = [checked_factor(value, "scale") for value in scale]
    if len(scales) != count:
        raise ValueError(f"scale: expected a number, or one for each of the {count} vectors, got {len(scales)}")
    return scales


def task_analogy(a: Model, b: Model, c: Model, scale: float = 1.0) -> nn.Module | dict[str, Tensor]:
    """C + scale (B − A): "A is to B as C is to the result" (Ilharco et al., 2023, section 5).

    Args:
        a, b, c: three fine-tunings of one model; the result is of the kind of ``c``, with its buffers.
        scale: 1 by default, as in the definition.

    Example:
        >>> a, b, c = ({"w": torch.tensor(values)} for values in ([1.0, 0.0], [1.0, 2.0], [5.0, 5.0]))
        >>> task_analogy(a, b, c)
        {'w': tensor([5., 7.])}
    """
    return apply_vector(c, TaskVector(a, b, name="b"), scale, "keep", None)


@dataclass(frozen=True)
class ScaleSearch:
    """The scale with the best score, its score, and the scores of all scales tried.

    Example:
        >>> base, tuned = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> search_scale(base, [tuned], lambda merged: float(merged["w"]), [0.0, 1.0])
        ScaleSearch(scale=1.0, score=1.0, scores={0.0: 0.0, 1.0: 1.0})
    """

    scale: float
    score: float
    scores: Mapping[float, float]


def search_scale(
    base: Model,
    vectors: Iterable[TaskVector | Model],
    score: Callable[[Any], float],
    grid: Sequence[float] = GRID,
    *,
    buffers: BufferPolicy = "keep",
    batches: Sequence[Any] | None = None,
) -> ScaleSearch:
    """The α of θ_pre + α Σ τ_i from a grid.

    Args:
        base, vectors, buffers, batches: see :func:`task_arithmetic`.
        score: merged model (of the kind of ``base``) -> score on held-out data, larger is better. To unlearn with a
            bound on a control task, return −inf where the bound is violated.
        grid: scales to try; default 0, 0.05, ..., 1, as published. 0 is the base itself.

    Raises:
        ValueError: the grid is empty, or no score is finite.

    Example:
        >>> base, tuned = {"w": torch.zeros(1)}, {"w": torch.ones(1)}
        >>> found = search_scale(base, [tuned], lambda merged: -abs(float(merged["w"]) - 0.3))
        >>> round(found.scale, 2)
        0.3
    """
    if not grid:
        raise ValueError("grid: expected at least one scale, got none")
    total = combine(taus := as_vectors(base, vectors), [1.0] * len(taus))
    scores = {float(alpha): float(score(apply_vector(base, total, float(alpha), buffers, batches))) for alpha in grid}
    finite = {alpha: value for alpha, value in scores.items() if math.isfinite(value)}
    if not finite:
        raise ValueError(f"score: expected a finite score for at least one scale, got {scores}")
    best = max(finite, key=lambda alpha: finite[alpha])
    return ScaleSearch(best, finite[best], scores)


def as_vectors(base: Model | TensorSource, vectors: Iterable[TaskVector | Model]) -> list[TaskVector]:
    """Task vectors as they are, models as their task vectors from ``base``.

    Raises:
        TypeError: one vector or model instead of a sequence.
        ValueError: none at all.
    """
    if isinstance(vectors, TaskVector | nn.Module | Mapping | str | os.PathLike):
        raise TypeError(f"vectors: expected a sequence of task vectors or models, got one {type(vectors).__name__}")
    result = list(_vectors(base, vectors))
    if not result:
        raise ValueError("vectors: expected at least one task vector or model, got none")
    return result


def _vectors(base: Model | TensorSource, vectors: Iterable[TaskVector | Model]) -> Iterator[TaskVector]:
    for number, item in enumerate(vectors):
        yield item if isinstance(item, TaskVector) else TaskVector(base, item, name=f"models[{number}]")

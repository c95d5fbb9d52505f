"""The report of a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cost_mtl.base import StepReport
from cost_mtl.gradients.gramian import cosines, norms
from cost_mtl.step.evaluate import Evaluation
from cost_mtl.step.weigh import Weights

if TYPE_CHECKING:  # a report carries another room's
    from cost_mtl.teleport.base import TeleportReport


def step_report(
    losses: Tensor,
    now: Evaluation,
    weights: Weights,
    *,
    conflict: bool | None,
    teleport: TeleportReport | None,
    no_teleport: str,
    skipped_total: int,
) -> StepReport:
    """Of a step that was made.

    Args:
        losses: [K], before a teleport; now: the evaluation that the update was made from.
    """
    M = weights.gramian if now.weights is None and (len(now.names) > 1 or now.layout.params) else None
    return StepReport(
        losses,
        now.names,
        weights=weights.weighed.weights,
        gramian=M,
        cosines=None if M is None else cosines(M),
        norms=None if M is None else norms(M),
        conflict=conflict,
        teleport=teleport,
        solver=weights.weighed.solver,
        skipped_total=skipped_total,
        no_teleport=no_teleport,
    )


def skipped_report(now: Evaluation, skipped_total: int) -> StepReport:
    """Of a step that was left out: there are no weights."""
    weights = now.gradients.matrix.new_full((len(now.names),), float("nan"))
    return StepReport(now.losses, now.names, weights=weights, skipped=True, skipped_total=skipped_total)


def settings_that_differ(given: Mapping[str, Any], function: Callable[..., Any]) -> list[str]:
    """``name=value`` of each setting that is not the default of the function's argument of that name."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    chosen = {name: _chosen(value) for name, value in given.items()}
    return [f"{name}={_shown(v)}" for name, v in chosen.items() if not _same(v, defaults[name])]


def _chosen(value: Any) -> Any:
    """What the user has chosen, without our adapter around it."""
    return getattr(value, "weighting", getattr(value, "function", value))


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and a == b)


def _shown(value: Any) -> str:
    return str(value.__qualname__) if isinstance(value, FunctionType) else repr(value)

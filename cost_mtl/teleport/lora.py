"""Teleports through a PEFT adapter: LoRA by default, any other PEFT method that merges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from cost_mtl._validation import at_least
from cost_mtl.teleport.base import TeleportProblem
from cost_mtl.teleport.coordinates.adapters import adapters, refused_layers, unfit_layers
from cost_mtl.teleport.coordinates.layers import Layer, shared_layers
from cost_mtl.teleport.move import Move
from cost_mtl.teleport.objectives.base import Objective
from cost_mtl.teleport.settings import MoveSettings
from cost_mtl.teleport.solvers.base import make_move


class NoAdaptableLayerError(ValueError):
    """No layer of the shared part can carry an adapter; the message names each with its reason."""


RANK = 5
"""The paper's."""


@dataclass(frozen=True)
class _Adapter:
    """The fields that come before those of :class:`MoveSettings`: dataclasses take the last base's first."""

    rank: int = RANK
    peft_config: Any = None


@dataclass(frozen=True)
class LoRATeleporter(MoveSettings, _Adapter):
    """Delta theta as a low-rank PEFT adapter on the shared Linear and Conv layers, merged afterwards (COST, Eqns 5-11).

    The paper trains the adapter by Adam on loss invariance minus gamma times sharpness (``solver=Penalty()``), which
    was measured to trade invariance for its gain. By default the adapter is moved along the level set of all task
    losses instead (``cost_mtl.teleport.solvers.level_set``), in one step without double backward.

    Args:
        rank: of the adapter; default 5, the paper's. It hardly matters (1, 5 and 16 were measured).
        peft_config: any PEFT config whose method merges into the weights (LoHa, LoKr, BOFT, DoRA, ...); default LoRA
            of the given rank. Its ``target_modules``, where given, choose among the shared layers; a layer on which
            the fresh adapter is not the identity is left out and reported.
        objective: ``"auto"`` (default): the conflict objective, and if its move is rejected the norm objective; the
            other way round where a cosine has no gradient (opposite or equal directions). ``"conflict"``: the smallest
            cos(g_i, g_0); ``"norm"``: the balanced gradient norms, the paper's aim. Also ``"conflict-exact"``,
            ``"norm-exact"``, ``"sharpness"``, ``"sphere"``, or an object: see ``cost_mtl.teleport.objectives.base``.
        solver: :class:`~cost_mtl.LevelSet` (default) or :class:`~cost_mtl.Penalty`, the paper's.
        acceptance: what the move has to keep and to gain.
        tolerance, invariance: shorthands for ``Acceptance(tolerance=..., invariance=...)``, refused beside an
            ``acceptance`` that says something else.

    Raises:
        NoAdaptableLayerError: in ``propose``.
    """

    def __post_init__(self, tolerance: float | None, invariance: Literal["each", "mean"] | None) -> None:
        super().__post_init__(tolerance, invariance)
        at_least("rank", self.rank, 1)
        if self.peft_config is not None:
            _check_config(self.peft_config)
            if self.rank != RANK:
                raise ValueError(
                    f"rank: expected it in peft_config, where there is one, got rank={self.rank} beside it"
                )

    def prepare(self) -> None:
        """Import PEFT (seconds, since it imports transformers). COST calls it when it is made, so that the first
        teleport does not stall a training run."""
        import peft  # noqa: F401

    def propose(self, problem: TeleportProblem, /) -> Move:
        config = self._config()
        layers, skipped = shared_layers([problem.model], problem.params)
        layers = [layer for layer in layers if _targeted(config, layer, skipped)]
        _require(layers, skipped)
        # A fresh LoRA is the identity exactly; a layer whose forward is not called has no gradient and stays.
        for check in () if self.peft_config is None else (refused_layers, unfit_layers):
            unfit = check(problem, layers, config)
            skipped |= unfit
            layers = [layer for layer in layers if layer.name not in unfit]
            _require(layers, skipped)
        return self._move(layers, skipped, config, self.objectives_in_turn(problem)[0], problem)

    def propose_for(self, objective: Objective, problem: TeleportProblem, rejected: Move, /) -> Move:
        layers, _ = shared_layers([problem.model], problem.params)
        fit = [layer for layer in layers if layer.name not in rejected.skipped_layers]
        return self._move(fit, rejected.skipped_layers, self._config(), objective, problem)

    def _move(
        self,
        layers: list[Layer],
        skipped: Mapping[str, str],
        config: Any,
        objective: Objective,
        problem: TeleportProblem,
    ) -> Move:
        with adapters(problem, layers, config, plain_lora=self.peft_config is None) as coordinates:
            return make_move(
                problem,
                coordinates,
                objective,
                self.solver,
                self.acceptance,
                either=self.any_standard,
                skipped_layers=skipped,
            )

    def _config(self) -> Any:
        if self.peft_config is not None:
            return self.peft_config
        from peft import LoraConfig

        return LoraConfig(r=self.rank, lora_alpha=self.rank)


def _check_config(config: Any) -> None:
    """Raises TypeError for what is no config of a PEFT method with adapters; without importing PEFT."""
    if isinstance(config, type) or not getattr(config, "peft_type", None) or not hasattr(config, "target_modules"):
        what = f"the class {config.__name__}" if isinstance(config, type) else type(config).__name__
        raise TypeError(f"peft_config: expected the config of a PEFT method that adapts layers, as in "
                        f"LoHaConfig(r=5), got {what}")  # fmt: skip


def _targeted(config: Any, layer: Layer, skipped: dict[str, str]) -> bool:
    from peft.tuners.tuners_utils import check_target_module_exists

    if getattr(config, "target_modules", None) in (None, "all-linear"):
        return config.target_modules is None or isinstance(layer.module, nn.Linear)
    if check_target_module_exists(config, layer.name):
        return True
    skipped[layer.name] = "not among the config's target_modules"
    return False


def _require(layers: list[Layer], skipped: dict[str, str]) -> None:
    if layers:
        return
    named = "; ".join(f"{name} ({reason})" for name, reason in skipped.items()) or "none has a weight of its own"
    raise NoAdaptableLayerError(f"no shared layer can carry an adapter: {named}. DenseTeleporter() needs none.")

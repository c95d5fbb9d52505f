"""One training run of ``symmetry.py``: settings in, a record of plain numbers out."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import symmetry_moves as moves
import torch
from ablation_arms import NoMove
from ablation_problems import Study
from ablation_run import base_optimizer
from default_scale_problems import metrics
from problems import Batch, Heads, Problem
from torch import Tensor

import cost_mtl

ARMS = ("plain", "cosine", "cosine-random", "balance", "balance-random", "rates", "rates-random", "lora", "no-move")
WEIGHTINGS: dict[str, Any] = {
    "fairgrad": (cost_mtl.FairGrad(alpha=2.0), 1.0),
    "cagrad": (cost_mtl.CAGrad(c=0.4), None),
    "sum": (cost_mtl.EqualWeighting(), None),
}
"""The weighting, and the norm at which the shared gradient is clipped."""

EPOCHS = {"multimnist": 6, "qm9": 6, "yeast": 10}
LAST = 2
"""Final epochs whose test metrics are averaged."""

REMEMBERED = 16
"""Earlier batches on which a move is chosen."""


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on but the code; its JSON form is the key of the record.

    Attributes:
        lr: halved after half of the epochs.
    """

    problem: str
    weighting: str
    optimizer: str
    arm: str
    seed: int
    lr: float
    smoke: bool = False

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def epochs(self) -> int:
        return 4 if self.smoke else EPOCHS[self.problem]


class Always:
    """A trigger that always fires."""

    def __call__(self, gramian: Tensor) -> bool:
        return True


def build(settings: Settings, model: Heads, at: int) -> cost_mtl.COST:
    """The optimizer; for the arms with adapters one attempt in step ``at``."""
    weighting, max_norm = WEIGHTINGS[settings.weighting]
    teleporter = {"lora": cost_mtl.LoRATeleporter, "no-move": NoMove}.get(settings.arm, lambda: None)()

    def hand_over(report: cost_mtl.TeleportReport) -> None:
        if isinstance(teleporter, NoMove):
            optimizer.progress.sigma = teleporter.sigma

    optimizer = cost_mtl.COST(
        base_optimizer(settings.optimizer, model.parameters(), settings.lr),
        model,
        shared=model.trunk,
        weighting=weighting,
        max_norm=max_norm,
        trigger=Always(),
        schedule=cost_mtl.TeleportSchedule(start=at, limit=1, confirm=False),
        teleporter=teleporter,
        seed=settings.seed,
        on_teleport=hand_over,
    )
    return optimizer


# ------------------------------------------------------------------------------------------------ symmetries


class Chooser:
    """Chooses log s [n] for one network, on the batches that it has remembered."""

    def __init__(self, problem: Problem, model: Heads, arm: str, seed: int) -> None:
        self.problem, self.model, self.arm = problem, model, arm
        self.layers = moves.layers_of(problem.name)
        self.batches: deque[Batch] = deque(maxlen=REMEMBERED)
        self.generator = torch.Generator().manual_seed(seed)

    def shared(self) -> dict[str, Tensor]:
        return {f"trunk.{name}": p for name, p in self.model.trunk.named_parameters()}

    def spread(self, log_s: Tensor) -> Tensor:
        return moves.flat_log_factors(self.layers, log_s, self.shared())

    def gradients(self) -> Tensor:
        """Of all remembered batches [B, K, m]; running statistics stay as they are."""
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        params = list(self.shared().values())
        G = torch.stack([cost_mtl.task_gradients(self.problem.losses(self.model, *b), params) for b in self.batches])
        for name, b in self.model.named_buffers():
            b.copy_(buffers[name])
        return G

    def choose(self) -> tuple[Tensor, dict[str, float]]:
        """log s, and what it does: root mean square, smallest cosine before and after, change of the norm (log)."""
        G = self.gradients()
        mean = G.mean(dim=(0, 1))
        n = sum(layer.units for layer in self.layers)
        if self.arm.startswith("balance"):
            log_s = moves.for_balance(self.layers, dict(self.model.named_parameters()))
        else:
            log_s = moves.for_cosine(G, self.spread, n, self.generator)
        if self.arm.endswith("random"):
            log_s = moves.random_like(log_s, mean, self.spread, self.generator)
        cosines = [float(moves.smallest_cosine(G, self.spread(s))) for s in (torch.zeros(n), log_s)]
        size = float(log_s.square().mean().sqrt())
        return log_s, {
            "rms": _short(size),
            "cosine_before": _short(cosines[0]),
            "cosine_after": _short(cosines[1]),
            "norm": _short(float(moves.log_norm_ratio(mean, self.spread(log_s)))),
        }


class UnitRates:
    """Learning rates of single units without a move: updates times f^-2 (SGD) or f^-1 (Adam), entry by entry."""

    def __init__(self, model: Heads, optimizer: str) -> None:
        self.model, self.power = model, 2 if optimizer == "sgd" else 1
        self.factors: dict[str, Tensor] = {}

    def set(self, layers: Sequence[moves.Layer], log_s: Tensor) -> None:
        shapes = {name: p.shape for name, p in self.model.named_parameters()}
        found = moves.log_factors(layers, log_s, shapes)
        self.factors = {name: (-self.power * log_f).exp() for name, log_f in found.items()}

    def before(self) -> dict[str, Tensor]:
        params = dict(self.model.named_parameters())
        return {name: params[name].detach().clone() for name in self.factors}

    @torch.no_grad()
    def after(self, before: dict[str, Tensor]) -> None:
        params = dict(self.model.named_parameters())
        for name, old in before.items():
            params[name].copy_(old + (params[name] - old) * self.factors[name])


# ------------------------------------------------------------------------------------------------ the run


def train(settings: Settings, study: Study) -> dict[str, Any]:
    """Train one network on all tasks; the move, if any, before the first step of the second quarter.

    Returns:
        ``test``, ``validation`` [K]: metrics averaged over the last epochs (None if training broke down);
        ``curve`` [steps]: geometric mean of the tasks' training losses in each step;
        ``moves``: what each choice of s did; ``accepted``: of the adapter's attempt.
    """
    problem = study.problem
    model = problem.model(settings.seed)
    steps = settings.epochs * problem.steps_per_epoch
    at = steps // 4
    optimizer = build(settings, model, at)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [steps // 2], gamma=0.5)
    chooser = Chooser(problem, model, settings.arm, settings.seed)
    rates = UnitRates(model, settings.optimizer)
    stream = problem.batches(settings.seed)
    curve: list[float] = []
    done: list[dict[str, float]] = []
    accepted = None
    test, validation = [], []
    try:
        for step in range(steps):
            if _moves_now(settings.arm, step, at, problem.steps_per_epoch):
                log_s, what = chooser.choose()
                done.append(what)
                if settings.arm.startswith("rates"):
                    rates.set(chooser.layers, log_s)
                else:
                    moves.move_(model, optimizer.base, chooser.layers, log_s)
            batch = next(stream)
            chooser.batches.append(batch)
            before = rates.before()
            losses = optimizer.step(problem.losses, model, *batch)
            rates.after(before)
            scheduler.step()
            curve.append(_geometric_mean(losses.tolist()))
            if optimizer.last_step.teleport is not None:
                accepted = optimizer.last_step.teleport.accepted
            epoch, rest = divmod(step + 1, problem.steps_per_epoch)
            if rest == 0 and epoch > settings.epochs - LAST:
                test.append(metrics(problem, model, problem.test))
                validation.append(metrics(problem, model, study.validation))
    except FloatingPointError:
        test, validation = [], []
    return {
        "test": _mean_rows(test),
        "validation": _mean_rows(validation),
        "curve": [float(f"{v:.4g}") for v in curve],
        "moves": done,
        "accepted": accepted,
    }


def _moves_now(arm: str, step: int, at: int, epoch: int) -> bool:
    if arm.startswith(("cosine", "balance")):
        return step == at
    return arm.startswith("rates") and step >= at and (step - at) % epoch == 0


def _geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.mean(math.log(max(v, 1e-30)) for v in values))


def _mean_rows(rows: list[list[float]]) -> list[float] | None:
    if not rows or not all(math.isfinite(v) for row in rows for v in row):
        return None
    return [_short(statistics.mean(column)) for column in zip(*rows, strict=True)]


def _short(value: float) -> float:
    return float(f"{value:.5g}")

"""One training run of ``ablation.py``: settings in, a record of plain numbers out."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from ablation_arms import ARMS, NoMove
from ablation_problems import Study, metrics
from problems import Heads
from torch.optim import Optimizer

import cost_mtl

WEIGHTINGS: dict[str, Any] = {
    "cagrad": cost_mtl.CAGrad(c=0.4),
    "nashmtl": cost_mtl.NashMTL(),
    "fairgrad": cost_mtl.FairGrad(alpha=2.0),
}
LAST = 2
"""Final epochs whose metrics are averaged."""


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on but the code; its JSON form is the key of the record.

    Attributes:
        weighting: a key of :data:`WEIGHTINGS`, or ``"single"``: one network for each task.
        optimizer: ``"adam"`` with the weighting's official recipe (Nash-MTL and FairGrad clip the shared gradient at
            1, Nash-MTL weights its heads), or ``"sgd"`` with momentum 0.9, unclipped, heads on their own losses, so
            that gradient norms count.
        arm: a key of ``ablation_arms.ARMS``.
        seed: of the initial weights, the order of the batches and the teleports.
        lr: halved after half of the epochs.
        start: share of the training before the first attempt, the paper's; then one an epoch, unless the arm says
            otherwise.
    """

    problem: str
    weighting: str
    optimizer: str
    arm: str
    seed: int
    lr: float
    epochs: int
    smoke: bool = False
    start: float = 0.25

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def code_digest() -> str:
    """Of the package's sources: says which records were made by the same code."""
    root = Path(cost_mtl.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def base_optimizer(name: str, parameters: Any, lr: float) -> Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def build(settings: Settings, model: Heads, steps_per_epoch: int) -> cost_mtl.COST:
    arm, official = ARMS[settings.arm], settings.optimizer == "adam"
    teleporter = None if arm.teleporter is None else arm.teleporter()

    def hand_over(report: cost_mtl.TeleportReport) -> None:
        if isinstance(teleporter, NoMove):
            optimizer.progress.sigma = teleporter.sigma

    optimizer = cost_mtl.COST(
        base_optimizer(settings.optimizer, model.parameters(), settings.lr),
        model,
        shared=model.trunk,
        weighting=WEIGHTINGS[settings.weighting],
        trigger=arm.trigger,
        schedule=cost_mtl.TeleportSchedule(
            start=int(settings.start * settings.epochs * steps_per_epoch),
            cooldown=max(1, round(arm.cooldown * steps_per_epoch)),
            confirm=arm.confirm,
        ),
        teleporter=teleporter,
        htr=arm.htr,
        heads="weighted" if official and settings.weighting == "nashmtl" else "own",
        max_norm=1.0 if official and settings.weighting in ("nashmtl", "fairgrad") else None,
        seed=settings.seed,
        on_teleport=hand_over,
    )
    return optimizer


def train(settings: Settings, study: Study) -> dict[str, Any]:
    """Train one network on all tasks.

    Returns:
        ``test``, ``validation`` [K]: metrics averaged over the last epochs (None if training broke down);
        ``train_loss`` [E]: geometric mean over the tasks of the epoch's mean losses; ``tried``, ``accepted``;
        ``time_share``: processor time of teleports in that of all steps; ``seconds``: processor time of the steps;
        medians over the accepted teleports: ``length``, ``drift``, ``heldout``, ``sigma``, ``cosine_gain``.
    """
    problem = study.problem
    model = problem.model(settings.seed)
    optimizer = build(settings, model, problem.steps_per_epoch)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [max(1, settings.epochs // 2)], gamma=0.5)
    stream = problem.batches(settings.seed)
    seconds: list[float] = []
    reports: dict[int, cost_mtl.TeleportReport] = {}
    curve, test, validation = [], [], []
    try:
        for epoch in range(settings.epochs):
            sums = 0.0
            for _ in range(problem.steps_per_epoch):
                batch = next(stream)
                began = time.process_time()
                sums = sums + optimizer.step(problem.losses, model, *batch)
                seconds.append(time.process_time() - began)
                if optimizer.last_step.teleport is not None:
                    reports[len(seconds) - 1] = optimizer.last_step.teleport
            scheduler.step()
            curve.append(_geometric_mean((sums / problem.steps_per_epoch).tolist()))
            if epoch >= settings.epochs - LAST:
                test.append(metrics(problem, model, problem.test))
                validation.append(metrics(problem, model, study.validation))
    except FloatingPointError:
        test, validation = [], []
    return {
        "test": _mean_rows(test),
        "validation": _mean_rows(validation),
        "train_loss": [_short(v) for v in curve],
        **_teleports(reports, seconds),
    }


def _teleports(reports: dict[int, cost_mtl.TeleportReport], seconds: list[float]) -> dict[str, Any]:
    ordinary = statistics.median(t for step, t in enumerate(seconds) if step not in reports)
    extra = sum(seconds[step] - ordinary for step in reports)
    done = [r for r in reports.values() if r.accepted]

    def median(values: Iterator[float | None]) -> float | None:
        found = [v for v in values if v is not None]
        return _short(statistics.median(found)) if found else None

    return {
        "tried": len(reports),
        "accepted": len(done),
        "time_share": _short(extra / sum(seconds)),
        "seconds": _short(sum(seconds)),
        "length": median(r.length for r in done),
        "drift": median(r.drift for r in done),
        "heldout": median(r.drift_heldout for r in done),
        "sigma": median(r.sigma for r in done),
        "cosine_gain": median(float(r.cosines_after.min() - r.cosines_before.min()) for r in done),
    }


def train_single(settings: Settings, study: Study) -> dict[str, Any]:
    """One network of the same shape for each task: ``test``, ``validation`` [K] as in :func:`train`."""
    problem = study.problem
    names = list(problem.model(0).heads)
    tests, validations = [], []
    for index, name in enumerate(names):
        model = problem.model(settings.seed * 1000 + index)
        optimizer = base_optimizer(settings.optimizer, model.parameters(), settings.lr)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [max(1, settings.epochs // 2)], gamma=0.5)
        stream = problem.batches(settings.seed)
        test, validation = [], []
        for epoch in range(settings.epochs):
            for _ in range(problem.steps_per_epoch):
                optimizer.zero_grad()
                problem.losses(model, *next(stream))[name].backward()
                optimizer.step()
            scheduler.step()
            if epoch >= settings.epochs - LAST:
                test.append(metrics(problem, model, problem.test)[index])
                validation.append(metrics(problem, model, study.validation)[index])
        tests.append(statistics.mean(test))
        validations.append(statistics.mean(validation))
    finite = all(math.isfinite(v) for v in (*tests, *validations))
    return {
        "test": [_short(v) for v in tests] if finite else None,
        "validation": [_short(v) for v in validations] if finite else None,
    }


def _geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.mean(math.log(max(v, 1e-30)) for v in values))


def _mean_rows(rows: list[list[float]]) -> list[float] | None:
    if not rows or not all(math.isfinite(v) for row in rows for v in row):
        return None
    return [_short(statistics.mean(column)) for column in zip(*rows, strict=True)]


def _short(value: float) -> float:
    return float(f"{value:.5g}")

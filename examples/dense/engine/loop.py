"""The training loop: one run is one method, one seed, and all tasks (or one, for a single-task baseline)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import cost_mtl
from dense.engine.checkpoint import load_checkpoint, restore_rng, rng_state, save_checkpoint, seed_everything
from dense.engine.methods import STL, Recipe, Row, adam, recipe
from dense.engine.problem import Batch, EpochRow, Problem
from dense.engine.recorder import Recorder, row_from_json, row_to_json
from dense.engine.settings import TrainSettings
from dense.errors import UserError

__all__ = ["Run", "evaluate", "run_row", "to_device"]

_POSTFIX_SECONDS = 0.5  # reading losses waits for the GPU: not in every step


def run_row(
    problem: Problem,
    row: Row,
    settings: TrainSettings,
    folder: Path,
    identity: Mapping[str, Any],
    place: str = "",
) -> dict[str, float]:
    """Train one row of the table with one seed and return its metrics; what is already done is taken from ``folder``.

    Args:
        problem: the data set.
        row: the method. ``stl`` trains one network per task, in sub-folders named after the tasks.
        settings: how.
        folder: of this row and seed.
        identity: the problem's own settings, which a checkpoint must agree on.
        place: where in a set of runs this one is, shown before the progress bar.
    """
    if row.word != STL:
        return Run(problem, row, problem.tasks, settings, folder, identity).train(place)
    metrics: dict[str, float] = {}
    for task in problem.tasks:
        metrics |= Run(problem, row, (task,), settings, folder / task, identity).train(place)
    return metrics


@dataclass
class _Totals:
    """Sums over an epoch, on the device."""

    losses: Tensor
    conflicts: Tensor
    steps: int = 0


class Run:
    """One model in training.

    Args:
        problem, row, settings, folder, identity: see :func:`run_row`.
        tasks: those trained together.
    """

    def __init__(
        self,
        problem: Problem,
        row: Row,
        tasks: Sequence[str],
        settings: TrainSettings,
        folder: Path,
        identity: Mapping[str, Any],
    ) -> None:
        self.problem, self.row, self.tasks, self.settings, self.folder = problem, row, tuple(tasks), settings, folder
        self.identity = {**identity, **settings.identity(), "row": row.key, "tasks": list(tasks)}
        seed_everything(settings.seed)
        _set_determinism(settings.deterministic)
        self.model = problem.model(self.tasks).to(settings.device)
        self.forward: Any = torch.compile(self.model) if settings.compile else self.model
        self.steps_per_epoch = len(problem.train_loader(settings.seed, 1))
        self.optimizer = self._optimizer()
        self.scheduler = problem.scheduler(self.optimizer, settings.epochs)
        self.history: list[EpochRow] = []

    def _optimizer(self) -> cost_mtl.COST:
        single = self.row.word == STL
        made = (
            Recipe("STL", cost_mtl.EqualWeighting())
            if single
            else recipe(self.row, len(self.tasks), self.steps_per_epoch)
        )
        self.weighting = made.weighting
        self.scaler = torch.amp.GradScaler("cuda") if self.settings.amp == "fp16" else None
        return cost_mtl.COST(
            adam(self.model, made.weighting, self.settings.lr),
            self.model,
            weighting=made.weighting,
            heads=made.heads,
            max_norm=made.max_norm,
            trigger=_trigger(self.settings),
            schedule=cost_mtl.TeleportSchedule(
                start=self.settings.cost_start * self.steps_per_epoch,
                cooldown=self.settings.cost_cooldown * self.steps_per_epoch,
            ),
            teleporter=_teleporter(self.settings) if self.row.cost else None,
            scaler=self.scaler,
            seed=self.settings.seed,
        )

    # ------------------------------------------------------------------------------------------- the loop

    def train(self, place: str = "") -> dict[str, float]:
        """All epochs that are not done yet; returns the run's result."""
        if self.settings.resume:
            self._restore()
        recorder = Recorder(self.folder, self.history, tensorboard=self.settings.tensorboard)
        total = self.settings.epochs * self.steps_per_epoch
        done = len(self.history) * self.steps_per_epoch
        name = (
            place
            + f"{self.row.label}, seed {self.settings.seed}"
            + (f", {self.tasks[0]}" if len(self.tasks) == 1 else "")
        )
        with tqdm(total=total, initial=done, desc=name, unit="step", dynamic_ncols=True) as bar:
            for epoch in range(len(self.history) + 1, self.settings.epochs + 1):
                row = self._epoch(epoch, bar)
                self.history.append(row)
                self._save()
                recorder.add(row)
        recorder.close()
        return self.problem.summary(self.history, self.tasks)

    def _epoch(self, epoch: int, bar: tqdm[Any]) -> EpochRow:
        started = time.perf_counter()
        lr = float(self.optimizer.param_groups[0]["lr"])
        totals, teleports = self._train_epoch(epoch, bar)
        row = EpochRow(epoch, lr, self._mean_losses(totals), teleports=teleports)
        if len(self.tasks) > 1:
            row.conflict = (totals.conflicts / totals.steps).item()
        trained = time.perf_counter()
        if self.settings.evaluates(epoch):
            for split in self.problem.splits:
                row.metrics[split] = evaluate(self.problem, self.forward, self.tasks, split, self.settings)
            self.model.train()
        row.seconds = {"train": trained - started, "eval": time.perf_counter() - trained}
        if self.scheduler is not None:
            value = self.problem.schedule_value(row, self.tasks)
            self.scheduler.step() if value is None else self.scheduler.step(value)  # type: ignore[arg-type]
        return row

    def _train_epoch(self, epoch: int, bar: tqdm[Any]) -> tuple[_Totals, list[dict[str, Any]]]:
        self.model.train()
        device = self.settings.device
        totals = _Totals(torch.zeros(len(self.tasks), device=device), torch.zeros((), device=device))
        teleports: list[dict[str, Any]] = []
        shown = 0.0
        for batch in self.problem.train_loader(self.settings.seed, epoch):
            losses = self.optimizer.step(self._losses, to_device(batch, device))
            report = self.optimizer.last_step
            if report is None:
                raise RuntimeError("COST.step left no report")
            totals.losses += losses
            totals.steps += 1
            cosines = report.cosines if report.teleport is None else report.teleport.cosines_before
            if cosines is not None:
                totals.conflicts += cosines.min().to(device) < 0
            if report.teleport is not None:
                teleports.append(_teleport_record(report.teleport, totals.steps))
            if time.perf_counter() - shown > _POSTFIX_SECONDS:
                bar.set_postfix(self._postfix(losses, epoch, teleports), refresh=False)
                shown = time.perf_counter()
            bar.update()
        return totals, teleports

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        with _autocast(self.settings):
            output = self.problem.forward(self.forward, batch)
        return self.problem.losses(output, batch)

    def _mean_losses(self, totals: _Totals) -> dict[str, float]:
        return dict(zip(self.tasks, (totals.losses / totals.steps).tolist(), strict=True))

    def _postfix(self, losses: Tensor, epoch: int, teleports: list[dict[str, Any]]) -> dict[str, Any]:
        shown = {task[:3]: f"{value:.3f}" for task, value in zip(self.tasks[:4], losses[:4].tolist(), strict=True)}
        accepted = sum(len([t for t in row.teleports if t["accepted"]]) for row in self.history)
        accepted += len([t for t in teleports if t["accepted"]])
        return {"epoch": f"{epoch}/{self.settings.epochs}", **shown, **({"tele": accepted} if self.row.cost else {})}

    # ------------------------------------------------------------------------------------------- resume

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / "checkpoint.pt"

    def _save(self) -> None:
        content = {
            "identity": self.identity,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "weighting": self.weighting.state_dict() if isinstance(self.weighting, nn.Module) else None,
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "rng": rng_state(),
            "history": [row_to_json(row) for row in self.history],
        }
        save_checkpoint(self.checkpoint_path, content)

    def _restore(self) -> None:
        if not self.checkpoint_path.is_file():
            return
        content = load_checkpoint(self.checkpoint_path, self.settings.device)
        for key, value in self.identity.items():
            if content["identity"].get(key) != value:
                raise UserError(
                    f"{self.checkpoint_path}: made with {key}={content['identity'].get(key)!r}, now {value!r}; "
                    "use another --out, or --no-resume to start over"
                )
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if isinstance(self.weighting, nn.Module):
            self.weighting.load_state_dict(content["weighting"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        if self.scaler is not None:
            self.scaler.load_state_dict(content["scaler"])
        self.history = [row_from_json(row) for row in content["history"]]
        restore_rng(content["rng"])


@torch.no_grad()
def evaluate(
    problem: Problem, forward: Any, tasks: Sequence[str], split: str, settings: TrainSettings
) -> dict[str, float]:
    """Metric -> value over one pass; the model is left in evaluation mode."""
    forward.eval()
    meter = problem.meter(tasks)
    for batch in problem.eval_loader(split):
        moved = to_device(batch, settings.device)
        with _autocast(settings):
            output = problem.forward(forward, moved)
        meter.update(output, moved)
    return meter.compute()


def to_device(batch: Batch, device: str) -> dict[str, Tensor]:
    """All tensors of a batch on ``device``."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def _autocast(settings: TrainSettings) -> AbstractContextManager[Any]:
    dtype = torch.float16 if settings.amp == "fp16" else torch.bfloat16
    return torch.autocast(settings.device.partition(":")[0], dtype=dtype, enabled=settings.amp != "off")


def _trigger(settings: TrainSettings) -> cost_mtl.Trigger:
    if settings.trigger == "weak":
        return cost_mtl.WeakConflict()
    if settings.trigger == "share":
        return cost_mtl.ConflictShare(0.5)
    if settings.trigger == "always":
        return lambda gramian: True
    return cost_mtl.DominatedConflict(rule=settings.trigger)


def _teleporter(settings: TrainSettings) -> Any:
    if settings.teleporter == "lora":
        return cost_mtl.LoRATeleporter(rank=settings.rank)
    return cost_mtl.DenseTeleporter() if settings.teleporter == "dense" else cost_mtl.DifferenceTeleporter()


def _teleport_record(report: cost_mtl.base.TeleportReport, step: int) -> dict[str, Any]:
    names = ("accepted", "reason", "drift", "drift_heldout", "sigma", "seconds")
    record = {"step": step, **{name: getattr(report, name) for name in names}}
    record["cosine_before"] = report.cosines_before.min().item()
    after = report.cosines_after
    record["cosine_after"] = math.nan if after is None else after.min().item()
    return record


def _set_determinism(on: bool) -> None:
    if on or torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: two seconds
        torch.use_deterministic_algorithms(on, warn_only=True)  # max-unpooling has no deterministic CUDA kernel
    torch.backends.cudnn.benchmark = not on

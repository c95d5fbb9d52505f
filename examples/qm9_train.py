"""The training loops of ``qm9.py``: one network for eleven tasks under COST, and eleven single-task networks."""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from qm9_data import TARGETS, Data, DataSettings, Part, load, split
from reporting import write_whole
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import cost_mtl

WIDTHS = (128, 128, 64)
CHECKPOINT_EVERY = 5  # epochs: what a power cut may cost
Progress = Callable[[str, int], None]
"""``progress(text, epochs)``: that many more epochs are done, and this is how it stands."""


@dataclass(frozen=True)
class Method:
    """A weighting with the rest of its official recipe: the clip, and what the heads are trained with."""

    label: str
    weighting: Any
    max_norm: float | None = None
    heads: str = "own"


METHODS = {
    "ls": Method("LS", cost_mtl.EqualWeighting()),
    "cagrad": Method("CAGrad", cost_mtl.CAGrad(c=0.4)),
    "nashmtl": Method("Nash-MTL", cost_mtl.NashMTL(), max_norm=1.0, heads="weighted"),
    "fairgrad": Method("FairGrad", cost_mtl.FairGrad(alpha=2.0), max_norm=1.0),
}


@dataclass(frozen=True)
class RunSettings:
    """One training run.

    Attributes:
        method: a key of :data:`METHODS`, or "stl" for the single-task networks.
        cost: whether to teleport.
        seed: of the initial weights, the order of the batches and the teleports.
        epochs: passes over the training molecules.
        data: which molecules.
        batch: molecules in a batch.
        lr: Adam's learning rate, halved after half of the epochs.
        start: share of the training before the first teleport; the paper's is 50 epochs of 200. After that at most one
            teleport an epoch, as in the official scripts.
    """

    method: str
    cost: bool
    seed: int
    epochs: int = 25
    data: DataSettings = field(default_factory=DataSettings)
    batch: int = 100
    lr: float = 1e-3
    start: float = 0.25

    @property
    def label(self) -> str:
        if self.method == "stl":
            return "STL"
        return METHODS[self.method].label + (" + COST" if self.cost else "")

    @property
    def key(self) -> str:
        """File name of the run: readable, and different for any other setting, data or version of the package."""
        source = {"settings": asdict(self), "data": self.data.key, "cost_mtl": cost_mtl.__version__}
        digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.method}{'-cost' if self.cost else ''}-seed{self.seed}-{digest}"


class MultiTaskNet(nn.Module):
    """An MLP trunk shared by the tasks, 140-128-128-64, and one linear head each."""

    def __init__(self, inputs: int, tasks: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((inputs, *WIDTHS), WIDTHS, strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.trunk = nn.Sequential(*layers)
        self.heads = nn.ModuleList(nn.Linear(WIDTHS[-1], 1) for _ in range(tasks))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """inputs [B, 140] -> K predictions [B]. Kept apart, so that each task's backward pass walks one head only."""
        features = self.trunk(inputs)
        return [head(features)[:, 0] for head in self.heads]


class Learner(Protocol):
    """What the loop below needs."""

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor: ...
    def end_epoch(self) -> None: ...
    def predict(self, inputs: Tensor) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MultiTaskLearner:
    """One network for all tasks, trained by COST around Adam."""

    def __init__(self, run: RunSettings, inputs: int, steps_per_epoch: int) -> None:
        torch.manual_seed(run.seed)
        method = METHODS[run.method]
        self.model = MultiTaskNet(inputs, len(TARGETS))
        self.optimizer = cost_mtl.COST(
            torch.optim.Adam(self.model.parameters(), lr=run.lr),
            self.model,
            shared=self.model.trunk,
            weighting=method.weighting,
            schedule=cost_mtl.TeleportSchedule(
                start=int(run.start * run.epochs * steps_per_epoch), cooldown=steps_per_epoch
            ),
            teleporter=cost_mtl.LoRATeleporter(rank=5) if run.cost else None,
            trigger=cost_mtl.DominatedConflict(),
            max_norm=method.max_norm,
            heads=method.heads,
            seed=run.seed,
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [max(1, run.epochs // 2)], gamma=0.5)

    def losses(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The closure: mean squared error of each standardised target."""
        pairs = zip(TARGETS, self.model(inputs), targets.unbind(dim=1), strict=True)
        return {target.name: (out - truth).square().mean() for target, out, truth in pairs}

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.optimizer.step(self.losses, inputs, targets)

    def end_epoch(self) -> None:
        self.scheduler.step()

    def predict(self, inputs: Tensor) -> Tensor:
        return torch.stack(self.model(inputs), dim=1)

    def state_dict(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


class SingleTaskLearner:
    """A network of its own for each task, all of them trained at once.

    The weights of the K networks are stacked. The sum of their losses has for each network its own loss's gradient,
    and Adam works on each number alone: this is K separate trainings, at a fifth of the time.
    """

    def __init__(self, run: RunSettings, inputs: int, steps_per_epoch: int) -> None:
        nets = []
        for task in range(len(TARGETS)):
            torch.manual_seed(run.seed * len(TARGETS) + task)
            nets.append(MultiTaskNet(inputs, 1))
        self.template = nets[0]
        self.params: dict[str, Tensor] = stack_module_state(nets)[0]
        self.optimizer = torch.optim.Adam(self.params.values(), lr=run.lr, fused=True)  # saves a quarter of the time
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [max(1, run.epochs // 2)], gamma=0.5)

    def predict(self, inputs: Tensor) -> Tensor:
        """inputs [B, 140] -> predictions [B, K]."""
        one = vmap(lambda params: functional_call(self.template, params, (inputs,))[0])
        return one(self.params).T

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        losses = (self.predict(inputs) - targets).square().mean(dim=0)
        losses.sum().backward()
        self.optimizer.step()
        return losses.detach()

    def end_epoch(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        params = {name: value.detach() for name, value in self.params.items()}
        return {"params": params, "optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, value in state["params"].items():
                self.params[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


# ------------------------------------------------------------------------------------------------ the loop


def batches(count: int, size: int, seed: int, epoch: int) -> Iterator[Tensor]:
    """Shuffled full batches of row numbers; keyed on (seed, epoch), so a resumed run sees the same ones.

    With fewer rows than a batch has, all of them are the one batch.
    """
    size = min(size, count)
    order = torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(count))
    for start in range(0, count - size + 1, size):
        yield order[start : start + size]


def absolute_errors(learner: Learner, part: Part, unit: Tensor) -> list[float]:
    """Mean absolute error of each task [K], in usual units."""
    with torch.no_grad():
        return ((learner.predict(part.inputs) - part.targets).abs().mean(dim=0) * unit).tolist()


def new_history() -> dict[str, Any]:
    """What a run records: [E, K] losses and errors, [S] smallest cosines, one entry per teleport, seconds."""
    return {"train_loss": [], "val_mae": [], "test_mae": [], "min_cosine": [], "teleports": [], "seconds": 0.0}


def record_step(history: dict[str, Any], report: cost_mtl.base.StepReport) -> None:
    """Append one step's smallest cosine with the mean gradient and its teleport."""
    step = len(history["min_cosine"])
    history["min_cosine"].append(round(float(report.cosines.min()), 6))
    teleport = report.teleport
    if teleport is not None:
        history["teleports"].append(
            {
                "step": step,
                "accepted": teleport.accepted,
                "reason": teleport.reason,
                "min_cosine_before": float(teleport.cosines_before.min()),
                "drift": teleport.drift,
                "drift_heldout": teleport.drift_heldout,
                "seconds": teleport.seconds,
            }
        )


def describe_progress(run: RunSettings, history: dict[str, Any]) -> str:
    """One line for the progress bar: losses (mean over tasks, worst task), conflict rate, teleports."""
    losses = history["train_loss"][-1]
    worst = int(np.argmax(losses))
    text = f"{run.label} seed {run.seed}: loss {np.mean(losses):.3f}, worst {TARGETS[worst].name} {losses[worst]:.3f}"
    if history["min_cosine"]:
        conflicts = np.mean(np.array(history["min_cosine"]) < 0)
        accepted = sum(teleport["accepted"] for teleport in history["teleports"])
        text += f", conflict {conflicts:.0%}, teleports {accepted}/{len(history['teleports'])}"
    return text


def train(
    run: RunSettings, data: Data, checkpoint: Path, progress: Progress, stopped: Callable[[], bool]
) -> dict[str, Any] | None:
    """Train one run, going on from its checkpoint where there is one; None if ``stopped()`` ended it before its end.

    The checkpoint is written every few epochs and when stopped; a resumed run ends bit for bit where an undisturbed
    one does.
    """
    count, width = data.train.inputs.shape
    kind = SingleTaskLearner if run.method == "stl" else MultiTaskLearner
    learner: Learner = kind(run, width, max(1, count // run.batch))
    history = new_history()
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        learner.load_state_dict(saved["learner"])
        history = saved["history"]
        progress(describe_progress(run, history), len(history["train_loss"]))
    for epoch in range(len(history["train_loss"]), run.epochs):
        if stopped():
            return None
        train_epoch(run, data, learner, history, epoch)
        progress(describe_progress(run, history), 1)
        if (epoch + 1) % CHECKPOINT_EVERY == 0 or stopped():
            buffer = io.BytesIO()
            torch.save({"learner": learner.state_dict(), "history": history}, buffer)
            write_whole(checkpoint, buffer.getvalue())
    return history


def train_epoch(run: RunSettings, data: Data, learner: Learner, history: dict[str, Any], epoch: int) -> None:
    """One pass over the training molecules, then the errors on the two others."""
    begin = time.perf_counter()
    losses = []
    for rows in batches(len(data.train.inputs), run.batch, run.seed, epoch):
        losses.append(learner.step(data.train.inputs[rows], data.train.targets[rows]))
        if isinstance(learner, MultiTaskLearner):
            record_step(history, learner.optimizer.last_step)
    learner.end_epoch()
    history["train_loss"].append(torch.stack(losses).mean(dim=0).tolist())
    history["val_mae"].append(absolute_errors(learner, data.val, data.unit))
    history["test_mae"].append(absolute_errors(learner, data.test, data.unit))
    history["seconds"] += time.perf_counter() - begin


def execute(
    run: RunSettings, progress: Progress, stopped: Callable[[], bool], folders: tuple[Path, Path]
) -> dict[str, Any] | None:
    """The finished run from its JSON file, or after training it; None if it was stopped.

    Args:
        run: what to train.
        progress: called after each epoch.
        stopped: asked before each epoch.
        folders: of the cached features, and of the runs.
    """
    data_folder, run_folder = folders
    result, checkpoint = run_folder / f"{run.key}.json", run_folder / f"{run.key}.ckpt"
    if result.exists():
        progress(f"{run.label} seed {run.seed}: done before", run.epochs)
        return json.loads(result.read_text(encoding="utf-8"))
    history = train(run, split(load(run.data, data_folder), run.data.seed), checkpoint, progress, stopped)
    if history is None:
        return None
    finished = json.dumps({"label": run.label, "settings": asdict(run), **history})
    write_whole(result, finished + "\n")
    checkpoint.unlink(missing_ok=True)
    return json.loads(finished)  # not the dictionary itself: tuples are lists when it is read again

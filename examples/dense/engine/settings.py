"""How a run is trained: what the loop needs beside the data set and the method."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from dense.errors import UserError

__all__ = ["TrainSettings", "check_device"]


@dataclass(frozen=True)
class TrainSettings:
    """Settings of one run. The defaults of the recipes are the scripts'; nothing here is tuned on test data.

    Attributes:
        epochs: passes over the training set.
        lr: Adam's learning rate.
        seed: of the initialisation, the order and the augmentation.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ...
        amp: mixed precision of the forward pass: off, bf16, or fp16 with loss scaling inside COST.
        compile: run the forward pass through ``torch.compile``.
        deterministic: deterministic kernels where torch has them; a CPU run is bit-identical either way.
        eval_every: evaluate every so many epochs, and always in the last ten.
        cost_start: epochs before the first teleport (the official scripts: 50 of 200).
        cost_cooldown: epochs from one attempt to the next (the official scripts: one).
        trigger: ``"any"`` task conflicts with the mean gradient (the official code's rule), the ``"smallest"`` one
            does (the paper's), any two tasks conflict (``"weak"``), half of the tasks do (``"share"``), or the
            schedule alone decides (``"always"``).
        teleporter: ``"lora"`` (the paper's), ``"dense"`` or ``"difference"``.
        rank: of the LoRA adapter.
        tensorboard: write event files.
        resume: go on from the run's checkpoint.
    """

    epochs: int
    lr: float
    seed: int = 0
    device: str = "cpu"
    amp: Literal["off", "bf16", "fp16"] = "off"
    compile: bool = False
    deterministic: bool = False
    eval_every: int = 1
    cost_start: int = 50
    cost_cooldown: int = 1
    trigger: Literal["any", "smallest", "weak", "share", "always"] = "any"
    teleporter: Literal["lora", "dense", "difference"] = "lora"
    rank: int = 5
    tensorboard: bool = False
    resume: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "eval_every", "cost_cooldown", "rank"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.lr < math.inf:  # NaN is refused too
            raise UserError(f"--lr: expected a number > 0, got {self.lr:g}")
        if self.cost_start < 0:
            raise UserError(f"--cost-start: expected at least 0, got {self.cost_start}")
        if self.amp == "fp16" and not self.device.startswith("cuda"):
            raise UserError("--amp fp16: loss scaling needs a CUDA device; bf16 works on a CPU too")

    def identity(self) -> dict[str, Any]:
        """Everything that a checkpoint must agree on before a run may go on from it (the number of epochs too: the
        learning rate's schedule and the first teleport depend on it)."""
        return {key: value for key, value in asdict(self).items() if key not in ("tensorboard", "resume")}

    def evaluates(self, epoch: int) -> bool:
        """Whether epoch (1 the first) is evaluated."""
        return epoch % self.eval_every == 0 or epoch > self.epochs - 10


def check_device(name: str) -> str:
    """``"auto"`` is the first GPU, else the CPU.

    Raises:
        UserError: for a device that is not there.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return name

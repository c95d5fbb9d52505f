"""A small training run whose whole state is one dict, and states as bytes."""

import io
import random

import numpy as np
import torch

import cost_mtl
from cost_mtl import COST, Acceptance, DenseTeleporter, TeleportSchedule
from tests.nets import convnet, data, losses


def always(M):
    return True


EASY = Acceptance(min_angle=-1.0, min_norm=-1.0)
"""On random targets hardly any move keeps the default promise, and these runs need accepted teleports."""


class Run:
    """A small training run whose whole state is one dict."""

    def __init__(self, model=None, *, weighting=None, extra=(), shape=(2, 8, 8), base=torch.optim.AdamW, **settings):
        self.model = convnet() if model is None else model
        self.shape = shape
        base = base([*self.model.parameters(), *extra], lr=0.01)
        settings = {
            "trigger": always,
            "schedule": TeleportSchedule(start=2, cooldown=1),
            "teleporter": DenseTeleporter(acceptance=EASY),
        } | settings
        self.optimizer = COST(base, self.model, weighting=weighting or cost_mtl.FairGrad(2.0), **settings)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.step = 0
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

    def train(self, until):
        while self.step < until:
            x, ys = data(2, 8, seed=self.step, shape=self.shape)
            self.optimizer.step(lambda x, ys: losses(self.model, x, ys), x, ys)
            self.scheduler.step()
            self.step += 1

    def save(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
            "step": self.step,
        }

    def load(self, saved):
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["random"])
        self.step = saved["step"]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def as_bytes(state):
    """The whole state as bytes, for a comparison bit for bit (NaN included)."""
    if isinstance(state, torch.Tensor):
        return state.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(state, dict):
        return {k: as_bytes(v) for k, v in state.items()}
    if isinstance(state, list | tuple):
        return [as_bytes(v) for v in state]
    return state

"""Stopped anywhere and resumed from its checkpoint, a run ends bit for bit as the undisturbed one."""

import copy
import io
import multiprocessing
import os
import random
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import COST, DenseTeleporter, LoRATeleporter, TeleportSchedule
from cost_mtl import weighting as weightings
from cost_mtl.checkpoint import Progress, beside, is_plain
from tests.nets import convnet, data, flat, losses, mlp


def always(M):
    return True


class Run:
    """A small training run whose whole state is one dict."""

    def __init__(self, model=None, *, weighting=None, extra=(), shape=(2, 8, 8), base=torch.optim.AdamW, **settings):
        self.model = convnet() if model is None else model
        self.shape = shape
        base = base([*self.model.parameters(), *extra], lr=0.01)
        settings = {
            "trigger": always,
            "schedule": TeleportSchedule(start=2, cooldown=2),
            "teleporter": DenseTeleporter(),
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


@pytest.fixture(scope="module")
def undisturbed():
    run = Run()
    states, teleports = [], 0
    for step in range(9):
        run.train(step)
        states.append(through_a_file(run.save()))
        report = run.optimizer.last_step and run.optimizer.last_step.teleport
        teleports += report is not None and report.accepted
    assert teleports >= 2
    return states


@pytest.mark.parametrize("stop", range(1, 8))
def test_resumed_at_any_step_of_a_run_with_teleports(undisturbed, stop):
    run = Run(convnet(seed=3))
    run.load(undisturbed[stop])
    torch.manual_seed(1234 + stop)  # teleports must not depend on it ...
    torch.set_rng_state(undisturbed[stop]["random"])  # ... dropout may
    run.train(8)
    assert as_bytes(run.save()) == as_bytes(undisturbed[8])


SETTINGS = {
    "every": {"every": 3},
    "htr momentum": {"htr": "momentum"},
    "htr paper": {"htr": "paper"},
    "htr rollback": {"htr": "rollback"},
    "htr reset": {"htr": "reset"},
    "no memory": {"memory": 0},
    "LoRA": {"teleporter": LoRATeleporter(rank=2)},
    "given shared": {"shared": "trunk"},
    "weighted heads": {"heads": "weighted"},
    "SGD": {"base": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9)},
    "NashMTL": {"weighting": cost_mtl.NashMTL()},
    "CAGrad": {"weighting": cost_mtl.CAGrad()},
    "DWA": {"weighting": weightings.DWA(steps_per_epoch=2)},
    "FAMO": {"weighting": weightings.FAMO()},
    "RLW": {"weighting": weightings.RLW()},
    "GradDrop": {"weighting": weightings.GradDrop()},
    "PCGrad": {"weighting": weightings.PCGrad()},
    "MGDA": {"weighting": weightings.MGDA()},
    "ScaleInvariant": {"weighting": weightings.ScaleInvariant()},
}


def make_run(name, seed=0):
    settings = dict(SETTINGS[name])
    model = mlp(2, seed=seed)
    if settings.get("shared") == "trunk":
        settings["shared"] = model.trunk
    return Run(model, shape=(6,), **settings)


@pytest.mark.parametrize("name", SETTINGS)
def test_resumed_with_every_kind_of_state(name):
    run = make_run(name)
    run.train(4)
    saved = through_a_file(run.save())
    run.train(8)
    resumed = make_run(name, seed=9)
    resumed.load(saved)
    resumed.train(8)
    assert as_bytes(resumed.save()) == as_bytes(run.save())


def test_what_is_saved_matters():
    """The comparison above would notice a lost state: without COST's part the run goes another way."""
    run = make_run("DWA")
    run.train(4)
    saved = through_a_file(run.save())
    run.train(8)
    resumed = make_run("DWA", seed=9)
    saved["optimizer"].pop("cost")
    resumed.load(saved)
    resumed.train(8)
    assert not torch.equal(flat(list(run.model.parameters())), flat(list(resumed.model.parameters())))


def test_learned_weights_are_the_users_parameters():
    def make(seed):
        torch.manual_seed(seed)
        weighting = weightings.Uncertainty(2)
        return Run(mlp(2, seed=seed), shape=(6,), weighting=weighting, extra=list(weighting.parameters())), weighting

    run, weighting = make(0)
    run.train(4)
    saved = through_a_file(run.save() | {"weighting": weighting.state_dict()})
    run.train(8)
    resumed, theirs = make(9)
    resumed.load(saved)
    theirs.load_state_dict(saved["weighting"])
    resumed.train(8)
    assert as_bytes(resumed.save()) == as_bytes(run.save())
    assert torch.equal(theirs.log_variances, weighting.log_variances)
    assert weighting.log_variances.abs().min() > 0


def test_a_teleport_outside_of_step_leaves_its_sigma_to_the_coming_one():
    run = make_run("htr momentum")
    run.train(4)
    x, ys = data(2, 8, seed=77, shape=(6,))
    report = run.optimizer.teleport(lambda x, ys: losses(run.model, x, ys), x, ys)
    assert report.accepted
    saved = through_a_file(run.save())
    assert saved["optimizer"]["cost"]["sigma"] == report.sigma
    run.train(7)
    resumed = make_run("htr momentum", seed=9)
    resumed.load(saved)
    resumed.train(7)
    assert as_bytes(resumed.save()) == as_bytes(run.save())


# ------------------------------------------------------------------------------------ what is in it


def test_only_plain_things_are_saved_and_nothing_is_shared_with_the_run():
    run = make_run("FAMO")
    run.train(5)
    state = run.optimizer.state_dict()
    assert is_plain(state["cost"])
    before = as_bytes(state["cost"])
    run.train(7)
    assert as_bytes(state["cost"]) == before
    memory = state["cost"]["memory"]
    assert len(memory) == 4
    assert torch.equal(memory[-1][0], data(2, 8, seed=4, shape=(6,))[0])


def test_loading_takes_nothing_of_the_callers():
    run = make_run("DWA")
    run.train(4)
    saved = copy.deepcopy(run.optimizer.state_dict())
    before = as_bytes(saved["cost"])
    other = make_run("DWA", seed=9)
    other.optimizer.load_state_dict(saved)
    other.train(3)
    assert as_bytes(saved["cost"]) == before
    assert "cost" in saved


class Graph:
    """A batch of a kind that ``torch.load(weights_only=True)`` refuses."""

    def __init__(self, x, ys):
        self.x, self.ys = x, ys


def test_batches_of_another_kind_are_not_saved_and_the_resume_says_so():
    model = mlp(2)
    run = Run(model, shape=(6,))
    for seed in range(3):
        run.optimizer.step(lambda g: losses(model, g.x, g.ys), Graph(*data(2, seed=seed)))
    assert len(run.optimizer.progress.memory) == 3
    saved = through_a_file(run.optimizer.state_dict())
    with pytest.warns(UserWarning, match="3 remembered batches .* can't be saved"):
        run.optimizer.load_state_dict(saved)
    assert run.optimizer.progress.memory == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.optimizer.load_state_dict(run.optimizer.state_dict())


def test_a_remembered_batch_follows_the_current_one_to_its_device():
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    old = (here, [here, "name"], {"x": here, "more": here}, 3)
    moved = beside(old, (there, [there, "name"], {"x": there}, 3))
    assert [t.device.type for t in (moved[0], moved[1][0], moved[2]["x"], moved[2]["more"])] == ["meta"] * 3 + ["cpu"]
    assert moved[1][1] == "name"
    assert moved[3] == 3
    assert beside(old, (there,)) is old


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"version": 99}, "expected version 1, got version 99"),
        ([1, 2], "got list"),
        ({}, "got dict"),
        ({"version": 1, "step": 3}, "incomplete, without"),
    ],
)
def test_a_checkpoint_of_another_kind_is_refused_before_anything_is_loaded(state, words):
    run = make_run("SGD")
    run.train(3)
    before = as_bytes(run.save())
    other = run.optimizer.state_dict()
    other["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=words):
        run.optimizer.load_state_dict(other | {"cost": state})
    assert as_bytes(run.save()) == before


def test_progress_survives_its_own_round_trip():
    progress = Progress(step=3, skipped=1, attempts=2, last_attempt=1, sigma=0.5, shared=[0, 2])
    assert Progress.unpack(progress.pack()) == progress


# ------------------------------------------------------------------------------------ killed


STEPS, SAVE_EVERY, KILLS = 300, 10, 10


def killable_run():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))
    torch.manual_seed(0)
    net = mlp(2)
    net.trunk = model
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    return Run(net, shape=(6,), schedule=TeleportSchedule(start=20, cooldown=15))


def life(path, reached):
    """One process: from the last checkpoint as far as it gets."""
    torch.set_num_threads(1)
    run = killable_run()
    if os.path.exists(path):
        run.load(torch.load(path, weights_only=True))
    while run.step < STEPS:
        run.train(run.step + 1)
        if run.step % SAVE_EVERY == 0:
            torch.save(run.save(), path + ".new")
            os.replace(path + ".new", path)  # a checkpoint is there as a whole or not at all
        reached.value = run.step


def test_killed_ten_times_at_random_moments(tmp_path):
    context = multiprocessing.get_context("fork")
    chance = random.Random(7)
    path = str(tmp_path / "checkpoint.pt")
    for target in sorted(chance.sample(range(1, STEPS - 5), KILLS)):
        reached = context.Value("i", 0)
        process = context.Process(target=life, args=(path, reached))
        process.start()
        while reached.value < target and process.is_alive():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.02))  # in the middle of a step, a teleport or the writing of a checkpoint
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    reached = context.Value("i", 0)
    process = context.Process(target=life, args=(path, reached))
    process.start()
    process.join()
    assert process.exitcode == 0

    run = killable_run()
    run.train(STEPS)
    assert as_bytes(torch.load(path, weights_only=True)) == as_bytes(run.save())
    assert run.optimizer.progress.attempts >= 10

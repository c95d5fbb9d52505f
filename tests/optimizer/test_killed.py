"""Killed with SIGKILL at random moments and resumed from its last checkpoint, a run ends as the undisturbed one."""

import multiprocessing
import os
import random
import signal
import time

import torch
from torch import nn

from cost_mtl import TeleportSchedule
from tests.nets import mlp
from tests.resuming import Run, as_bytes

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

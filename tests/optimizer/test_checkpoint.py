"""Stopped anywhere and resumed from its checkpoint, a run ends bit for bit as the undisturbed one."""

import copy
import warnings

import pytest
import torch

import cost_mtl
from cost_mtl import LoRATeleporter
from cost_mtl import weighting as weightings
from cost_mtl.step.state import Progress, beside, is_plain
from tests.nets import convnet, data, flat, losses, mlp
from tests.resuming import Run, as_bytes, through_a_file


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


@pytest.mark.parametrize(
    ("saved", "resumed", "said"),
    [("DWA", "FAMO", 1), ("FAMO", "NashMTL", 1), ("NashMTL", "FAMO", 0), ("CAGrad", "NashMTL", 0)],
)
def test_another_weighting_than_the_checkpoints_starts_anew(saved, resumed, said):
    run = make_run(saved)
    run.train(4)
    state = through_a_file(run.save())
    other = make_run(resumed, seed=9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load(copy.deepcopy(state))
    assert [f"state is {saved}'s, and this is {resumed}" in str(w.message) for w in caught] == [True] * said
    plain = make_run(resumed, seed=9)  # the same run, told nothing of a weighting
    state["optimizer"]["cost"] |= {"method": resumed, "weighting": {}, "num_tasks": None}
    plain.load(state)
    for r in (other, plain):
        r.train(7)
    assert as_bytes(other.save()) == as_bytes(plain.save())
    assert other.optimizer.progress.step == 7


def test_progress_survives_its_own_round_trip():
    progress = Progress(step=3, skipped=1, attempts=2, last_attempt=1, sigma=0.5, shared=[0, 2])
    assert Progress.unpack(progress.pack("FAMO"), "FAMO") == progress


def test_progress_of_an_earlier_release_is_read():
    packed = Progress(step=3, attempts=2, last_attempt=1).pack("FAMO")
    del packed["last_asked"]
    assert Progress.unpack(packed, "FAMO") == Progress(step=3, attempts=2, last_attempt=1)


@pytest.mark.parametrize("state", [{}, {"weird": 1}, {"state": {}}, {"param_groups": []}])
def test_what_is_no_state_dict_is_refused_by_name(state):
    run = Run()
    with pytest.raises(ValueError, match="state_dict: expected what state_dict"):
        run.optimizer.load_state_dict(state)


def test_a_checkpoint_of_before_tasks_had_names_keeps_the_weightings_memory():
    run = Run(weighting=weightings.FAMO())
    run.train(4)
    saved = through_a_file(run.save())
    run.train(6)
    for name in ("names", "present", "last_asked"):
        del saved["optimizer"]["cost"][name]
    other = Run(weighting=weightings.FAMO())
    other.load(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.train(6)
    assert torch.equal(flat(list(run.model.parameters())), flat(list(other.model.parameters())))

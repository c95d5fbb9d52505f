"""Every field of a checkpoint, damaged in every way: refused by name before anything is loaded, both parts or none."""

import copy
import math

import pytest
import torch

import cost_mtl
from cost_mtl import COST
from cost_mtl import weighting as weightings
from tests.nets import losses, mlp
from tests.resuming import Run, as_bytes, through_a_file

NAN = math.nan


def make(weighting=None, seed=0, **settings):
    settings = {"every": 2, "htr": "momentum", "teleporter": cost_mtl.DifferenceTeleporter(every=1)} | settings
    return Run(mlp(2, seed=seed), shape=(6,), weighting=weighting or weightings.FAMO(), **settings)


@pytest.fixture(scope="module")
def saved():
    """The checkpoint of a run in which every field is in use."""
    run = make()
    run.train(5)
    x, ys = torch.randn(8, 6), [torch.randn(8, 1) for _ in range(2)]
    run.optimizer.teleport(lambda x, ys: losses(run.model, x, ys), x, ys)
    state = through_a_file(run.optimizer.state_dict())
    cost = state["cost"]
    cost["sigma"] = 0.5 if cost["sigma"] is None else cost["sigma"]
    empty = [k for k, v in cost.items() if v is None or (isinstance(v, list | dict) and not v)]
    assert empty == []
    return state


def vector(**changed):
    """A tensor, damaged."""
    return {
        "wrong type": lambda t: t.tolist(),
        "a number": lambda t: 1.0,
        "a string": lambda t: "x",
        "integers": lambda t: torch.ones(t.shape, dtype=torch.int64),
        "too short": lambda t: t[:-1],
        "too long": lambda t: torch.cat([t, t[:1]]),
        "a matrix": lambda t: t[None],
        "nan": lambda t: torch.full_like(t, NAN),
        "inf": lambda t: torch.cat([t[:-1], torch.full_like(t[:1], math.inf)]),
    }


COUNT = {
    "a string": "3",
    "a float": 3.0,
    "a bool": True,
    "negative": -1,
    "nan": NAN,
    "none": None,
    "tensor": torch.ones(()),
}
DAMAGES = {
    "version": {"future": 2, "a string": "1", "a float": 1.0, "none": None, "a list": [1]},
    "method": {"none": None, "a number": 3, "a list": ["FAMO"]},
    "weights_of": {"none": None, "a number": 3, "a list": ["FAMO"]},
    "step": COUNT | {"less than skipped": 0},
    "skipped": COUNT | {"more than step": 99},
    "attempts": COUNT | {"none where one was": 0},
    "memory_lost": COUNT,
    "last_attempt": COUNT | {"in the future": 99},
    "last_asked": {k: v for k, v in COUNT.items() if k != "none"} | {"in the future": 99},
    "sigma": {"a string": "1", "negative": -0.1, "above 1": 1.5, "nan": NAN, "an integer": 1, "tensor": torch.ones(())},
    "num_tasks": {k: v for k, v in COUNT.items() if k != "none"} | {"zero": 0, "another": 3},
    "names": {"a tuple": ("0", "1"), "numbers": [0, 1], "one too many": ["0", "1", "2"], "one": ["0"], "none": None,
              "a string": "01"},
    "shared": {"a tuple": (0, 1), "beyond": [0, 1, 99], "negative": [-1, 0], "floats": [0.0, 1.0],
               "bools": [False, True], "twice": [0, 0, 1], "out of order": [1, 0], "none": None, "strings": ["0"]},
    "memory": {"a tuple": (), "no tuples": [torch.ones(2)], "lists": [[torch.ones(2)]], "objects": [(object(),)],
               "none": None, "a dict": {}},
    "iterates": {"a tuple": (), "none": None, "numbers": [1.0], "lists": [[1.0, 2.0]]},
    "weighting": {"none": None, "a list": [], "empty": {}, "unknown key": {"x": 1}, "objects": {"logits": object()}},
}  # fmt: skip
CASES = [(name, how, value) for name, found in DAMAGES.items() for how, value in found.items()]
CASES += [("direction", how, change) for how, change in vector().items()]
NUMBERS = {"a list": [1.0], "a string": "x", "nan": NAN, "inf": math.inf, "none": None, "a tensor": torch.ones(2)}
CASES += [("weights", how, lambda w, v=value: w | {"0": v}) for how, value in NUMBERS.items()]
CASES += [("weights", how, value) for how, value in (("a list", [1.0, 2.0]), ("a number", 1.0), ("unknown", {"x": 1.0}),
                                                     ("a tensor too long", torch.ones(3)))]  # fmt: skip
CASES += [("present", how, value) for how, value in (("a tuple", ("0", "1")), ("unknown", ["x"]), ("none", None))]
CASES += [("memory_of", how, value) for how, value in (("none", None), ("too short", lambda m: m[:-1]), ("a dict", {}),
                                                       ("numbers", lambda m: [1] * len(m)),
                                                       ("half", lambda m: [{"names": None}] * len(m)))]  # fmt: skip
CASES += [
    ("iterates", f"the last {how}", lambda ts, c=change: [*ts[:-1], c(ts[-1])]) for how, change in vector().items()
]
FAMOS = ("logit", "mean", "square")


def of_task(key, value):
    """FAMO's state with another value of the first task."""
    return lambda w: w | {"tasks": w["tasks"] | {"0": w["tasks"]["0"] | {key: value}}}


CASES += [("weighting", f"{key} {how}", of_task(key, value)) for key in FAMOS for how, value in NUMBERS.items()]
CASES += [("weighting", f"steps {how}", of_task("steps", v)) for how, v in COUNT.items()]
CASES += [("weighting", f"without {key}", lambda w, key=key: {k: v for k, v in w.items() if k != key})
          for key in ("tasks", "names", "losses", "after")]  # fmt: skip
CASES += [("weighting", "losses of more tasks", lambda w: w | {"losses": torch.ones(3)}),
          ("weighting", "losses nan", lambda w: w | {"losses": torch.full((2,), NAN)}),
          ("weighting", "after a list", lambda w: w | {"after": [1.0, 2.0]}),
          ("weighting", "names unknown", lambda w: w | {"names": ["x", "1"]}),
          ("weighting", "tasks a list", lambda w: w | {"tasks": []}),
          ("weighting", "a task unknown", lambda w: w | {"tasks": w["tasks"] | {"x": w["tasks"]["0"]}})]  # fmt: skip


def refused(run, state, match):
    """Loading raises, and changes nothing: neither part, nor what was handed in."""
    before, handed = as_bytes(run.save()), repr(state)
    objects = run.optimizer.progress, run.optimizer.base.state, run.optimizer.param_groups
    with pytest.raises(ValueError, match=match):
        run.optimizer.load_state_dict(state)
    assert as_bytes(run.save()) == before
    assert repr(state) == handed
    for now, then in zip(
        (run.optimizer.progress, run.optimizer.base.state, run.optimizer.param_groups), objects, strict=True
    ):
        assert now is then


@pytest.fixture(scope="module")
def standing():
    run = make(seed=3)
    run.train(3)
    return run


@pytest.mark.parametrize(("name", "how", "change"), CASES, ids=[f"{n}: {h}" for n, h, _ in CASES])
def test_a_damaged_field_is_named(saved, standing, name, how, change):
    state = copy.deepcopy(saved)
    old = state["cost"][name]
    state["cost"][name] = change(old) if callable(change) else change
    words = (
        "expected version 1, got"
        if name == "version"
        else rf"state_dict\['cost'\]\['({name}|skipped|last_attempt|names|weights|present)'\].*: expected .*, got "
    )
    refused(standing, state, words)


def test_the_checkpoint_itself_loads_and_saves_as_it_is(saved):
    run = make(seed=3)
    run.optimizer.load_state_dict(copy.deepcopy(saved))
    assert as_bytes(run.optimizer.state_dict()) == as_bytes(saved)


@pytest.mark.parametrize("name", ["step", "method", "weights", "memory", "shared", "direction"])
def test_a_missing_field_and_an_unknown_one(saved, standing, name):
    state = copy.deepcopy(saved)
    value = state["cost"].pop(name)
    refused(standing, state, rf"incomplete, without \['{name}'\]")
    state["cost"] |= {name: value, name + "s": value}
    refused(standing, state, rf"expected nothing but the fields of version 1, got .*{name}s")


def group(**changed):
    return lambda s: s | {"param_groups": [s["param_groups"][0] | changed]}


def entry(key, **changed):
    """The state of one parameter, with functions of what was there."""

    def change(s):
        old = s["state"][key]
        new = {k: v(old[k]) if callable(v) else v for k, v in changed.items()}
        return s | {"state": s["state"] | {key: old | new}}

    return change


BASE = {
    "groups a dict": lambda s: s | {"param_groups": {}},
    "a group without params": lambda s: s | {"param_groups": [{"lr": 0.1}]},
    "a group less": lambda s: s | {"param_groups": []},
    "a parameter less": group(params=[0, 1]),
    "lr nan": group(lr=NAN),
    "state a list": lambda s: s | {"state": []},
    "state of a parameter that is not there": lambda s: s | {"state": s["state"] | {77: {}}},
    "state of a parameter a tensor": lambda s: s | {"state": s["state"] | {1: torch.ones(2)}},
    "exp_avg of another shape": entry(1, exp_avg=torch.ones(3, 3)),
    "exp_avg a list": entry(1, exp_avg=[1.0]),
    "exp_avg_sq nan": entry(2, exp_avg_sq=lambda t: t * NAN),
    "exp_avg_sq inf": entry(2, exp_avg_sq=lambda t: t + math.inf),
    "step negative": entry(0, step=torch.tensor(-1.0)),
    "step nan": entry(0, step=torch.tensor(NAN)),
    "step a string": entry(0, step="1"),
}


@pytest.mark.parametrize("how", BASE)
def test_a_damaged_part_of_the_base(saved, standing, how):
    refused(standing, BASE[how](copy.deepcopy(saved)), r"state_dict|param.*group|parameter group")


class HalfWay(torch.optim.SGD):
    """Loads, and fails then."""

    error: BaseException = RuntimeError("half-way")

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.param_groups[0]["lr"] = 77.0
        raise self.error


class InPlace(torch.optim.SGD):
    """Changes what it has, and fails then."""

    def load_state_dict(self, state_dict):
        for group in self.param_groups:
            group["lr"] = 77.0
        for state in self.state.values():
            state.clear()
        self.state.clear()
        raise KeyboardInterrupt


@pytest.mark.parametrize(("kind", "error"), [(HalfWay, RuntimeError), (InPlace, KeyboardInterrupt)])
def test_a_base_that_fails_half_way_leaves_both_parts(kind, error):
    run = make(base=lambda params, lr: kind(params, lr, momentum=0.9))
    run.train(4)
    state = copy.deepcopy(run.optimizer.state_dict())
    run.train(6)
    before, progress = as_bytes(run.save()), run.optimizer.progress
    with pytest.raises(error):
        run.optimizer.load_state_dict(state)
    assert as_bytes(run.save()) == before
    assert run.optimizer.progress is progress


def test_iterates_of_before_the_shared_parameters_were_known_or_frozen_ones_are_fine(saved):
    """Their lengths are those of some of the shared parameters."""
    state, run = copy.deepcopy(saved), make(seed=3)
    sizes = [p.numel() for p in run.model.trunk.parameters()]
    full = state["cost"]["iterates"][-1]
    assert len(full) == sum(sizes)
    state["cost"]["iterates"] = [full[:0], full[: sizes[0]], full[: sizes[1] + sizes[2]], full]
    run.optimizer.load_state_dict(state)
    run.train(2)


@pytest.mark.parametrize(
    ("weighting", "damage"),
    [
        (lambda: weightings.DWA(2), lambda w: w | {"total": torch.ones(5)}),
        (lambda: weightings.DWA(2), lambda w: w | {"total": {"0": NAN, "1": 1.0}}),
        (lambda: weightings.DWA(2), lambda w: w | {"count": -1}),
        (lambda: weightings.DWA(2), lambda w: w | {"count": {"0": 1}}),
        (lambda: weightings.DWA(2), lambda w: w | {"last": "x"}),
        (lambda: cost_mtl.FairGrad(2.0), lambda w: {"x": 1}),
        (lambda: weightings.RLW(), lambda w: [1]),
    ],
)
def test_the_state_of_every_weighting_is_looked_at(weighting, damage):
    run = make(weighting())
    run.train(5)
    state = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(copy.deepcopy(state))
    state["cost"]["weighting"] = damage(state["cost"]["weighting"])
    refused(run, state, r"state_dict\['cost'\]\['weighting'\]")


class Own:
    """A user's, whose state grows as it goes; infinite values may have their meaning."""

    def initial_state(self, num_tasks):
        return {"best": torch.full((num_tasks,), math.inf)}

    def weigh(self, inputs, state):
        return cost_mtl.base.Weighed(torch.ones(len(inputs.losses)), state | {"seen": state.get("seen", 0) + 1})


def test_a_users_weighting_keeps_what_it_likes():
    run = make(Own())
    run.train(5)
    state = through_a_file(run.optimizer.state_dict())
    assert state["cost"]["weighting"]["seen"] > 0
    run.optimizer.load_state_dict(copy.deepcopy(state))
    del state["cost"]["weighting"]["best"]
    refused(run, state, r"\['weighting'\]: expected the keys \['best'\]")


def test_a_plain_optimizers_checkpoint_still_loads():
    run = make()
    run.train(4)
    plain = {k: v for k, v in copy.deepcopy(run.optimizer.state_dict()).items() if k != "cost"}
    other = COST(torch.optim.AdamW(mlp(2, seed=1).parameters()), mlp(2))
    other.load_state_dict(plain)
    assert other.progress.step == 0

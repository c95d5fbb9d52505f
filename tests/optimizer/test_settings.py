"""Settings are checked when they are made, and shown where they differ from the default."""

import functools

import pytest
import torch

from cost_mtl import COST, CAGrad, DenseTeleporter, FairGrad, WeakConflict
from cost_mtl import weighting as weightings
from cost_mtl.step.identity import identity
from cost_mtl.weighting import resolve
from tests.nets import data, losses, mlp

pytestmark = pytest.mark.filterwarnings("ignore:.*remembered batches were of a kind")


def make(**settings):
    model = mlp(2)
    return COST(torch.optim.SGD(model.parameters(), lr=0.01), model, shared=model.trunk, **settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", "7"), ("seed", 1.0), ("seed", None), ("seed", True), ("memory", True), ("memory", -1), ("memory", "4"),
     ("every", 0), ("every", 1.0), ("every", True), ("gradients", "half"), ("gradients", None), ("gradients", 1),
     ("htr", "none"), ("htr", None), ("heads", True), ("on_nonfinite", "ignore"), ("max_norm", 0), ("max_norm", True),
     ("max_norm", "1"), ("schedule", 5), ("trigger", "any"), ("trigger", WeakConflict), ("teleporter", "lora"),
     ("teleporter", DenseTeleporter), ("on_teleport", 3), ("scaler", 3), ("process_group", "world")],
)  # fmt: skip
def test_a_bad_setting_is_refused_by_name(name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .*, got "):
        make(**{name: value})


def test_settings_that_differ_are_shown():
    assert "weighting" not in repr(make())
    assert "teleporter" not in repr(make())
    shown = repr(make(weighting=CAGrad(c=0.3), trigger=None, teleporter=DenseTeleporter()))
    assert shown.startswith("COST(SGD (")
    assert f"weighting={CAGrad(c=0.3)!r}, trigger=None, teleporter={DenseTeleporter()!r})" in shown
    assert "trigger=WeakConflict(" in repr(make(trigger=WeakConflict()))
    assert "weighting=FairGrad(" in repr(make(weighting=FairGrad()))  # another scale than the default's

    def half(M):
        return torch.full((len(M),), 0.5)

    assert "half" in repr(make(weighting=half))
    assert "weighting=FAMO(" in repr(make(weighting=weightings.FAMO()))


def ones(M):
    return torch.ones(len(M))


def twos(M):
    return torch.full((len(M),), 2.0)


def constant(value):
    return lambda M: torch.full((len(M),), value)


class Constant:
    def __init__(self, value):
        self.value = value

    def __call__(self, M):
        return torch.full((len(M),), self.value)


DIFFERENT = {
    "functions": (ones, twos),
    "lambdas": (lambda M: torch.ones(len(M)), lambda M: torch.full((len(M),), 2.0)),
    "what a lambda has caught": (constant(1.0), constant(2.0)),
    "partials": (functools.partial(torch.mul, torch.ones(2)), functools.partial(torch.add, torch.ones(2))),
    "attributes": (Constant(1.0), Constant(2.0)),
    "a function and an object": (ones, FairGrad()),
    "settings": (FairGrad(1.0), FairGrad(2.0)),
    "what a lambda hands on to": ((lambda f: lambda M: f(M))(FairGrad(1.0)), (lambda f: lambda M: f(M))(FairGrad(2.0))),
}


@pytest.mark.parametrize("kind", [k for k in DIFFERENT if k != "partials"])
def test_reused_weights_of_a_checkpoint_do_not_go_over_to_another_weighting(kind):
    (x, ys), (one, other) = data(2), DIFFERENT[kind]
    saved = make(weighting=one, every=4)
    saved.step(losses, saved.model, x, ys)
    state = saved.state_dict()
    assert state["cost"]["weights"] is not None
    same, different = make(weighting=one, every=4), make(weighting=other, every=4)
    for optimizer in (same, different):
        optimizer.load_state_dict(state)
        optimizer.step(losses, optimizer.model, x, ys)
    assert same.last_step.gramian is None  # the weights of the checkpoint
    assert different.last_step.gramian is not None  # a solve of its own
    expected = other(different.last_step.gramian)
    torch.testing.assert_close(different.last_step.weights, expected.to(different.last_step.weights.dtype))


@pytest.mark.parametrize("kind", DIFFERENT)
def test_identities_tell_weightings_apart_and_are_reproducible(kind):
    one, other = map(resolve, DIFFERENT[kind])
    assert identity(one) == identity(one)
    assert identity(one) != identity(other)


def test_equal_settings_are_one_identity_whatever_the_object():
    assert identity(resolve(FairGrad(1.0))) == identity(resolve(FairGrad(1.0)))
    assert identity(resolve(constant(1.0))) == identity(resolve(constant(1.0)))
    module = (
        weightings.UncertaintyWeighting(2) if hasattr(weightings, "UncertaintyWeighting") else torch.nn.Linear(2, 2)
    )
    before = identity(module)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(1.0)
    assert identity(module) == before  # what is learned is no setting


def test_weights_of_an_earlier_releases_checkpoint_are_left_out():
    (x, ys), optimizer = data(2), make(every=4)
    optimizer.step(losses, optimizer.model, x, ys)
    state = optimizer.state_dict()
    del state["cost"]["weights_of"]
    other = make(every=4)
    other.load_state_dict(state)
    assert other.progress.step == 1
    other.step(losses, other.model, x, ys)
    assert other.last_step.gramian is not None

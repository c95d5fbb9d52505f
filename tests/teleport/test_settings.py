"""Settings are checked when they are made, kept in one place, and never changed afterwards."""

import copy
import dataclasses
import pickle

import pytest
import torch

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, DifferenceTeleporter, LevelSet, LoRATeleporter, Move, Penalty
from cost_mtl.teleport import Sharpness, Sphere
from tests.nets import conflicting, losses

every = pytest.mark.parametrize("make", [LoRATeleporter, DenseTeleporter, DifferenceTeleporter])


@every
def test_a_shorthand_is_a_short_way_to_write_an_acceptance(make):
    assert make(tolerance=0.02) == make(acceptance=Acceptance(tolerance=0.02))
    assert make(invariance="mean") == make(acceptance=Acceptance(invariance="mean"))
    both = make(tolerance=0.02, acceptance=Acceptance(min_norm=0.3))
    assert both.acceptance == Acceptance(tolerance=0.02, min_norm=0.3)
    assert make(tolerance=0.02, acceptance=Acceptance(tolerance=0.02)) == make(tolerance=0.02)


@every
def test_replacing_the_acceptance_replaces_what_a_shorthand_said(make):
    short = make(tolerance=0.02, invariance="mean")
    assert dataclasses.replace(short, acceptance=Acceptance(tolerance=0.001)).acceptance == Acceptance(tolerance=0.001)
    assert dataclasses.replace(short, objective="norm").acceptance == short.acceptance
    assert dataclasses.replace(short) == short
    assert dataclasses.replace(make(), tolerance=0.03) == make(tolerance=0.03)
    assert pickle.loads(pickle.dumps(short)) == copy.deepcopy(short) == short


@every
@pytest.mark.parametrize(("name", "value", "other"), [("tolerance", 0.02, 0.001), ("invariance", "each", "mean")])
def test_a_shorthand_that_contradicts_the_acceptance_is_refused(make, name, value, other):
    with pytest.raises(ValueError, match=f"{name}: expected it in one place, got {name}={value!r} beside .*={other!r}"):
        make(acceptance=Acceptance(**{name: other}), **{name: value})
    with pytest.raises(ValueError, match="tolerance: expected it in one place"):
        dataclasses.replace(make(tolerance=0.02), tolerance=0.03)


@pytest.mark.parametrize(
    ("make", "name"),
    [(Acceptance, n) for n in ("tolerance", "tolerance_heldout", "min_angle", "min_norm")]
    + [(LevelSet, n) for n in ("length", "shortest", "corrections", "halvings", "epsilon", "constraints")]
    + [(LevelSet, "heldout_corrections")]
    + [(Penalty, n) for n in ("gamma", "lr", "steps", "constraints", "epsilon")]
    + [(Sphere, "samples"), (Sphere, "delta"), (Sharpness, "delta"), (LoRATeleporter, "rank")]
    + [(DifferenceTeleporter, "directions"), (DifferenceTeleporter, "every")]
    + [(t, "tolerance") for t in (LoRATeleporter, DenseTeleporter, DifferenceTeleporter)],
)
@pytest.mark.parametrize("value", ["x", float("nan"), True, [1]])
def test_a_number_is_expected(make, name, value):
    with pytest.raises(ValueError, match=f"^{name}: expected .*, got "):
        make(**{name: value})


@every
def test_other_settings_are_named_too(make):
    for error, wrong in (
        (TypeError, {"solver": LevelSet}),
        (TypeError, {"solver": 3}),
        (TypeError, {"acceptance": 0.1}),
        (TypeError, {"acceptance": Acceptance}),
        (ValueError, {"objective": "nrom"}),
        (ValueError, {"objective": None}),
        (ValueError, {"objective": ["norm"]}),
        (ValueError, {"invariance": "all"}),
    ):
        with pytest.raises(error, match=f"^{next(iter(wrong))}: expected "):
            make(**wrong)
    with pytest.raises(ValueError, match=r"^invariance: expected one of 'each', 'mean', got 'all'"):
        Acceptance(invariance="all")
    with pytest.raises(TypeError, match=r"^acceptance: expected an Acceptance, got float"):
        Move(torch.zeros(2), "norm", acceptance=0.1)


def test_positional_arguments_are_where_they_were():
    rule = Acceptance(min_norm=0.1)
    assert LoRATeleporter(3, None, "norm", Penalty(), rule) == LoRATeleporter(
        rank=3, objective="norm", solver=Penalty(), acceptance=rule
    )
    assert DenseTeleporter("norm", Penalty(), rule, 0.02, "mean").acceptance == Acceptance(
        tolerance=0.02, min_norm=0.1, invariance="mean"
    )
    assert DifferenceTeleporter(2, 7, "norm") == DifferenceTeleporter(directions=2, every=7, objective="norm")


# ------------------------------------------------------------------------------------ one objective after the other


def asked(teleporter_class, **settings):
    """The objectives that were asked for, and the report, where no move can hold."""
    seen = []

    class Asked(teleporter_class):
        def propose(self, problem):
            move = super().propose(problem)
            seen.append(move.objective.name)
            return move

        def propose_for(self, objective, problem, rejected):
            seen.append((objective.name, rejected.objective.name))
            return super().propose_for(objective, problem, rejected)

    model, x, ys = conflicting()
    rule = Acceptance(min_angle=1e3, min_norm=1e3)
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                        teleporter=Asked(acceptance=rule, **settings))  # fmt: skip
    return seen, opt.teleport(lambda: losses(model, x, ys))


@pytest.mark.parametrize("make", [LoRATeleporter, DenseTeleporter])
def test_auto_tries_the_standard_objectives_in_turn_and_a_chosen_one_alone(make):
    seen, report = asked(make)
    assert seen == ["conflict", ("norm", "conflict")]
    assert report.objective == "norm"
    for name in ("conflict", "norm"):
        assert asked(make, objective=name)[0] == [name]
    assert asked(make, solver=Penalty(steps=1))[0] == ["norm"]  # the paper's: the sphere's gain is of the norms


def test_a_subclass_with_a_move_of_its_own_is_asked_once():
    class Own(DenseTeleporter):
        def propose(self, problem):
            return Move(1e-6 * torch.ones(sum(p.numel() for p in problem.params)), "norm")

        def propose_for(self, objective, problem, rejected):
            raise AssertionError("its move is not for the first objective of the class")

    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=Own())
    assert not opt.teleport(lambda: losses(model, x, ys)).accepted


def test_a_fallback_does_not_check_the_layers_again(monkeypatch):
    from peft import LoHaConfig

    checked = []

    def counted(problem, layers, config):
        checked.append(len(layers))
        return {layers[0].name: "not this one"}

    monkeypatch.setattr("cost_mtl.teleport.lora.unfit_layers", counted)
    seen, report = asked(LoRATeleporter, peft_config=LoHaConfig(r=2, alpha=2))
    assert len(seen) == 2
    assert checked == [2]
    assert list(report.skipped_layers.values()) == ["not this one"]

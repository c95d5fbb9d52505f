"""Settings are checked when they are made: every field of every public settings class refuses what it can't use."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import merging

NAN, INF = math.nan, math.inf

NUMBER = ["x", "1", True, None, [1.0], 1j, NAN]
FINITE = [*NUMBER, INF, -INF]
SHARE = [*FINITE, -0.1, 1.1]
COUNT = ["x", "1", True, None, [1], 1.0, 1.5, NAN]
SEED = COUNT
CHOICE = ["x", "", None, 1, True, ["raw"]]
FLAG = ["x", None, 1, 0, [True]]
PER_TASK = ["x", 1.0, True, ["x"], [True], [None], [NAN], [INF], {"a": "x"}, {"a": NAN}]
OR_NONE = [value for value in NUMBER if value is not None]
SCALED = {"scale": CHOICE, "max_norm": [*OR_NONE, 0, -1.0]}

# Class -> the arguments that it needs, and for each field what it must refuse.
SETTINGS = {
    cost_mtl.EqualWeighting: ({}, {"weights": [*PER_TASK, [], [-1.0], {}, {"a": -1.0}]}),
    cost_mtl.FairGrad: ({}, {"alpha": [*NUMBER, -1, 0.01, 21, -INF], **SCALED}),
    cost_mtl.NashMTL: ({}, SCALED),
    cost_mtl.CAGrad: ({}, {"c": [*FINITE, -0.1], "rescale": [*COUNT, 3, -1], **SCALED}),
    cost_mtl.MGDA: ({}, SCALED),
    cost_mtl.IMTLG: ({}, SCALED),
    cost_mtl.PCGrad: ({}, {"scale": [*CHOICE, "raw"], "seed": SEED}),
    cost_mtl.GradDrop: ({}, {"leak": SHARE, "seed": SEED}),
    cost_mtl.RLW: ({}, {"distribution": CHOICE, "scale": [*CHOICE, "raw"], "seed": SEED}),
    cost_mtl.DWA: (
        {"steps_per_epoch": 2},
        {"steps_per_epoch": [*COUNT, 0, -1], "temperature": [*FINITE, 0, -1]},
    ),
    cost_mtl.FAMO: (
        {},
        {"lr": [*FINITE, -1], "weight_decay": [*FINITE, -1], "epsilon": [*FINITE, 0], "min_losses": PER_TASK},
    ),
    cost_mtl.NGDiff: ({}, {"retain": [*COUNT, 2, 1], "forget": [*COUNT, 2, 0]}),
    cost_mtl.ScaleInvariant: ({}, {}),
    cost_mtl.Uncertainty: ({"num_tasks": 2}, {"num_tasks": [*COUNT, 0], "log_variance": FINITE}),
    cost_mtl.DominatedConflict: ({}, {"rule": CHOICE}),
    cost_mtl.WeakConflict: ({}, {}),
    cost_mtl.ConflictShare: ({}, {"share": [*SHARE, 0]}),
    cost_mtl.TeleportSchedule: (
        {},
        {
            "start": [*COUNT, -1],
            "cooldown": [*COUNT, 0],
            "limit": [*(value for value in COUNT if value is not None), -1],
            "confirm": FLAG,
        },
    ),
    merging.FitSettings: (
        {},
        {
            "lr": [*FINITE, 0, -1],
            "max_epochs": [*COUNT, -1],
            "patience": [*COUNT, 0],
            "clip": [*OR_NONE, 0],
            "l1": [*FINITE, -1],
            "l2": [*FINITE, -1],
            "weight_decay": [*FINITE, -1],
        },
    ),
    merging.DVBASI: (
        {},
        {"iterations": [*COUNT, 0], "direction": CHOICE, "init": FINITE, "fit": ["x", None, {}], "seed": SEED},
    ),
}

NO_SETTINGS = {
    # What COST and the merges return.
    cost_mtl.SolverReport, cost_mtl.StepReport, cost_mtl.TeleportReport, cost_mtl.Move,
    merging.DVBASIResult, merging.FitReport, merging.Iteration, merging.ScaleSearch, merging.TaskVectorBasis,
}  # fmt: skip

TELEPORT = {
    # Held by the tests of teleports (tests/optimizer/test_arguments.py).
    cost_mtl.Acceptance, cost_mtl.LevelSet, cost_mtl.Penalty,
    cost_mtl.DenseTeleporter, cost_mtl.DifferenceTeleporter, cost_mtl.LoRATeleporter,
}  # fmt: skip

CASES = [
    pytest.param(cls, needed, field, value, id=f"{cls.__name__}({field}={value!r})")
    for cls, (needed, fields) in SETTINGS.items()
    for field, values in fields.items()
    for value in values
]


@pytest.mark.parametrize(("cls", "needed", "field", "value"), CASES)
def test_a_wrong_value_is_refused_at_once(cls, needed, field, value):
    with pytest.raises(ValueError, match=rf"^(\w+, )?{field}(, \w+)?: expected .*, got "):
        cls(**{**needed, field: value})


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.__name__)
def test_the_table_has_every_field_and_takes_the_defaults(cls):
    needed, fields = SETTINGS[cls]
    made = cls(**needed)
    if dataclasses.is_dataclass(cls):
        assert {field.name for field in dataclasses.fields(cls)} == set(fields)
        assert dataclasses.replace(made) == made


def test_the_table_has_every_public_settings_class():
    public = [getattr(module, name) for module in (cost_mtl, merging) for name in module.__all__]
    classes = {thing for thing in public if isinstance(thing, type) and dataclasses.is_dataclass(thing)}
    assert classes - set(SETTINGS) == NO_SETTINGS | TELEPORT


@pytest.mark.parametrize(
    "make",
    [
        lambda: cost_mtl.RLW(seed=np.int64(3)),
        lambda: cost_mtl.FairGrad(alpha=np.float64(2)),
        lambda: cost_mtl.FairGrad(alpha=0),
        lambda: cost_mtl.FairGrad(alpha=INF),
        lambda: cost_mtl.NashMTL(max_norm=1),
        lambda: cost_mtl.EqualWeighting((1, np.float32(0.5))),
        lambda: cost_mtl.FAMO(min_losses={"a": -1, "b": 0}),
        lambda: cost_mtl.TeleportSchedule(start=np.int64(0), limit=0),
        lambda: cost_mtl.ConflictShare(1),
    ],
)
def test_numpy_numbers_and_limits_are_taken(make):
    make()


def vector():
    return merging.TaskVector.from_blocks({"weight": torch.ones(2, 3), "bias": torch.ones(2)})


def linear():
    return nn.Linear(3, 2)


ARGUMENTS = {
    "init": (lambda v: merging.AnisotropicScaling(linear(), [vector()], init=v), FINITE),
    "init ": (lambda v: merging.AnisotropicScaling(linear(), [vector()], init=torch.tensor([[0.0, v]])), [NAN, INF]),
    "granularity": (lambda v: merging.AnisotropicScaling(linear(), [vector()], granularity=v), CHOICE),
    "keep": (lambda v: merging.RankPruning(linear(), [vector()], keep=v), SHARE),
    "scale": (lambda v: merging.RankPruning(linear(), [vector()], scale=v), FINITE),
    "scale ": (
        lambda v: merging.task_arithmetic(linear(), [vector()], v),
        ["x", True, None, NAN, INF, [1.0, 2.0], ["x"], [NAN]],
    ),
    "scale  ": (lambda v: vector().apply_to(linear(), v), ["x", True, None, [1.0], NAN, INF]),
    "density": (lambda v: merging.ties([vector()], v), [*SHARE, 0]),
    "density ": (lambda v: merging.dare(vector(), v), [*SHARE, 0]),
    "seed": (lambda v: merging.dare(vector(), 0.5, v), SEED),
    "lower": (lambda v: merging.breadcrumbs(vector(), v), SHARE),
    "upper": (lambda v: merging.breadcrumbs(vector(), upper=v), [*SHARE, 0]),
    "weights": (lambda v: merging.combine([vector()], [v]), FINITE),
    "buffers": (lambda v: vector().apply_to(linear(), buffers=v), CHOICE),
    "keys": (lambda v: merging.TaskVector(linear(), linear(), keys=v), CHOICE),
    "method": (lambda v: merging.TaskVectorBasis.fit([vector()], 1, v), CHOICE),
    "seed ": (lambda v: merging.TaskVectorBasis.fit([vector()], 1, seed=v), SEED),
    "size": (lambda v: merging.TaskVectorBasis.fit([vector(), vector()], v), [*COUNT, 0, 3]),
}


@pytest.mark.parametrize(
    ("name", "make", "value"),
    [pytest.param(n.strip(), m, v, id=f"{n}={v!r}") for n, (m, values) in ARGUMENTS.items() for v in values],
)
def test_a_wrong_argument_of_a_merge_is_refused(name, make, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        make(value)

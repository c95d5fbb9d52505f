"""What every objective and every teleporter keeps to. A new one is one row."""

import copy
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, DifferenceTeleporter, LoRATeleporter, Move, Penalty
from cost_mtl._torch.rng import ForwardState
from cost_mtl.distributed.failures import FailTogether
from cost_mtl.gradients.gramian import gramian
from cost_mtl.gradients.layout import Layout
from cost_mtl.teleport.coordinates.dense import DenseCoordinates
from cost_mtl.teleport.objectives import PROMISES, Conflict, Norm
from cost_mtl.teleport.objectives.base import ObjectiveContext, Slope, in_loss_units
from cost_mtl.teleport.paper import Sharpness, Sphere
from cost_mtl.teleport.problem import Problem
from cost_mtl.teleport.settings import OBJECTIVES, named
from tests.nets import conflicting, losses
from tests.teleport.test_transaction import Everything, f32_convnet


class FirstNorm:
    """An objective of one's own: log ||g_0||, the first task's gradient norm; its gain is the relative rise of it."""

    name = "first-norm"

    def slope(self, context):
        G, M = context.task_gradients()
        length = float(M[0, 0].sqrt())
        step = 1e-6 / length
        (ahead,) = context.coordinates.gradients_at(step * G[0], context.batch, [[0]])
        gradient = (ahead - context.J[0]) / step / length**2
        return Slope(float(M[0, 0].log()) / 2, gradient, wanted=0.1, rate=1.0)

    def gain(self, before, after):
        return float((after[0, 0] / before[0, 0]).sqrt()) - 1

    def least(self, rule):
        return 0.01


@dataclass(frozen=True)
class Row:
    """An objective and what it promises.

    Attributes:
        exact: largest relative error of the gain that its slope predicts along itself.
        symmetric: whether its gain is the same in whatever order the tasks come.
    """

    objective: Any
    exact: float = 1e-3
    symmetric: bool = True


ROWS = {
    "conflict": Row(Conflict()),
    "norm": Row(Norm()),
    "conflict-exact": Row(named("conflict-exact")),
    "norm-exact": Row(named("norm-exact")),
    "sharpness": Row(Sharpness(delta=1e-5), exact=0.2),
    "sphere": Row(Sphere(samples=400, delta=1e-5), exact=0.3),
    "first-norm": Row(FirstNorm(), symmetric=False),
}
every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def test_every_objective_that_has_a_name_has_a_row():
    assert OBJECTIVES.keys() <= ROWS.keys()


# ------------------------------------------------------------------------------------ a small problem, in float64

K, M_PARAMETERS = 3, 4


def landscape(seed, *, unit=1.0):
    """K smooth losses of four parameters with curvature, none zero, times ``unit``. The task gradients differ in length
    by a tenth, so that a mean of them is about a geometric mean."""
    g = torch.Generator().manual_seed(seed)
    C = torch.randn(K, M_PARAMETERS, dtype=torch.float64, generator=g)
    A = torch.randn(K, 6, M_PARAMETERS, dtype=torch.float64, generator=g)
    model = nn.Module()
    model.x = nn.Parameter(torch.randn(M_PARAMETERS, dtype=torch.float64, generator=g))

    def raw():
        return 5 + C @ model.x + torch.einsum("krm,m->kr", A, model.x).tanh().square().sum(dim=1)

    lengths = cost_mtl.task_gradients(raw(), [model.x]).norm(dim=1)
    scale = unit * torch.tensor([0.9, 1.0, 1.1], dtype=torch.float64) / lengths
    return model, lambda: scale * raw()


def problem_of(model, task_losses):
    layout = Layout([model.x])
    G = cost_mtl.task_gradients(task_losses(), layout.params)
    return Problem(
        model, layout, [], [[task_losses]], ForwardState.capture(model.modules(), []), ("0", "1", "2"),
        task_losses().detach().double(), G, gramian(G, dtype=torch.float64), None,
        torch.Generator().manual_seed(0), FailTogether(layout.device, None),
    )  # fmt: skip


def clear_cases(count):
    """Seeds at which one task has by far the largest angle to the mean gradient: the soft minimum is the minimum."""
    found = []
    for seed in range(100):
        c = cost_mtl.cosines(problem_of(*landscape(seed)).gramian).sort().values
        if float(c[1] - c[0]) > 0.1 and abs(float(c[0])) < 0.9:
            found.append(seed)
    assert len(found) >= count
    return found[:count]


def slope_on(problem, objective):
    coordinates = DenseCoordinates(problem)
    length = float(problem.layout.flatten(problem.params).norm())
    return objective.slope(ObjectiveContext(problem, coordinates, 0, problem.gradients, length, 1e-6))


def gramian_at(problem, delta):
    with problem.at(delta):
        _, G = problem.evaluate_gradients(0)
    return gramian(G, dtype=torch.float64)


# ------------------------------------------------------------------------------------ objectives


def check_that_the_gain_follows_the_slope(row):
    """d gain / d step along the slope, by central differences of what the transaction measures, is what it predicts."""
    for seed in clear_cases(4):
        problem = problem_of(*landscape(seed))
        slope = slope_on(problem, row.objective)
        assert slope.gradient.shape == (M_PARAMETERS,)
        assert torch.isfinite(slope.gradient).all()
        assert slope.wanted > 0
        length = float(slope.gradient.norm())
        up, h = slope.gradient / length, 1e-6
        ahead, behind = (
            row.objective.gain(problem.gramian, gramian_at(problem, sign * h * up)) for sign in (1.0, -1.0)
        )
        predicted = slope.rate * length
        assert predicted > 0
        assert (ahead - behind) / (2 * h) == pytest.approx(predicted, rel=row.exact), seed


def check_that_units_do_not_matter(row):
    """Losses in another unit: the gain is the same, the slope is or goes with the unit, as the objective says."""
    c = 7.0
    plain, scaled = problem_of(*landscape(1)), problem_of(*landscape(1, unit=c))
    a, b = slope_on(plain, row.objective), slope_on(scaled, row.objective)
    factor = c if in_loss_units(row.objective) else 1.0
    torch.testing.assert_close(b.gradient, factor * a.gradient, rtol=1e-4, atol=1e-6 * float(a.gradient.norm()))
    after = gramian_at(plain, 1e-2 * torch.ones(M_PARAMETERS, dtype=torch.float64))
    gain = row.objective.gain(plain.gramian, after)
    assert row.objective.gain(c * c * plain.gramian, c * c * after) == pytest.approx(gain, rel=1e-9)
    assert row.objective.gain(plain.gramian, plain.gramian) == pytest.approx(0.0, abs=1e-7)
    if row.symmetric:
        order = [2, 0, 1]
        turned = row.objective.gain(plain.gramian[order][:, order], after[order][:, order])
        assert turned == pytest.approx(gain, rel=1e-9)


def check_an_objective(row):
    check_that_the_gain_follows_the_slope(row)
    check_that_units_do_not_matter(row)


@every
def test_gain_follows_slope(row):
    check_that_the_gain_follows_the_slope(row)


@every
def test_units_and_order_do_not_matter(row):
    check_that_units_do_not_matter(row)


@every
def test_a_task_without_gradient_is_no_obstacle(row):
    problem = problem_of(*landscape(2))
    before, after = problem.gramian.clone(), gramian_at(problem, torch.full((M_PARAMETERS,), 1e-2).double())
    for M in (before, after):
        M[2] = M[:, 2] = 0.0
    gain = row.objective.gain(before, after)
    assert gain == gain
    assert abs(gain) < 1.0


@every
@pytest.mark.parametrize("make", [LoRATeleporter, DenseTeleporter])
def test_accepted_moves_have_gained_and_harmed_nothing_and_the_report_has_the_name(row, make):
    rule = Acceptance(min_angle=0.01, min_norm=0.02)
    for seed in range(3):
        model, x, ys = conflicting(seed=seed)
        params = list(model.trunk.parameters())
        before = gramian(cost_mtl.task_gradients(losses(model, x, ys), params), dtype=torch.float64)
        opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                            teleporter=make(objective=row.objective, acceptance=rule))  # fmt: skip
        report = opt.teleport(lambda model=model, x=x, ys=ys: losses(model, x, ys))
        after = gramian(cost_mtl.task_gradients(losses(model, x, ys), params), dtype=torch.float64)
        assert report.objective == row.objective.name
        if not report.accepted:
            assert torch.equal(before, after)
            continue
        assert row.objective.name in report.reason
        assert row.objective.gain(before, after) >= row.objective.least(rule) - 1e-5
        for promise in PROMISES:
            if promise.name != row.objective.name:
                assert promise.gain(before, after) >= -promise.tolerated(rule) - 1e-5


def test_a_move_that_gains_too_little_says_so_in_the_objectives_own_words():
    model, x, ys = conflicting()
    strict = DenseTeleporter(objective=dataclasses.replace(Shy(), at_least=50.0))
    report = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                           teleporter=strict).teleport(lambda: losses(model, x, ys))  # fmt: skip
    assert not report.accepted
    assert "the first-norm objective changed by +" in report.reason
    assert "and had to rise by 50" in report.reason


@dataclass(frozen=True)
class Shy(FirstNorm):
    at_least: float = 0.01

    def least(self, rule):
        return self.at_least


class Reversed(FirstNorm):
    """The slope points down."""

    def slope(self, context):
        slope = super().slope(context)
        return dataclasses.replace(slope, gradient=-slope.gradient)


class WrongTask(FirstNorm):
    """The gain is another task's."""

    def gain(self, before, after):
        return float((after[1, 1] / before[1, 1]).sqrt()) - 1


class Backwards(FirstNorm):
    """The gain is from after to before."""

    def gain(self, before, after):
        return super().gain(after, before)


class InUnits(FirstNorm):
    """The gain has the losses' unit."""

    def gain(self, before, after):
        return float(after[0, 0].sqrt() - before[0, 0].sqrt())


class ByPosition(Norm):
    """The gain depends on the order of the tasks."""

    def gain(self, before, after):
        return FirstNorm().gain(before, after)


class LossUnits(Norm):
    """Says that it goes with the losses' unit, and does not."""

    loss_units = True


@pytest.mark.parametrize("wrong", [Reversed, WrongTask, Backwards, InUnits, ByPosition, LossUnits])
def test_deliberate_mistakes_of_an_objective_are_found(wrong):
    with pytest.raises(AssertionError):
        check_an_objective(Row(wrong(), symmetric=not issubclass(wrong, FirstNorm)))


@pytest.mark.parametrize("missing", ["name", "slope", "gain", "least"])
def test_an_incomplete_objective_is_refused_when_it_is_handed_over(missing):
    parts = {k: v for k, v in vars(FirstNorm).items() if k in {"name", "slope", "gain", "least"} - {missing}}
    incomplete = type("Incomplete", (), parts)()
    for make in (LoRATeleporter, DenseTeleporter, DifferenceTeleporter):
        with pytest.raises(ValueError, match=r"objective: expected .*name, slope, gain and least"):
            make(objective=incomplete)
    with pytest.raises(ValueError, match=r"objective: expected .*name, slope, gain and least"):
        Move(torch.zeros(3), incomplete)
    with pytest.raises(ValueError, match="objective: expected"):
        DenseTeleporter(objective=FirstNorm)  # the class


@pytest.mark.parametrize("name", ["", "none", 3])
def test_a_name_that_can_not_stand_in_a_report_is_refused(name):
    objective = FirstNorm()
    objective.name = name
    with pytest.raises(ValueError, match=r"objective.name: expected a word other than 'none', got"):
        LoRATeleporter(objective=objective)
    with pytest.raises(ValueError, match=r"objective.name: expected a word"):
        Move(torch.zeros(3), objective)


# ------------------------------------------------------------------------------------ teleporters


@dataclass(frozen=True)
class Jitter:
    """A teleporter of one's own: a small random move, meant for the norms."""

    acceptance: Acceptance = field(default_factory=Acceptance)

    def propose(self, problem):
        m = sum(p.numel() for p in problem.params)
        return Move(1e-4 * torch.randn(m, generator=problem.generator), "norm", acceptance=self.acceptance)


def _loha(acceptance):
    from peft import LoHaConfig

    return LoRATeleporter(peft_config=LoHaConfig(r=2, alpha=2), acceptance=acceptance)


TELEPORTERS = {
    "LoRA": lambda rule: LoRATeleporter(acceptance=rule),
    "LoHa": _loha,
    "dense": lambda rule: DenseTeleporter(acceptance=rule),
    "difference": lambda rule: DifferenceTeleporter(every=1, acceptance=rule),
    "paper": lambda rule: LoRATeleporter(solver=Penalty(steps=3), acceptance=rule),
    "jitter": Jitter,
}
every_teleporter = pytest.mark.parametrize("make", TELEPORTERS.values(), ids=TELEPORTERS)
LOOSE = Acceptance(tolerance=0.5, tolerance_heldout=0.5, min_angle=-1.0, min_norm=-1.0)


def quiet_convnet():
    """A network whose own evaluations change no buffer."""
    model, x, ys = f32_convnet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model, x, ys


def trained(model, x, ys, teleporter, *, lr=1e-3):
    """An optimizer with earlier batches and iterates at hand."""
    opt = cost_mtl.COST(torch.optim.Adam(model.parameters(), lr=lr), model, shared=model.trunk, teleporter=teleporter,
                        trigger=lambda M: False)  # fmt: skip
    for scale in (0.9, 1.1, 1.2):
        opt.step(losses, model, x * scale, ys)
    return opt


class Watched:
    """Hands a teleporter's proposal on, after a look at it and at what it left behind."""

    directions, every = 4, 1  # the earlier iterates are kept for all of them

    def __init__(self, inner):
        self.inner, self.faults = inner, []

    def propose(self, problem):
        model, m = problem.model, sum(p.numel() for p in problem.params)
        shared = {id(p) for p in problem.params}
        others = [(t, t.detach().clone()) for t in model.state_dict(keep_vars=True).values() if id(t) not in shared]
        tree = [(n, c, len(c._forward_hooks), c.training) for n, c in model.named_modules()]
        move = self.inner.propose(problem)
        rows = {
            "delta's shape": move.delta.shape == (m,),
            "a finite delta": bool(torch.isfinite(move.delta).all()),
            "batches that are there": set(move.used) <= set(range(problem.batches)),
            "the other parameters and the buffers": all(torch.equal(t, was) for t, was in others),
            "modules, hooks and modes": tree == [
                (n, c, len(c._forward_hooks), c.training) for n, c in model.named_modules()
            ],
        }  # fmt: skip
        self.faults = [name for name, kept in rows.items() if not kept]
        return move


def check_a_proposal(make):
    """What a teleporter itself owes the transaction: a move that fits, and a model with nothing but theta moved."""
    watched = Watched(make(LOOSE))
    model, x, ys = quiet_convnet()
    report = trained(model, x, ys, watched).teleport(losses, model, x, ys)
    assert watched.faults == []
    return report


@every_teleporter
def test_a_proposal_fits_and_moves_nothing_but_the_shared_parameters(make):
    assert check_a_proposal(make).accepted


@every_teleporter
def test_rejected_moves_give_every_bit_back_and_accepted_ones_move_the_trunk_alone(make):
    strict = Acceptance(tolerance=0.5, tolerance_heldout=0.5, min_angle=1e6, min_norm=1e6)
    for rule, accepted in ((LOOSE, True), (strict, False), (Acceptance(tolerance=1e-12), False)):
        model, x, ys = f32_convnet()
        opt = trained(model, x, ys, make(rule))
        seen = Everything(model)
        report = opt.teleport(losses, model, x, ys)
        assert report.accepted == accepted, report.reason
        seen.check(moved=accepted)


@every_teleporter
def test_accepted_moves_keep_the_losses_as_an_outsider_measures_them(make):
    rule = Acceptance(tolerance=0.02, tolerance_heldout=0.1, min_angle=-1.0, min_norm=-1.0)
    accepted = 0
    for seed in range(3):
        model, x, ys = conflicting(seed=seed)
        opt = trained(model, x, ys, make(rule), lr=1e-4)
        before = torch.stack(losses(model, x, ys)).detach().double()
        report = opt.teleport(losses, model, x, ys)
        after = torch.stack(losses(model, x, ys)).detach().double()
        change = float(((after - before).abs() / before).max())
        assert change <= (rule.tolerance if report.accepted else 0.0)
        accepted += report.accepted
    assert accepted >= 1


@every_teleporter
def test_settings_are_frozen_and_survive_a_copy(make):
    teleporter = make(LOOSE)
    assert copy.deepcopy(teleporter).acceptance == LOOSE
    with pytest.raises(dataclasses.FrozenInstanceError):
        teleporter.acceptance = Acceptance()


class TooLong(Jitter):
    def propose(self, problem):
        move = super().propose(problem)
        return dataclasses.replace(move, delta=torch.cat([move.delta, move.delta[:1]]))


class MovesABuffer(Jitter):
    def propose(self, problem):
        next(iter(problem.model.buffers())).add_(1.0)
        return super().propose(problem)


class MovesAHead(Jitter):
    def propose(self, problem):
        with torch.no_grad():
            problem.model.heads[0].weight.add_(1.0)
        return super().propose(problem)


class LeavesAModule(Jitter):
    def propose(self, problem):
        problem.model.trunk.add_module("left_over", nn.Identity())
        return super().propose(problem)


class OtherBatches(Jitter):
    def propose(self, problem):
        return dataclasses.replace(super().propose(problem), used=(0, 99))


@pytest.mark.parametrize("wrong", [TooLong, MovesABuffer, MovesAHead, LeavesAModule, OtherBatches])
def test_deliberate_mistakes_of_a_teleporter_are_found(wrong):
    with pytest.raises((AssertionError, ValueError)):
        check_a_proposal(wrong)


@pytest.mark.parametrize(("wrong", "message"), [
    (TooLong, r"delta: expected shape \["), (OtherBatches, r"used: expected batches from 0 to \d, got \(0, 99\)"),
])  # fmt: skip
def test_the_transaction_refuses_by_name_what_can_not_be_verified(wrong, message):
    model, x, ys = f32_convnet()
    opt = trained(model, x, ys, wrong(LOOSE))
    seen = Everything(model)
    with pytest.raises(ValueError, match=message):
        opt.teleport(losses, model, x, ys)
    seen.check(moved=False)


@pytest.mark.parametrize("wrong", [MovesABuffer, LeavesAModule])
def test_the_transaction_puts_back_what_a_teleporter_must_not_move(wrong):
    model, x, ys = f32_convnet()
    opt = trained(model, x, ys, wrong(LOOSE))
    seen = Everything(model)
    assert opt.teleport(losses, model, x, ys).accepted
    seen.check(moved=True)


def test_the_objective_in_the_documentation_keeps_the_contract():
    text = (Path(__file__).parents[2] / "docs" / "teleport.md").read_text()
    (block,) = [b.split("```")[0] for b in text.split("```python\n")[1:] if "class SmallestNorm" in b]
    names: dict[str, Any] = {}
    exec(compile(block, "docs/teleport.md", "exec"), names)
    check_an_objective(Row(names["SmallestNorm"](), symmetric=True))
    model, x, ys = conflicting()
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                        teleporter=names["teleporter"])  # fmt: skip
    report = opt.teleport(lambda: losses(model, x, ys))
    assert report.objective == "smallest norm"

"""Every objective's value and slope against a slow reference: the formula in float64, through functional_call."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import cost_mtl
from cost_mtl import Acceptance, DenseTeleporter, LoRATeleporter, TeleportSchedule
from cost_mtl.teleport.coordinates.adapters import ADAPTER, adapters
from cost_mtl.teleport.coordinates.dense import DenseCoordinates
from cost_mtl.teleport.coordinates.difference import DifferenceCoordinates
from cost_mtl.teleport.coordinates.layers import shared_layers
from cost_mtl.teleport.objectives import PROMISES
from cost_mtl.teleport.objectives.base import ObjectiveContext, Slope
from cost_mtl.teleport.objectives.conflict import near_worst
from cost_mtl.teleport.objectives.norm import NormGain
from cost_mtl.teleport.paper import Exact, Sharpness, Sphere
from cost_mtl.teleport.settings import OBJECTIVES, named
from tests.nets import MultiHead, conflicting, data, losses, mlp
from tests.teleport.test_adapters import problem_of

K = 3


class Reference:
    """The task losses as functions of the trunk's parameters, one flat vector theta [m]."""

    def __init__(self):
        model = mlp(K, dtype=torch.float64)
        x, ys = data(K)
        self.model, self.x, self.ys = model, x.double(), [y.double() for y in ys]
        self.plain = copy.deepcopy(model)  # into which no adapter is put
        self.names = [n for n, p in model.named_parameters() if n.startswith("trunk")]
        self.shapes = [model.get_parameter(n).shape for n in self.names]

    def problem(self):
        return problem_of(self.model, self.x, self.ys)

    def split(self, theta):
        parts = theta.split([s.numel() for s in self.shapes])
        return {n: part.view(s) for n, part, s in zip(self.names, parts, self.shapes, strict=True)}

    def losses(self, theta):
        out = functional_call(self.plain, self.split(theta), (self.x,))
        return torch.stack([((o - y) ** 2).mean() for o, y in zip(out, self.ys, strict=True)])

    def task_gradients(self, theta):
        theta = theta.detach().requires_grad_()
        return torch.stack([torch.autograd.grad(loss, theta, retain_graph=True)[0] for loss in self.losses(theta)])

    def mean_gradient_cosines(self, theta):
        G = self.task_gradients(theta)
        return torch.cosine_similarity(G, G.mean(dim=0, keepdim=True))


def balance(G):
    lengths = G.norm(dim=1)
    return len(G) * (1 - lengths / lengths.sum())


def formula(name, reference, theta, length, generator):
    """The objective as a function of theta, with what counts as constant fixed at ``theta``."""
    G = reference.task_gradients(theta)
    R = balance(G)
    if name.startswith("conflict"):
        p = near_worst(G @ G.T)
        return lambda t: (p * reference.mean_gradient_cosines(t)).sum()
    if name.startswith("norm"):
        return lambda t: (R * reference.task_gradients(t).norm(dim=1).log()).sum()
    if name == "sharpness":
        delta = 0.01 * length
        eps = delta * G / G.norm(dim=1, keepdim=True)
    else:
        delta, points = 1e-4, []
        for _ in range(5):
            parts = reference.split(torch.randn(len(theta), generator=generator).double()).values()
            points.append(torch.cat([(delta * v / v.norm()).flatten() for v in parts]))
        change = torch.stack([reference.losses(theta + e) - reference.losses(theta) for e in points]).abs()
        eps = torch.stack(points)[change.argmax(dim=0)]

    def sharpness(t):
        here = reference.losses(t)
        return sum(R[i] * (reference.losses(t + eps[i])[i] - here[i]).abs() for i in range(K)) / K / delta

    return sharpness


def lora_theta(reference, coordinates, theta):
    """theta with every B A added by hand."""
    parts = {n: v.clone() for n, v in reference.split(theta).items()}
    for layer in coordinates.layers:
        lora = coordinates.tuner.model.get_submodule(layer.name)
        product = lora.lora_B[ADAPTER].weight @ lora.lora_A[ADAPTER].weight
        parts[f"{layer.name}.weight"] += lora.scaling[ADAPTER] * product.detach()
    return torch.cat([v.flatten() for v in parts.values()])


def check(name, reference, problem, coordinates, theta_of, *, moved):
    _, J = coordinates.gradients(0)
    length = float(theta_of().norm())
    g = torch.Generator().manual_seed(7)
    phi = 0.05 * torch.randn(J.shape[1], generator=g).double() if moved else torch.zeros(J.shape[1]).double()
    coordinates.place(phi)
    theta = theta_of()
    _, J = coordinates.gradients(0)
    problem.generator.manual_seed(3)
    slope = named(name).slope(ObjectiveContext(problem, coordinates, 0, J, length, 1e-5))
    value = formula(name, reference, theta, length, torch.Generator().manual_seed(3))
    # Losses that differ by 1e-6 of themselves: differences of them are good to a few digits less.
    assert slope.value == pytest.approx(float(value(theta).detach()), rel=1e-6)
    assert slope.notes == ()
    assert float(slope.gradient.norm()) > 0
    h = 1e-5
    for _ in range(4):
        v = torch.randn(len(phi), generator=g).double()
        v /= v.norm()
        ends = []
        for sign in (1, -1):
            coordinates.place(phi + sign * h * v)
            ends.append(float(value(theta_of()).detach()))
        want = (ends[0] - ends[1]) / (2 * h)
        assert float(slope.gradient @ v) == pytest.approx(want, rel=2e-4, abs=2e-5 * float(slope.gradient.norm()))


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("make", [DenseCoordinates, DifferenceCoordinates])
def test_slope_in_the_parameters_and_along_differences(name, make, moved):
    reference = Reference()
    problem = reference.problem()
    problem.iterates = [torch.randn(problem.layout.numel, dtype=torch.float64) for _ in range(2)]
    coordinates = make(problem)
    check(name, reference, problem, coordinates, lambda: coordinates.theta + coordinates.delta(), moved=moved)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_slope_in_a_lora_adapter(name, moved):
    from peft import LoraConfig

    reference = Reference()
    problem = reference.problem()
    theta = torch.cat([p.detach().flatten() for p in problem.params])
    layers, _ = shared_layers([reference.model], problem.params)
    with adapters(problem, layers, LoraConfig(r=3, lora_alpha=3), plain_lora=True) as coordinates:
        check(name, reference, problem, coordinates, lambda: lora_theta(reference, coordinates, theta), moved=moved)
    assert all(p.requires_grad for p in problem.params)


class FusedAttention(nn.Module):
    """Tokens of one number each; its attention has no double backward."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), 3, 1, 2, 4).unbind(1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(torch.tanh(mixed.reshape(len(x), 8)))


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.name)
def test_without_double_backward_finite_differences_are_taken_and_said(promise):
    torch.manual_seed(0)
    model = MultiHead(FusedAttention(), 8, 2)
    x, ys = data(2)
    problem = problem_of(model, x, ys)
    coordinates = DenseCoordinates(problem)
    at = ObjectiveContext(problem, coordinates, 0, problem.gradients, 1.0, 0.1)
    exact = Exact(promise).slope(at)
    assert "finite differences instead of double backward" in exact.notes[0]
    torch.testing.assert_close(exact.gradient, promise.slope(at).gradient)
    loose = Acceptance(tolerance=0.5, min_angle=1e-6, min_norm=1e-6)
    for teleporter in (DenseTeleporter(f"{promise.name}-exact", acceptance=loose),
                       LoRATeleporter(objective=f"{promise.name}-exact", acceptance=loose)):  # fmt: skip
        opt = cost_mtl.COST(
            torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, teleporter=teleporter
        )
        report = opt.teleport(lambda: losses(model, x, ys))
        assert "finite differences instead of double backward" in report.notes[0]


def test_the_exact_objectives_need_no_note_where_double_backward_works():
    model, x, ys = conflicting()
    for objective in ("conflict-exact", "norm-exact", "sharpness", "sphere"):
        opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                            teleporter=LoRATeleporter(objective=objective))  # fmt: skip
        report = opt.teleport(lambda: losses(model, x, ys))
        assert report.objective == named(objective).name
        assert not any("double backward" in note for note in report.notes)
        if "exact" in objective:
            assert report.accepted, report.reason


def test_an_error_in_the_closure_is_not_taken_for_a_missing_double_backward():
    model, x, ys = conflicting()
    calls = []

    def closure():
        calls.append(1)
        if len(calls) == 3:  # the evaluation for the second derivatives
            raise RuntimeError("the loader is gone")
        return losses(model, x, ys)

    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                        teleporter=DenseTeleporter("norm-exact"), schedule=TeleportSchedule(0, 1))  # fmt: skip
    with pytest.raises(RuntimeError, match="the loader is gone"):
        opt.teleport(closure)


def test_micro_batches_give_the_curvature_of_their_mean():
    reference = Reference()
    whole = reference.problem()
    halves = reference.problem()
    cuts = [slice(0, 8), slice(8, 16)]
    halves.closures = [
        [lambda c=c: losses(reference.model, reference.x[c], [y[c] for y in reference.ys]) for c in cuts]
    ]
    a = torch.randn(2, whole.layout.numel, dtype=torch.float64)
    tasks = [[0, 2], [1]]
    torch.testing.assert_close(halves.evaluate_curvature(a, tasks), whole.evaluate_curvature(a, tasks))


def test_wrong_settings_are_named():
    for wrong in ({"samples": 0}, {"samples": 1.5}, {"delta": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Sphere(**wrong)
    with pytest.raises(ValueError, match="delta"):
        Sharpness(delta=-1.0)
    with pytest.raises(ValueError, match="'sphere'"):
        named("spheres")
    assert named(Sphere(samples=2)) == Sphere(samples=2)


def test_an_objective_of_ones_own():
    class FirstNorm(NormGain):
        """log of the first task's gradient norm alone."""

        def slope(self, at):
            G, M = at.task_gradients()
            (moved,) = at.coordinates.gradients_at(G[:1].sum(dim=0) * (1e-2 / float(G[0].norm())), at.batch, [[0]])
            gradient = (moved - at.J[0]) / 1e-2 / float(G[0].norm())
            return Slope(0.5 * float(M[0, 0].log()), gradient, wanted=0.2)

    model, x, ys = conflicting()
    loose = Acceptance(min_norm=-1.0)
    opt = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk,
                        teleporter=DenseTeleporter(FirstNorm(), acceptance=loose))  # fmt: skip
    report = opt.teleport(lambda: losses(model, x, ys))
    assert report.accepted, report.reason
    assert float(report.norms_after[0]) > 1.02 * float(report.norms_before[0])

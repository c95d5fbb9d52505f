"""What one step of COST does, against independent computations."""

import copy

import pytest
import torch
from torch import nn, optim

import cost_mtl
from tests.nets import MultiHead, closure, data, flat, losses, mlp, reference_gradients

BASES = {
    "SGD momentum": lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda ps: optim.Adam(ps, lr=1e-2),
    "AdamW": lambda ps: optim.AdamW(ps, lr=1e-2),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=1e-3, momentum=0.5),
}


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("form", [lambda ls: ls[0], lambda ls: ls, lambda ls: {"only": ls[0]}, torch.stack])
def test_one_task_is_the_base_optimizer_bit_for_bit(name, form):
    model = mlp(1)
    twin = copy.deepcopy(model)
    base, plain = BASES[name](model.parameters()), BASES[name](twin.parameters())
    opt = cost_mtl.COST(base, model, shared=model.trunk, weighting=lambda M: 1 / 0,
                        schedule=cost_mtl.TeleportSchedule(0, 1))  # fmt: skip
    for step in range(200):
        x, ys = data(1, seed=step)
        got = opt.step(lambda x=x, ys=ys: form(losses(model, x, ys)))
        plain.zero_grad()
        loss = losses(twin, x, ys)[0]
        loss.backward()
        plain.step()
        assert torch.equal(got, loss.detach()[None])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
        for key, value in base.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(plain.state[b][key]))


WEIGHTINGS = {
    "own": lambda M: torch.arange(1.0, len(M) + 1),
    "equal": cost_mtl.EqualWeighting(),
    "cagrad": cost_mtl.CAGrad(),
    "nash": cost_mtl.NashMTL(),
    "fairgrad": cost_mtl.FairGrad(2.0),
}


@pytest.mark.parametrize("name", WEIGHTINGS)
@pytest.mark.parametrize("K", [2, 5])
@pytest.mark.parametrize("heads", ["own", "weighted"])
def test_the_update_is_the_weighted_sum_and_heads_follow_their_own_loss(name, K, heads):
    model = mlp(K)
    x, ys = data(K)
    exact = copy.deepcopy(model).double()
    make = closure(exact, x.double(), ys)
    G = reference_gradients(exact, make, list(exact.trunk.parameters()))
    before = flat(model.trunk.parameters())
    opt = cost_mtl.COST(optim.SGD(model.parameters(), lr=1.0), model, shared=model.trunk, weighting=WEIGHTINGS[name],
                        teleporter=None, heads=heads)  # fmt: skip
    opt.step(lambda: losses(model, x, ys))
    w = torch.as_tensor(WEIGHTINGS[name](G @ G.T)).double()
    d = flat(model.trunk.parameters()).double() - before.double()
    torch.testing.assert_close(-d, w @ G, rtol=1e-4, atol=1e-5 * float((w @ G).abs().max()))
    report = opt.last_step
    torch.testing.assert_close(report.gramian.double(), G @ G.T, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(report.norms.double(), G.norm(dim=1), rtol=1e-5, atol=0)
    cos = torch.cosine_similarity(G, G.mean(dim=0, keepdim=True))
    torch.testing.assert_close(report.cosines.double(), cos, rtol=1e-4, atol=1e-5)
    for i, (head, twin) in enumerate(zip(model.heads, exact.heads, strict=True)):
        (want,) = torch.autograd.grad(make()[i], twin.weight)
        want = want * w[i] if heads == "weighted" else want
        torch.testing.assert_close(head.weight.grad.double(), want, rtol=1e-4, atol=1e-6)


def test_the_closure_is_called_once_a_step_with_its_batch():
    model = mlp(3)
    seen = []

    def task_losses(x, ys, *, flag=None):
        seen.append((x, ys))
        assert torch.is_grad_enabled()
        return losses(model, x, ys)

    opt = cost_mtl.COST(optim.Adam(model.parameters()), model, shared=model.trunk)
    batch = data(3)
    for _ in range(5):
        out = opt.step(task_losses, *batch)
    assert len(seen) == 5
    assert seen[0][0] is batch[0]
    assert out.shape == (3,)
    assert not out.requires_grad


def test_names_of_a_mapping_are_reported():
    model = mlp(2)
    x, ys = data(2)
    opt = cost_mtl.COST(optim.Adam(model.parameters()), model, shared=model.trunk)
    opt.step(lambda: dict(zip(["depth", "normals"], losses(model, x, ys), strict=True)))
    assert opt.last_step.names == ("depth", "normals")


def test_shared_is_found_from_the_graph_and_may_grow():
    torch.manual_seed(0)
    model = MultiHead(nn.Linear(6, 8), 8, 3)
    model.middle = nn.Linear(8, 8)  # tasks 1 and 2 alone

    def tasks(x, ys, present):
        z = torch.tanh(model.trunk(x))
        late = torch.tanh(model.middle(z))
        outs = [model.heads[0](z), model.heads[1](late), model.heads[2](late)]
        all_losses = [(o - y).square().mean() for o, y in zip(outs, ys, strict=True)]
        return [loss if on else torch.zeros(()) for loss, on in zip(all_losses, present, strict=True)]

    opt = cost_mtl.COST(optim.SGD(model.parameters(), lr=0.0), model, teleporter=None)
    params = list(model.parameters())
    ids = lambda: {id(params[k]) for k in opt.progress.shared}  # noqa: E731
    x, ys = data(3)
    opt.step(tasks, x, ys, (True, False, False))
    assert ids() == set()
    opt.step(tasks, x, ys, (True, True, False))
    assert ids() == {id(p) for p in model.trunk.parameters()}
    opt.step(tasks, x, ys, (False, True, True))
    both = [*model.trunk.parameters(), *model.middle.parameters()]
    assert ids() == {id(p) for p in both}
    fresh = cost_mtl.COST(optim.SGD(model.parameters(), lr=0.0), model, shared=both, teleporter=None)
    got = [p.grad.clone() for p in params if p.grad is not None]
    fresh.step(tasks, x, ys, (False, True, True))
    want = [p.grad for p in params if p.grad is not None]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_parameters_outside_of_shared_that_several_tasks_reach_get_the_plain_sum():
    model = mlp(2)
    x, ys = data(2)
    first, second = model.trunk[0], model.trunk[2]
    opt = cost_mtl.COST(optim.SGD(model.parameters(), lr=0.0), model, shared=first, teleporter=None,
                        weighting=lambda M: torch.tensor([5.0, 7.0]))  # fmt: skip
    opt.step(lambda: losses(model, x, ys))
    want = torch.autograd.grad(sum(losses(model, x, ys)), second.weight)[0]
    torch.testing.assert_close(second.weight.grad, want, rtol=1e-5, atol=1e-7)


def test_unreached_and_frozen_parameters_keep_grad_none_and_their_bits():
    model = mlp(2)
    model.unused = nn.Linear(3, 3)
    model.trunk.extra = nn.Linear(3, 3)
    nn.Module.register_module(model.trunk, "extra", nn.Identity())
    idle = nn.Linear(2, 2)
    model.trunk[0].weight.requires_grad_(False)
    frozen = model.trunk[0].weight.clone()
    x, ys = data(2)
    shared = [*model.trunk.parameters(), *idle.parameters()]
    opt = cost_mtl.COST(optim.AdamW([*model.parameters(), *idle.parameters()], lr=0.1, weight_decay=0.5), model,
                        shared=shared, teleporter=None)  # fmt: skip
    for _ in range(3):
        opt.step(lambda: losses(model, x, ys))
    assert torch.equal(frozen, model.trunk[0].weight)
    for p in (*model.unused.parameters(), *idle.parameters(), model.trunk[0].weight):
        assert p.grad is None
    assert model.trunk[0].bias.grad is not None


def test_two_optimizers_side_by_side():
    model = mlp(2)
    x, ys = data(2)
    heads = optim.SGD(model.heads.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="another optimizer has to step them"):
        opt = cost_mtl.COST(optim.SGD(model.trunk.parameters(), lr=0.1), model, shared=model.trunk)
    before = [p.detach().clone() for p in model.parameters()]
    opt.step(lambda: losses(model, x, ys))
    heads.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_max_norm_clips_the_shared_direction_alone():
    model = mlp(2)
    x, ys = data(2)
    opt = cost_mtl.COST(optim.SGD(model.parameters(), lr=0.0), model, shared=model.trunk, max_norm=1e-3)
    opt.step(lambda: losses(model, x, ys))
    assert torch.cat([p.grad.flatten() for p in model.trunk.parameters()]).norm() == pytest.approx(1e-3)
    want = torch.autograd.grad(losses(model, x, ys)[0], model.heads[0].weight)[0]
    torch.testing.assert_close(model.heads[0].weight.grad, want)


@pytest.mark.parametrize("heads", ["own", "weighted"])
def test_every_reuses_the_weights_exactly(heads):
    model = mlp(3)
    solved = []

    def weighting(M):
        solved.append(len(solved) + 1.0)
        return torch.tensor([1.0, 2.0, 3.0]) * solved[-1]

    opt = cost_mtl.COST(optim.SGD(model.parameters(), lr=0.1), model, shared=model.trunk, weighting=weighting, every=3,
                        teleporter=None, heads=heads, max_norm=0.5)  # fmt: skip
    twin = copy.deepcopy(model)
    steps = iter(range(100))
    by_hand = cost_mtl.COST(optim.SGD(twin.parameters(), lr=0.1), twin, shared=twin.trunk, teleporter=None, heads=heads,
                            max_norm=0.5,
                            weighting=lambda M: torch.tensor([1.0, 2.0, 3.0]) * (next(steps) // 3 + 1))  # fmt: skip
    for step in range(7):
        x, ys = data(3, seed=step)
        opt.step(lambda x=x, ys=ys: losses(model, x, ys))
        by_hand.step(lambda x=x, ys=ys: losses(twin, x, ys))
    assert solved == [1.0, 2.0, 3.0]
    torch.testing.assert_close(flat(model.parameters()), flat(twin.parameters()), rtol=1e-5, atol=1e-6)


def test_htr_edits_the_shared_state_after_a_teleport_and_nothing_else():
    def run(htr):
        from tests.nets import conflicting

        model, x, ys = conflicting()
        base = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        opt = cost_mtl.COST(base, model, shared=model.trunk, htr=htr,
                            schedule=cost_mtl.TeleportSchedule(3, 1, 1))  # fmt: skip
        for _ in range(4):
            held = {p: s["momentum_buffer"].clone() for p, s in base.state.items()}
            opt.step(lambda: losses(model, x, ys))
        assert opt.last_step.teleport.accepted
        return model, base, held, opt.last_step.teleport.sigma

    for htr, expected in (("reset", 0.0), ("keep", 1.0), ("gradient", None)):
        model, base, held, sigma = run(htr)
        assert expected is None or sigma == expected
        assert 0.0 <= sigma <= 1.0
        for p in model.trunk.parameters():
            torch.testing.assert_close(base.state[p]["momentum_buffer"], sigma * 0.9 * held[p] + p.grad)
        for p in model.heads.parameters():
            torch.testing.assert_close(base.state[p]["momentum_buffer"], 0.9 * held[p] + p.grad)


def test_a_teleport_between_steps_is_felt_in_the_next():
    from tests.nets import conflicting

    model, x, ys = conflicting()
    base = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    opt = cost_mtl.COST(base, model, shared=model.trunk, htr="reset", schedule=cost_mtl.TeleportSchedule(10**6))
    opt.step(lambda: losses(model, x, ys))
    before = {p: s["momentum_buffer"].clone() for p, s in base.state.items()}
    assert opt.teleport(lambda: losses(model, x, ys)).accepted
    assert all(torch.equal(before[p], s["momentum_buffer"]) for p, s in base.state.items())
    opt.step(lambda: losses(model, x, ys))
    for p in model.trunk.parameters():
        torch.testing.assert_close(base.state[p]["momentum_buffer"], p.grad)
    opt.step(lambda: losses(model, x, ys))
    p = model.trunk[0].weight
    assert not torch.equal(base.state[p]["momentum_buffer"], p.grad)


@pytest.mark.parametrize(
    ("kwargs", "error", "word"),
    [
        ({"shared": []}, ValueError, "shared"),
        ({"shared": ["trunk"]}, TypeError, "shared"),
        ({"weighting": "fairgrad"}, TypeError, "weighting"),
        ({"weighting": cost_mtl.FairGrad}, TypeError, "weighting"),
        ({"trigger": "always"}, TypeError, "trigger"),
        ({"schedule": 100}, TypeError, "schedule"),
        ({"teleporter": cost_mtl.LoRATeleporter}, TypeError, "teleporter"),
        ({"htr": "none"}, ValueError, "htr"),
        ({"heads": "mine"}, ValueError, "heads"),
        ({"gradients": "features"}, ValueError, "gradients"),
        ({"max_norm": -1.0}, ValueError, "max_norm"),
        ({"memory": -1}, ValueError, "memory"),
        ({"every": 0}, ValueError, "every"),
        ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite"),
        ({"on_teleport": 3}, TypeError, "on_teleport"),
    ],
)
def test_wrong_arguments_are_named(kwargs, error, word):
    model = mlp(2)
    with pytest.raises(error, match=word):
        cost_mtl.COST(optim.SGD(model.parameters(), lr=0.1), model, **kwargs)


def test_import_is_light():
    import subprocess
    import sys

    code = (
        "import sys, cost_mtl; print(sorted({'cvxpy','scipy','matplotlib','transformers','peft'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("weighting", [cost_mtl.FairGrad(2.0), cost_mtl.FairGrad(2.0, max_norm=float("inf"))])
def test_an_infinite_max_norm_clips_nothing(weighting):
    def run(**settings):
        model, (x, ys) = mlp(3), data(3)
        opt = cost_mtl.COST(optim.Adam(model.parameters(), lr=0.01), model, shared=model.trunk, **settings)
        for _ in range(3):
            opt.step(lambda: losses(model, x, ys))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(run(weighting=weighting, max_norm=float("inf")), run(weighting=cost_mtl.FairGrad(2.0)))

"""Tasks that are missing from some batches lose nothing and disturb nothing, whatever the weighting."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import cost_mtl
from cost_mtl import (
    COST,
    DWA,
    FAMO,
    IMTLG,
    MGDA,
    RLW,
    CAGrad,
    EqualWeighting,
    FairGrad,
    NashMTL,
    NGDiff,
    PCGrad,
    ScaleInvariant,
    Uncertainty,
)
from tests.nets import data, losses, mlp

WEIGHTINGS = {
    "equal": EqualWeighting, "equal by name": lambda: EqualWeighting({"a": 1.0, "b": 5.0, "c": 0.2}),
    "fairgrad": FairGrad, "fairgrad, tasks": lambda: FairGrad(scale="tasks"), "nash": NashMTL, "cagrad": CAGrad,
    "mgda": MGDA, "imtl-g": IMTLG, "pcgrad": lambda: PCGrad(scale="mean"), "rlw": RLW, "si": ScaleInvariant,
    "dwa": lambda: DWA(steps_per_epoch=2), "famo": FAMO, "uncertainty": lambda: Uncertainty(3),
}  # fmt: skip
every = pytest.mark.parametrize("make", WEIGHTINGS.values(), ids=WEIGHTINGS)

WAYS = {
    "missing": lambda tasks, out: {k: v for k, v in tasks.items() if k not in out},
    "no graph": lambda tasks, out: {k: torch.zeros(()) if k in out else v for k, v in tasks.items()},
    "masked": lambda tasks, out: {k: 0 * v if k in out else v for k, v in tasks.items()},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def training(weighting, *, K=3, base=torch.optim.SGD, lr=0.02, **settings):
    model = mlp(K)
    params = [*model.parameters(), *(weighting.parameters() if isinstance(weighting, Uncertainty) else ())]
    settings = {"shared": model.trunk, "teleporter": None} | settings
    return COST(base(params, lr=lr), model, weighting=weighting, **settings), model


def tasks(model, seed, K=3):
    x, ys = data(K, seed=seed)
    return dict(zip("abcdef", losses(model, x, ys), strict=False))


@every
@ways
def test_the_others_are_weighed_as_if_it_were_not_there(make, way):
    # A twin that has never heard of task "b" until then: only for rules without a memory of it that is the same run.
    opt, model = training(make())
    twin, other = training(Uncertainty(2) if make is WEIGHTINGS["uncertainty"] else make())
    opt.step(lambda: tasks(model, 0))
    if make is WEIGHTINGS["uncertainty"]:
        with torch.no_grad():
            twin.weighting.log_variances.copy_(opt.weighting.log_variances[[0, 2]])
    other.load_state_dict(model.state_dict())
    twin.progress.step = opt.progress.step  # draws are keyed on it
    if make in (WEIGHTINGS["famo"], WEIGHTINGS["dwa"]):
        twin.step(lambda: {k: v for k, v in tasks(model, 0).items() if k != "b"})
        twin.progress.step, twin.progress.weighting = 1, copy.deepcopy(opt.progress.weighting)
        other.load_state_dict(model.state_dict())
        if make is WEIGHTINGS["famo"]:  # the update before was made with b, so its losses are part of what is compared
            twin.progress.names = list(opt.progress.names)
    opt.step(lambda: way(tasks(model, 1), "b"))
    twin.step(lambda: {k: v for k, v in tasks(other, 1).items() if k != "b"})
    weights = dict(zip(opt.last_step.names, opt.last_step.weights.tolist(), strict=True))
    assert weights.pop("b", 0.0) == 0.0
    assert list(weights.values()) == pytest.approx(twin.last_step.weights.tolist(), rel=1e-6)  # float32
    for p, q in zip(model.trunk.parameters(), other.trunk.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert model.heads[1].weight.grad is None or not model.heads[1].weight.grad.any()


def task_state(opt, name):
    """All that is kept of one task: the weighting's state of it, and its learned numbers with Adam's state of them."""
    state = opt.progress.weighting
    found = {key: value[name] for key, value in state.items() if isinstance(value, dict) and name in value}
    if isinstance(opt.weighting, Uncertainty):
        s, at = opt.weighting.log_variances, opt.progress.names.index(name)
        found |= {k: v[at].item() for k, v in opt.state[s].items() if v.shape == s.shape} | {"s": s[at].item()}
    return found


@ways
@pytest.mark.parametrize("name", ["famo", "dwa", "uncertainty"])
@pytest.mark.parametrize("every_n", [1, 2])
def test_the_state_of_an_absent_task_is_bit_for_bit_what_it_was(name, way, every_n):
    rng = np.random.default_rng(3)
    opt, model = training(WEIGHTINGS[name](), base=torch.optim.Adam, heads="weighted", every=every_n)
    opt.step(lambda: tasks(model, 0))
    stayed = moved = 0
    for seed in range(1, 40):
        out = {task for task in "abc" if rng.random() < 1 / 3}
        if len(out) == 3:
            continue
        before = {task: task_state(opt, task) for task in "abc"}
        pending = opt.progress.weighting.get("names", [])  # FAMO's step along the last update, which is due now
        epoch = opt.progress.weighting.get("epoch")
        opt.step(lambda out=out, seed=seed: way(tasks(model, seed), out))
        turned = opt.progress.weighting.get("epoch") != epoch  # DWA's means of the last epoch move up for all tasks
        for task in "abc":
            same = task_state(opt, task) == before[task]
            if task in out and task not in pending and not turned:
                assert same, (seed, task)
                stayed += 1
            moved += not same
    assert stayed > 5
    assert moved > 20


@ways
@every
def test_a_run_goes_on_where_a_task_is_alone(make, way):
    opt, model = training(make())
    opt.step(lambda: tasks(model, 0))
    opt.step(lambda: way(tasks(model, 1), "ac"))
    weight = dict(zip(opt.last_step.names, opt.last_step.weights.tolist(), strict=True))["b"]
    losses_now = dict(zip(opt.last_step.names, opt.last_step.losses.tolist(), strict=True))
    if make in (WEIGHTINGS["equal by name"],):
        assert weight == 5.0
    if make is WEIGHTINGS["si"]:
        assert weight == pytest.approx(1 / losses_now["b"])
    if make is WEIGHTINGS["nash"]:  # M w = 1 / w
        M = opt.last_step.gramian
        b = opt.last_step.names.index("b")
        assert weight == pytest.approx(float(M[b, b]) ** -0.5, rel=1e-6)


def test_given_values_of_one_task_in_a_step():
    for weighting, expected in ((EqualWeighting([1, 5]), 5.0), (Uncertainty(2), 0.5)):
        opt, model = training(weighting, K=2, lr=0.0 if isinstance(weighting, Uncertainty) else 0.01)
        opt.step(lambda m=model: tasks(m, 0, 2))
        opt.step(lambda m=model: {"b": tasks(m, 1, 2)["b"]})
        assert opt.last_step.names == ("b",)
        assert opt.last_step.weights.tolist() == [expected]


def test_one_task_that_never_had_company_is_the_base_optimizer_alone():
    opt, model = training(FairGrad(), K=1, lr=0.05)
    twin = mlp(1)
    plain = torch.optim.SGD(twin.parameters(), lr=0.05)
    for seed in range(3):
        opt.step(lambda seed=seed: tasks(model, seed, 1))
        plain.zero_grad()
        tasks(twin, seed, 1)["a"].backward()
        plain.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert opt.last_step.weights.tolist() == [1.0]


def test_weights_follow_the_names_when_the_mapping_changes_its_order():
    opt, model = training(EqualWeighting([1.0, 100.0]), K=2)
    opt.step(lambda: tasks(model, 0, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: dict(reversed(tasks(model, 0, 2).items())))
    assert dict(zip(opt.last_step.names, opt.last_step.weights.tolist(), strict=True)) == {"b": 100.0, "a": 1.0}


def test_unlearning_follows_the_names():
    opt, model = training(NGDiff(), K=2)
    opt.step(lambda: tasks(model, 0, 2))
    opt.step(lambda: dict(reversed(tasks(model, 0, 2).items())))
    signs = dict(zip(opt.last_step.names, opt.last_step.weights.sign().tolist(), strict=True))
    assert signs == {"a": 1.0, "b": -1.0}
    opt.step(lambda: {"b": tasks(model, 0, 2)["b"]})
    norm = float(opt.last_step.norms[0])
    assert opt.last_step.weights.tolist() == [pytest.approx(-1 / norm)]


def test_a_dwa_mean_is_over_the_batches_in_which_the_task_was_there():
    opt, model = training(DWA(steps_per_epoch=2, temperature=1.0), K=2, lr=0.0)
    epochs = [[{"a": 1.0, "b": 8.0}, {"a": 3.0}], [{"a": 1.0, "b": 2.0}, {"a": 1.0}], [{"a": 1.0, "b": 1.0}]]
    for batch in (b for epoch in epochs for b in epoch):
        opt.step(lambda batch=batch: {k: v * model.trunk[0].weight[0, 0] / model.trunk[0].weight[0, 0].item()
                                      for k, v in batch.items()})  # fmt: skip
    expected = 2 * torch.softmax(torch.tensor([1.0 / 2.0, 2.0 / 8.0], dtype=torch.float64), 0)
    torch.testing.assert_close(opt.last_step.weights.double(), expected, rtol=1e-6, atol=0)


def test_new_tasks_join():
    for make in (
        FAMO,
        lambda: DWA(1),
        lambda: Uncertainty(3),
        FairGrad,
        lambda: EqualWeighting({"a": 1, "b": 2, "c": 3}),
    ):
        opt, model = training(make())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.step(lambda m=model: {k: v for k, v in tasks(m, 0).items() if k != "b"})
            opt.step(lambda m=model: tasks(m, 1))
        assert opt.last_step.names == ("a", "b", "c")
        assert opt.progress.names == ["a", "c", "b"]
        assert torch.isfinite(opt.last_step.weights).all()


@pytest.mark.parametrize("weighting", [EqualWeighting([1, 2, 3]), FAMO(min_losses=(0.0, 0.0, 0.0))])
def test_settings_by_position_need_to_know_the_order(weighting):
    opt, model = training(weighting)
    with pytest.raises(ValueError, match=r"expected one for each of the 2 tasks .*by name"):
        opt.step(lambda: {k: v for k, v in tasks(model, 0).items() if k != "a"})


def test_weights_by_name_say_what_is_missing():
    opt, model = training(EqualWeighting({"a": 1.0, "b": 5.0}))
    with pytest.raises(ValueError, match=r"got none for \['c'\]; there are weights for \['a', 'b'\]"):
        opt.step(lambda: tasks(model, 0))
    with pytest.raises(ValueError, match="weights by task name"):
        EqualWeighting({"a": 1.0})(torch.eye(1))
    for bad in ({"a": -1.0}, {"a": "1"}, {}, [float("nan")], "ab", 3, [True]):
        with pytest.raises(ValueError, match="weights: expected"):
            EqualWeighting(bad)


def test_a_task_joins_between_two_solves():
    # every=3 reuses weights in the steps between; a task that has none yet makes its step a solve.
    opt, model = training(FairGrad(), every=3)
    opt.step(lambda: {k: v for k, v in tasks(model, 0).items() if k != "b"})
    opt.step(lambda: {"c": tasks(model, 1)["c"]})
    assert opt.last_step.gramian is None
    opt.step(lambda: tasks(model, 2))
    assert opt.last_step.gramian is not None
    opt.step(lambda: tasks(model, 3))
    opt.step(lambda: {k: v for k, v in tasks(model, 4).items() if k != "a"})
    weights = opt.progress.weights
    assert opt.last_step.gramian is None
    assert opt.last_step.weights.tolist() == [weights["b"], weights["c"]]
    expected = sum(weights[k] * v for k, v in tasks(model, 5).items() if k != "b")
    grads = torch.autograd.grad(expected, list(model.trunk.parameters()))
    opt.base.param_groups[0]["lr"] = 0.0
    opt.step(lambda: {k: v for k, v in tasks(model, 5).items() if k != "b"})
    for p, g in zip(model.trunk.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("make", [FAMO, ScaleInvariant, lambda: Uncertainty(2)])
def test_a_negative_loss_is_refused_before_anything_moves(make):
    opt, model = training(make(), K=2)
    opt.step(lambda: tasks(model, 0, 2))
    before = copy.deepcopy((model.state_dict(), opt.progress.weighting, opt.progress.step))
    with pytest.raises(ValueError, match=r"expected numbers >= 0, got -.* for task 'b'"):
        opt.step(lambda: {"a": tasks(model, 1, 2)["a"], "b": -tasks(model, 1, 2)["b"]})
    assert str(before) == str((model.state_dict(), opt.progress.weighting, opt.progress.step))
    opt.step(lambda: tasks(model, 1, 2))
    assert opt.progress.step == 2


def test_a_loss_that_falls_below_its_bound_in_the_update_is_refused_in_the_coming_step():
    # The update takes the loss below the bound: that step has been counted, and the next one moves nothing.
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    model = torch.nn.ParameterList([weight])
    opt = COST(torch.optim.SGD([weight], lr=2.0), model, shared=[weight], weighting=FAMO(), teleporter=None)
    opt.step(lambda: {"a": weight[0] * 1.0, "b": weight.square().sum()})
    assert weight[0] < 0
    assert opt.progress.step == 1
    before = weight.detach().clone()
    with pytest.raises(ValueError, match=r"after the last update, got -.* for task 'a'"):
        opt.step(lambda: {"a": weight[0] + 10.0, "b": weight.square().sum()})
    assert torch.equal(weight, before)
    assert opt.progress.step == 1


def test_a_detached_task_still_trains_its_head_under_weighted_heads():
    # Its shared gradient is zero, but it is there: only a loss of zero, or without a graph, makes a task absent.
    opt, model = training(FairGrad(), heads="weighted")
    x, ys = data(3)

    def closure():
        z = model.trunk(x)
        z = [z, z.detach(), z]
        return {n: F.mse_loss(h(z[k]), ys[k]) for k, (n, h) in enumerate(zip("abc", model.heads, strict=True))}

    opt.step(closure)
    assert opt.last_step.weights[1] > 0
    assert model.heads[1].weight.grad.abs().max() > 0


def test_a_checkpoint_carries_the_tasks_that_are_absent_just_then():
    def run(stop):
        opt, model = training(FAMO(), base=torch.optim.Adam)
        for seed in range(8):
            if seed == stop:
                state, weights = opt.state_dict(), copy.deepcopy(model.state_dict())
                opt, model = training(FAMO(), base=torch.optim.Adam)
                model.load_state_dict(weights)
                opt.load_state_dict(state)
            out = "abc"[seed % 3] if seed else ""
            opt.step(lambda out=out, seed=seed, model=model: WAYS["missing"](tasks(model, seed), out))
        return model

    for p, q in zip(run(None).parameters(), run(4).parameters(), strict=True):
        assert torch.equal(p, q)


def test_two_losses_of_one_name_are_refused():
    opt, model = training(FairGrad())
    with pytest.raises(ValueError, match="two tasks of the same name"):
        opt.step(lambda: dict(zip([1, "1", 2], tasks(model, 0).values(), strict=True)))


def test_a_part_of_the_trunk_that_shared_forgets_is_named_once():
    model = mlp(3)
    opt = COST(torch.optim.SGD(model.parameters(), lr=0.01), model, shared=model.trunk[0], teleporter=None)
    with pytest.warns(
        UserWarning, match=r"shared: several tasks reach 2 parameters .*trunk.2.weight, trunk.2.bias"
    ) as caught:
        opt.step(lambda: tasks(model, 0))
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: tasks(model, 1))
    whole = COST(torch.optim.SGD(model.parameters(), lr=0.01), model, shared=model.trunk, teleporter=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.step(lambda: tasks(model, 0))


def test_old_states_by_position_are_read_by_name():
    old = {"logits": torch.tensor([0.1, 0.2], dtype=torch.float64), "mean": torch.zeros(2), "square": torch.ones(2),
           "steps": 3, "losses": None}  # fmt: skip
    inputs = cost_mtl.base.WeightingInputs(
        torch.eye(1), torch.ones(1), torch.eye(1), 3, names=("b",), known=("a", "b"), named=True
    )
    tasks_now = FAMO().weigh(inputs, FAMO().read_state(old, ["a", "b"])).state["tasks"]
    assert tasks_now["a"] == {"logit": pytest.approx(0.1), "mean": 0.0, "square": 1.0, "steps": 3}
    assert tasks_now["b"]["logit"] == pytest.approx(0.2)
    old = {
        "epoch": 1,
        "total": torch.tensor([3.0, 4.0]),
        "count": 2,
        "last": torch.tensor([1.0, 2.0]),
        "before_last": None,
    }
    state = DWA(2).weigh(inputs, DWA(2).read_state(old, ["a", "b"])).state
    assert state["total"] == {"a": 3.0, "b": 5.0}
    assert state["count"] == {"a": 2, "b": 3}
    assert state["last"] == {"a": 1.0, "b": 2.0}

"""COST is a ``torch.optim.Optimizer``: whatever people do with one goes on working, with every base optimizer.

A new base optimizer: one row in the table in ``tests/optimizer/bases.py``.
"""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

import cost_mtl
from cost_mtl import COST, EqualWeighting
from cost_mtl._wrapper import OptimizerWrapper
from tests.nets import losses
from tests.optimizer.bases import BASES, batches, build, matrices, net, same, same_parameters, train, train_plainly

EVERY_BASE = pytest.mark.parametrize("name", BASES)


# ------------------------------------------------------------------------------------ the update itself


@EVERY_BASE
def test_with_one_task_it_is_the_base_optimizer_bit_for_bit(name):
    model, plain = net(1), net(1)
    optimizer = build(name, model, max_norm=1e-3)  # clips the combined shared gradient, and nothing is combined here
    base = BASES[name](matrices(name, plain.parameters()))
    train(optimizer, model, 4)
    train_plainly(base, plain, 4)
    assert same_parameters(model, plain)
    assert not same_parameters(model, net(1))
    assert same(
        [optimizer.state[p] for p in matrices(name, model.parameters())],
        [base.state[p] for p in matrices(name, plain.parameters())],
    )


@EVERY_BASE
def test_equal_weights_are_the_sum_of_the_losses(name):
    model, plain = net(3, torch.float64), net(3, torch.float64)
    train(build(name, model), model, 4)
    train_plainly(BASES[name](matrices(name, plain.parameters())), plain, 4)
    close = {"rtol": 1e-2, "atol": 1e-4} if name == "Muon" else {"rtol": 1e-8, "atol": 1e-10}  # Muon works in bfloat16
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, **close)


def test_the_table_names_every_base_optimizer_of_torch():
    known = {type(make([nn.Parameter(torch.zeros(2, 2))])) for make in BASES.values()}
    offered = {c for c in vars(optim).values() if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    assert offered - known == {optim.Optimizer, optim.LBFGS, optim.SparseAdam}  # refused; sparse gradients only


def test_torchs_own_settings_of_every_optimizer_with_one_task_bit_for_bit():
    common = pytest.importorskip("torch.testing._internal.common_optimizers", reason="needs the package expecttest")
    tried = 0
    for info in common.optim_db:
        if info.optim_cls in (optim.LBFGS, optim.SparseAdam):
            continue
        for settings in info.optim_inputs_func(device="cpu"):
            model, plain = net(1), net(1)
            name = info.optim_cls.__name__
            base = info.optim_cls(matrices(name, model.parameters()), **copy.deepcopy(settings.kwargs))
            train(COST(base, model, teleporter=None), model, 2)
            train_plainly(info.optim_cls(matrices(name, plain.parameters()), **settings.kwargs), plain, 2)
            assert same_parameters(model, plain), (name, settings.desc)
            tried += 1
    assert tried > 60


def test_two_optimizers_side_by_side():
    """Muon for the trunk's matrices inside of COST, AdamW for everything else beside it."""

    def rest(model):
        return [p for p in model.parameters() if p.dim() != 2 or p.shape[0] == 1]

    def hidden(model):
        return [p for p in model.trunk.parameters() if p.dim() == 2]

    model, plain = net(2, torch.float64), net(2, torch.float64)
    with pytest.warns(UserWarning, match="in no param group of the base"):
        optimizer = COST(optim.Muon(hidden(model)), model, shared=model.trunk, weighting=EqualWeighting())
    beside = optim.AdamW(rest(model), lr=0.01)
    muon, adamw = optim.Muon(hidden(plain)), optim.AdamW(rest(plain), lr=0.01)
    for x, ys in batches(4, 2, torch.float64):
        optimizer.step(lambda x, ys: losses(model, x, ys), x, ys)
        beside.step()
        sum(losses(plain, x, ys)).backward()
        muon.step()
        adamw.step()
        plain.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-4)


# ------------------------------------------------------------------------------------ hooks, copies, groups


@EVERY_BASE
def test_step_hooks_fire_once_and_see_the_final_gradient(name):
    model = net()
    optimizer = build(name, model, max_norm=0.01)
    calls = []
    weight = model.trunk[0].weight

    def norm(*_):
        trunk = matrices(name, model.trunk.parameters())
        calls.append(("base pre", float(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in trunk])))))

    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append(("pre", o is optimizer)))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(("post", o is optimizer)))
    optimizer.base.register_step_pre_hook(norm)
    optimizer.base.register_step_post_hook(lambda o, *_: calls.append(("base post", weight.grad is not None)))
    train(optimizer, model, 1)
    assert [c[0] for c in calls] == ["pre", "base pre", "base post", "post"]
    assert calls[0][1]
    assert calls[3][1]
    assert 0 < calls[1][1] <= 0.01 * (1 + 1e-5)


@EVERY_BASE
def test_deepcopy_and_pickle_give_an_independent_pair_that_goes_on_alike(name):
    model = net()
    optimizer = build(name, model, weighting=cost_mtl.FairGrad(2.0))
    optimizer.register_step_post_hook(lambda *_: None)  # hooks are local functions, and stay behind
    train(optimizer, model, 2)
    pairs = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(optimizer, model, 2, start=2)
    for other, copied in pairs:
        assert copied.base is not optimizer.base
        assert {id(p) for g in copied.param_groups for p in g["params"]} <= {id(p) for p in other.parameters()}
        train(copied, other, 2, start=2)
        assert same_parameters(other, model)
        assert same(copied.state_dict(), optimizer.state_dict())


@EVERY_BASE
def test_a_checkpoint_goes_on_bit_for_bit(name):
    model = net()
    optimizer = build(name, model, weighting=cost_mtl.NashMTL())
    train(optimizer, model, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(optimizer, model, 2, start=2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = net(seed=7)
    resumed = build(name, fresh, weighting=cost_mtl.NashMTL())
    fresh.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(resumed, fresh, 2, start=2)
    assert same_parameters(fresh, model)
    assert same(resumed.state_dict(), optimizer.state_dict())


@EVERY_BASE
def test_checkpoints_are_exchanged_with_the_plain_optimizer(name):
    model, plain = net(1), net(1)
    optimizer, base = build(name, model), build(name, plain).base
    train(optimizer, model, 2)
    train_plainly(base, plain, 2)
    theirs, ours = copy.deepcopy(base.state_dict()), copy.deepcopy(optimizer.state_dict())
    base.load_state_dict(ours)
    optimizer.load_state_dict(theirs)
    train(optimizer, model, 2)
    train_plainly(base, plain, 2)
    assert same_parameters(model, plain)
    assert optimizer.progress.step == 2  # a plain checkpoint knows nothing of COST's count


@EVERY_BASE
def test_a_group_added_later_trains(name):
    model = net()
    base = BASES[name](matrices(name, model.trunk.parameters()))
    optimizer = COST(base, model, shared=matrices(name, model.trunk.parameters()), weighting=EqualWeighting())
    before = model.heads[0].weight.detach().clone()
    train(optimizer, model, 1)
    assert torch.equal(model.heads[0].weight, before)
    optimizer.add_param_group({"params": matrices(name, model.heads.parameters())})
    train(optimizer, model, 2)
    assert not torch.equal(model.heads[0].weight, before)


# Rprop's lr is the size of its first step only; torch's own moves at lr 0, too.
@pytest.mark.parametrize("name", [name for name in BASES if name != "Rprop"])
@pytest.mark.parametrize("turned", [False, True])
def test_groups_keep_their_learning_rates_in_any_order(name, turned):
    """Learning rate 0 for the trunk: it stays, the heads move."""
    model = net()
    start = copy.deepcopy(model)
    groups = [
        {"params": matrices(name, model.trunk.parameters()), "lr": 0.0, "weight_decay": 0.0},
        {"params": matrices(name, model.heads.parameters())},
    ]
    base = BASES[name](groups[::-1] if turned else groups)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="shared: .* parameters are in no param group")
        optimizer = COST(base, model, shared=model.trunk, teleporter=None)
    train(optimizer, model, 2)
    assert same_parameters(model.trunk, start.trunk)
    assert all(not torch.equal(a.weight, b.weight) for a, b in zip(model.heads, start.heads, strict=True))


# ------------------------------------------------------------------------------------ being an Optimizer


def test_it_has_every_attribute_that_torch_gives_an_optimizer():
    """It does not call ``Optimizer.__init__`` (that would make a second state), so pin what that sets up."""
    model = net()
    optimizer = build("Adam", model)
    assert isinstance(optimizer, optim.Optimizer)
    theirs = vars(copy.deepcopy(optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)))
    missing = [n for n in theirs if not hasattr(optimizer, n)]
    assert missing == []
    assert "Adam" in repr(optimizer)


def test_state_dict_hooks_fire_as_in_torch():
    model = net()
    optimizer = build("SGD momentum", model)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append("save post") or state | {"more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append(("load pre", state.pop("more"))))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("load post"))
    state = optimizer.state_dict()
    assert state["more"] == 1
    optimizer.load_state_dict(state)
    assert calls == ["save pre", "save post", ("load pre", 1), "load post"]
    assert "more" in state  # the caller's dict is left alone


def test_zero_grad_is_the_bases():
    model = net()
    optimizer = build("SGD", model)
    train(optimizer, model, 1)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("base", "error", "words"),
    [
        (optim.SGD, TypeError, "the class SGD"),
        (lambda model: optim.LBFGS(model.parameters()), ValueError, "LBFGS"),
        (lambda model: build("SGD", model), ValueError, "already"),
        (lambda model: schedulers.StepLR(optim.SGD(model.parameters()), 1), TypeError, "StepLR"),
    ],
)
def test_what_cannot_be_a_base_is_refused(base, error, words):
    model = net()
    with pytest.raises(error, match=words):
        COST(base if isinstance(base, type) else base(model), model)


def test_the_base_never_learns_that_it_is_wrapped():
    """No attribute of the base is replaced, and no method is."""
    model = net()
    base = optim.AdamW(model.parameters())
    before = dict(vars(base))
    optimizer = COST(base, model, shared=model.trunk, teleporter=None)
    train(optimizer, model, 2)
    assert {k: id(v) for k, v in vars(base).items()} == {k: id(v) for k, v in before.items()}
    assert OptimizerWrapper.add_param_group is not optim.Optimizer.add_param_group

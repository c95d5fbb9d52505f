"""The base optimizer's part of a checkpoint: what its next step would stop at is refused before anything is loaded."""

import copy

import pytest
import torch

import cost_mtl
from tests.nets import MultiHead, data, losses
from tests.resuming import as_bytes

BASES = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def training(base="Adam"):
    torch.manual_seed(0)
    model = MultiHead(torch.nn.Linear(6, 8), 8, 2)
    optimizer = cost_mtl.COST(BASES[base](model.parameters()), model, teleporter=None)
    x, ys = data(2, 8, seed=1, shape=(6,))

    def one_step():
        optimizer.step(lambda: losses(model, x, ys))

    one_step()
    return optimizer, one_step


@pytest.mark.parametrize("base", BASES)
def test_an_undamaged_one_is_loaded(base):
    saved = copy.deepcopy(training(base)[0].state_dict())
    other, one_step = training(base)
    other.load_state_dict(saved)
    one_step()


def setting(name, value):
    return lambda state: state["param_groups"][0].__setitem__(name, value)


def entry(name, value):
    return lambda state: state["state"][1].__setitem__(name, value)


DAMAGES = {
    "lr, a list": (setting("lr", []), "lr"),
    "lr, infinite": (setting("lr", float("inf")), "lr"),
    "lr, several": (setting("lr", torch.zeros(3)), "lr"),
    "eps, a word": (setting("eps", "x"), "eps"),
    "weight_decay, infinite": (setting("weight_decay", float("inf")), "weight_decay"),
    "betas, four": (setting("betas", (0.9, 0.999, 0.9, 0.999)), "betas"),
    "betas, NaN": (setting("betas", (torch.tensor(float("nan")), 0.999)), "betas"),
    "amsgrad, a number": (setting("amsgrad", 10), "amsgrad"),
    "amsgrad, without its state": (setting("amsgrad", True), "max_exp_avg_sq"),
    "maximize, a tensor": (setting("maximize", torch.zeros(0)), "maximize"),
    "foreach, a tensor": (setting("foreach", torch.zeros(3)), "foreach"),
    "exp_avg, None": (entry("exp_avg", None), "exp_avg"),
    "exp_avg_sq, negative": (lambda state: state["state"][1]["exp_avg_sq"].neg_(), "exp_avg_sq"),
    "exp_avg_sq, missing": (lambda state: state["state"][1].pop("exp_avg_sq"), "exp_avg_sq"),
    "step, complex": (entry("step", torch.tensor(1j)), "step"),
    "step, missing": (lambda state: state["state"][1].pop("step"), "step"),
    "numbers as names": (lambda state: state["state"].__setitem__(1, {5: 1}), "names"),
    "params, a dict": (lambda state: state["param_groups"][0]["params"].__setitem__(0, {}), "params"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_refused_whole(damage):
    optimizer, one_step = training()
    change, field = DAMAGES[damage]
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    before = as_bytes(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(ValueError, match=field):
        optimizer.load_state_dict(state)
    assert as_bytes(optimizer.state_dict()) == before
    one_step()

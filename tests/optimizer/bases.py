"""What the contract tests share: the base optimizers, and training with and without COST around them."""

import warnings
from functools import partial

import torch
from torch import optim

from cost_mtl import COST, EqualWeighting
from tests.nets import data, losses, mlp

BASES = {
    "SGD": partial(optim.SGD, lr=0.05),
    "SGD momentum": partial(optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD fused": partial(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "Adam": partial(optim.Adam, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
    "Adam fused": partial(optim.Adam, lr=0.01, fused=True),
    "AdamW": partial(optim.AdamW, lr=0.01),
    "AdamW amsgrad": partial(optim.AdamW, lr=0.01, amsgrad=True),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "AdamW foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "AdamW tensor lr": lambda params: optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "Adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.01),
    "Adadelta": partial(optim.Adadelta, lr=0.5),
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "ASGD": partial(optim.ASGD, lr=0.05, t0=2),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "Muon": partial(optim.Muon, lr=0.02),
}


def net(K=2, dtype=torch.float32, seed=0):
    return mlp(K, seed=seed, dtype=dtype)


def matrices(name, params):
    """What a base can take: Muon knows matrices only."""
    return [p for p in params if p.dim() == 2] if name == "Muon" else list(params)


def build(name, model, *, seed=0, **settings):
    """COST over a base optimizer with two param groups, trunk and heads."""
    groups = [
        {"params": matrices(name, model.trunk.parameters())},
        {"params": matrices(name, model.heads.parameters())},
    ]
    settings = {"weighting": EqualWeighting(), "teleporter": None} | settings
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="shared: .* parameters are in no param group")  # Muon's biases
        return COST(BASES[name](groups), model, shared=model.trunk, **settings)


def batches(steps, K=2, dtype=torch.float32):
    found = [data(K, seed=s) for s in range(steps)]
    return [(x.to(dtype), [y.to(dtype) for y in ys]) for x, ys in found]


def train(optimizer, model, steps, after=lambda losses: None, start=0):
    K = len(model.heads)
    for x, ys in batches(start + steps, K, next(model.parameters()).dtype)[start:]:
        after(optimizer.step(lambda x, ys: losses(model, x, ys), x, ys))


def train_plainly(base, model, steps, after=lambda losses: None):
    K = len(model.heads)
    for x, ys in batches(steps, K, next(model.parameters()).dtype):
        base.zero_grad()
        values = losses(model, x, ys)
        sum(values).backward()
        base.step()
        after(torch.stack(values).detach())


def same(a, b):
    """Two nested states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def same_parameters(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def everything(model, optimizer):
    """Parameters, buffers and optimizer state as bytes."""
    tensors = [*model.state_dict().values()]
    tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return [t.detach().clone().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def finite(model, optimizer):
    tensors = [*model.state_dict().values()]
    tensors += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    return all(bool(torch.isfinite(t).all()) for t in tensors)

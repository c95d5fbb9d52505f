"""Exact symmetries of chains of layers: theta -> f theta keeps the network's function, on all data, at any length.

A hidden unit between positively homogeneous maps (ReLU, pooling, none) may have its incoming weights and bias times s
and its outgoing weights divided by s. Behind a BatchNorm its gamma and beta take the place of the incoming weights.
With f the factor of every entry, gradients become g / f, so that the Gramian at the new point is (G / f)(G / f)^T: the
choice of s needs no evaluation beyond the gradients that are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Layer:
    """A layer of hidden units that may be scaled one by one.

    Attributes:
        units: how many.
        incoming: names of parameters whose first dimension counts the units.
        outgoing: names of parameters whose second dimension counts ``repeat`` entries for each unit, in turn.
        repeat: 25 for 5 x 5 pixels of each channel, flattened.
    """

    units: int
    incoming: tuple[str, ...]
    outgoing: tuple[str, ...]
    repeat: int = 1


HEADS = {"qm9": 11, "yeast": 14}


def layers_of(problem: str) -> tuple[Layer, ...]:
    """The chains of the benchmark's networks, given by hand. Raises KeyError for another problem."""
    if problem == "multimnist":
        heads = tuple(f"heads.{name}.weight" for name in ("left", "right", "pixels"))
        return (
            Layer(16, ("trunk.1.weight", "trunk.1.bias"), ("trunk.3.weight",)),
            Layer(32, ("trunk.4.weight", "trunk.4.bias"), ("trunk.7.weight",), repeat=25),
            Layer(64, ("trunk.7.weight", "trunk.7.bias"), heads),
        )
    heads = tuple(f"heads.{k}.weight" for k in range(HEADS[problem]))
    units = {"qm9": (128, 128, 64), "yeast": (64, 64)}[problem]
    after = [(f"trunk.{2 * k}.weight",) for k in range(1, len(units))] + [heads]
    return tuple(
        Layer(n, (f"trunk.{2 * k}.weight", f"trunk.{2 * k}.bias"), out)
        for k, (n, out) in enumerate(zip(units, after, strict=True))
    )


# ------------------------------------------------------------------------------------------------ factors


def log_factors(layers: Sequence[Layer], log_s: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """log f of every parameter that a move touches, to be broadcast to its shape.

    Args:
        log_s: of all layers' units, one after the other [n].
        shapes: of the parameters, by name.
    """
    found: dict[str, Tensor] = {}
    for layer, part in zip(layers, log_s.split([layer.units for layer in layers]), strict=True):
        for name in layer.incoming:
            rows = part.view(-1, *(1,) * (len(shapes[name]) - 1))
            found[name] = found.get(name, 0.0) + rows
        for name in layer.outgoing:
            columns = part.repeat_interleave(layer.repeat).view(1, -1, *(1,) * (len(shapes[name]) - 2))
            found[name] = found.get(name, 0.0) - columns
    return found


def flat_log_factors(layers: Sequence[Layer], log_s: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """The same as one vector [m] over ``params``, in their order; 0 where nothing is scaled."""
    found = log_factors(layers, log_s, {name: p.shape for name, p in params.items()} | _outside(layers, params))
    zero = log_s.new_zeros(())
    return torch.cat([(found.get(name, zero)).expand(p.shape).reshape(-1) for name, p in params.items()])


def _outside(layers: Sequence[Layer], params: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    # Heads are scaled with the last layer's units, but are no shared parameters: their shape does not matter here.
    return {name: torch.Size((1, 1)) for layer in layers for name in layer.outgoing if name not in params}


@torch.no_grad()
def move_(model: nn.Module, base: Optimizer, layers: Sequence[Layer], log_s: Tensor) -> None:
    """Parameters times f, in place; the optimizer's state goes along: first moments / f, second moments / f²."""
    params = dict(model.named_parameters())
    for name, log_f in log_factors(layers, log_s, {name: p.shape for name, p in params.items()}).items():
        p, f = params[name], log_f.exp().to(params[name])
        p.mul_(f)
        state = base.state.get(p, {})
        for key in ("momentum_buffer", "exp_avg"):
            if state.get(key) is not None:
                state[key].div_(f)
        if "exp_avg_sq" in state:
            state["exp_avg_sq"].div_(f * f)


# ------------------------------------------------------------------------------------------------ choices of s


def smallest_cosine(G: Tensor, log_f: Tensor) -> Tensor:
    """Mean over batches of the smallest cosine with the mean gradient, after the move [].

    Args:
        G: task gradients [B, K, m] before it.
        log_f: [m].
    """
    moved = G * (-log_f).exp()
    mean = moved.mean(dim=1, keepdim=True)
    cosines = (moved * mean).sum(-1) / (moved.norm(dim=-1) * mean.norm(dim=-1)).clamp_min(1e-30)
    return cosines.amin(dim=1).mean()


def for_cosine(
    G: Tensor, spread: Callable[[Tensor], Tensor], n: int, g: torch.Generator, *, bound: float = 2.0, steps: int = 60
) -> Tensor:
    """log s [n], |log s| <= log(bound), by Adam steps that raise :func:`smallest_cosine`, on four of the batches each.

    Args:
        G: task gradients [B, K, m] of remembered batches.
        spread: log s [n] -> log f [m].
    """
    log_s = torch.zeros(n, requires_grad=True)
    optimizer = torch.optim.Adam([log_s], lr=0.05)
    for _ in range(steps):
        rows = torch.randperm(len(G), generator=g)[:4]
        optimizer.zero_grad()
        (-smallest_cosine(G[rows], spread(log_s))).backward()
        optimizer.step()
        with torch.no_grad():
            log_s.clamp_(-math.log(bound), math.log(bound))
    return log_s.detach()


@torch.no_grad()
def for_balance(layers: Sequence[Layer], params: Mapping[str, Tensor], sweeps: int = 20) -> Tensor:
    """log s [n] with which every unit's incoming weights are as long as its outgoing ones: the least sum of squares of
    all entries that are scaled. A unit without weights on one side is left as it is."""
    log_s = torch.zeros(sum(layer.units for layer in layers))
    shapes = {name: p.shape for name, p in params.items()}
    for _ in range(sweeps):
        log_f = log_factors(layers, log_s, shapes)
        moved = {name: params[name] * log_f[name].exp() for name in log_f}
        changes = []
        for layer in layers:
            square_in = sum(moved[n].square().flatten(1).sum(1) if moved[n].dim() > 1 else moved[n].square()
                            for n in layer.incoming)  # fmt: skip
            columns = [moved[n].square().transpose(0, 1).flatten(1).sum(1) for n in layer.outgoing]
            square_out = sum(c.view(layer.units, layer.repeat).sum(1) for c in columns)
            both = (square_in > 0) & (square_out > 0)
            ratio = torch.where(both, square_out / square_in, torch.ones_like(square_in))
            changes.append(ratio.log() / 4)
        log_s = log_s + 0.5 * torch.cat(changes)  # neighbours move at once: half of the way for each keeps it stable
    return log_s


def log_norm_ratio(mean: Tensor, log_f: Tensor) -> Tensor:
    """log of ‖g / f‖ / ‖g‖ for the mean gradient g [m]."""
    return ((mean * (-log_f).exp()).norm() / mean.norm()).log()


def random_like(log_s: Tensor, mean: Tensor, spread: Callable[[Tensor], Tensor], g: torch.Generator) -> Tensor:
    """The placebo: a random log s [n] with exactly the root mean square of ``log_s`` and exactly its change of the
    mean gradient's norm.

    A shuffle of ``log_s`` over all units with random signs, which then follows the gradient of that norm on the sphere,
    up or down, until the change is right: a random move that is turned no further than it has to be.

    Raises:
        RuntimeError: the change is not reached (of ten shuffles).
    """
    length, wanted = float(log_s.norm()), float(log_norm_ratio(mean, spread(log_s)))
    if not length > 0:
        return torch.zeros_like(log_s)
    for _ in range(10):
        order = torch.randperm(len(log_s), generator=g)
        start = log_s[order] * (2.0 * torch.randint(2, (len(log_s),), generator=g) - 1.0)
        found = _turned_to(wanted, start, lambda at: log_norm_ratio(mean, spread(at)))
        if found is not None:
            return found
    raise RuntimeError(f"log_s: no random move of its size changes the gradient's norm by {wanted:+.3g} (log)")


def _turned_to(wanted: float, start: Tensor, change: Callable[[Tensor], Tensor], *, steps: int = 400) -> Tensor | None:
    """``start`` turned along the gradient of ``change``, by 0.02 rad a step, until that is ``wanted``; None: it never
    is."""
    up = wanted > float(change(start))
    for _ in range(steps):
        at = start.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(change(at), at)
        slope = slope - (slope @ start) / (start @ start) * start
        if not float(slope.norm()) > 0:
            return None
        side = (slope if up else -slope) * start.norm() / slope.norm()

        def turned(angle: float, start: Tensor = start, side: Tensor = side) -> Tensor:
            return math.cos(angle) * start + math.sin(angle) * side

        low, high = 0.0, 0.02
        if (float(change(turned(high))) >= wanted) == up:
            for _ in range(40):
                middle = (low + high) / 2
                short = (float(change(turned(middle))) < wanted) == up
                low, high = (middle, high) if short else (low, middle)
            return turned(high)
        start = turned(high)
    return None

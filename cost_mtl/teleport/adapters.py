"""PEFT adapters as coordinates of a move: put in, moved, merged, taken out, without a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl.base import TeleportProblem
from cost_mtl.gradients import Layout
from cost_mtl.teleport.layers import Layer
from cost_mtl.teleport.replay import RandomStreams

ADAPTER = "teleport"
IDENTITY_TOLERANCE = 1e-3
"""Largest relative difference between a layer's output with and without its fresh adapter."""


class AdapterSpace:
    """phi = the adapters' trainable parameters, relative to their initial values (a :class:`level_set.Space`).

    PEFT is given a tree of modules that holds the target layers alone, under their names in the model; its adapters
    are then put in the layers' places in the model. So it neither sees nor changes (flags, modes, attributes) any
    other module, and a layer that is used under several names gets one adapter in all of them.
    """

    def __init__(self, problem: TeleportProblem, layers: Sequence[Layer], tuner: Any) -> None:
        self.problem = problem
        self.layers = list(layers)
        self.tuner = tuner
        self.theta = [p.detach().clone() for p in problem.params]
        self.variables = [p for n, p in tuner.model.named_parameters() if tuner.prefix in n and p.requires_grad]
        self.layout = Layout(self.variables)
        self.origin = self.layout.flatten(self.variables)

    def gradients(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.problem.evaluate_gradients(batch, wrt=self.variables)

    def gradients_at(self, delta: Tensor, batch: int, tasks: list[int]) -> Tensor:
        with self.problem.at(delta):
            _, rows = self.problem.evaluate_gradients(batch, wrt=self.variables, tasks=[tasks])
        return rows[0]

    def metric(self, J: Tensor) -> Tensor | None:
        """From the scale of the task gradients in these coordinates: 1 / root mean square over the rows of J."""
        unit = J / torch.linalg.vector_norm(J, dim=1, keepdim=True).clamp_min(1e-30)
        scale = unit.square().mean(dim=0).sqrt()
        positive = scale[scale > 0]
        if positive.numel() == 0:
            return None
        metric: Tensor = 1 / (scale / positive.median()).clamp(0.3, 10.0)
        return metric

    def place(self, phi: Tensor) -> None:
        with torch.no_grad():
            for v, start, change in zip(
                self.variables, self.layout.views(self.origin), self.layout.views(phi), strict=True
            ):
                v.copy_(start + change)

    def length(self) -> float:
        """||Delta theta||, from the adapters' own delta weights (float32) where the method is additive."""
        squares = 0.0
        for layer in self.layers:
            wrapped = self.tuner.model.get_submodule(layer.name)
            if not hasattr(wrapped, "get_delta_weight") or self.tuner.prefix in ("oft_", "boft_", "hra_"):
                return float(torch.linalg.vector_norm(self.delta(), dtype=torch.float64))
            with torch.no_grad():
                squares += float(wrapped.get_delta_weight(ADAPTER).double().square().sum())
        return float(squares**0.5)

    def delta(self) -> Tensor:
        """Merge, look, and take the merge back bit for bit."""
        params = self.problem.params
        with torch.no_grad():
            storages = [p.data for p in params]
            self.tuner.merge_adapter()
            delta = Layout(params).flatten([p.detach().float() - t.float() for p, t in zip(params, self.theta)])  # noqa: B905
            self.tuner.unmerge_adapter()
            for p, storage, start in zip(params, storages, self.theta, strict=True):
                p.data = storage
                p.copy_(start)
        return delta


@contextmanager
def adapters(problem: TeleportProblem, layers: Sequence[Layer], config: Any) -> Iterator[AdapterSpace]:
    """Adapters on the given layers, seeded by ``problem.generator``; whatever happens, the model comes out with the
    modules, flags and storages it had."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config = copy.deepcopy(config)
    config.target_modules = [layer.name for layer in layers]
    tree = _tree(layers)
    frozen = [(p, p.requires_grad, p.data) for layer in layers for p in layer.module.parameters()]
    streams = RandomStreams.capture({p.device for p, _, _ in frozen})
    try:
        torch.manual_seed(int(torch.randint(2**31, (), generator=problem.generator)))
        tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](tree, config, ADAPTER)
        for layer in layers:
            wrapped = tree.get_submodule(layer.name)
            wrapped.train(layer.module.training)
            for parent, child in layer.places:
                parent._modules[child] = wrapped
        yield AdapterSpace(problem, layers, tuner)
    finally:
        for layer in layers:
            for parent, child in layer.places:
                parent._modules[child] = layer.module
        for p, flag, storage in frozen:
            p.requires_grad_(flag)
            p.data = storage
        streams.restore()


def _tree(layers: Sequence[Layer]) -> nn.Module:
    root = nn.Module()
    for layer in layers:
        *path, leaf = layer.name.split(".")
        node = root
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        node._modules[leaf] = layer.module
    return root


def unfit_layers(space: AdapterSpace) -> dict[str, str]:
    """Layers whose fresh adapter is not the identity on the current batch's real activations, or is never called.

    PEFT's OFT, for one, is far from the identity on convolutions with a kernel larger than 1.
    """
    reasons: dict[str, str] = {}
    called: set[str] = set()
    handles = []
    for layer in space.layers:
        wrapped = space.tuner.model.get_submodule(layer.name)

        def check(module: Any, args: Any, out: Tensor, name: str = layer.name, base: nn.Module = layer.module) -> None:
            called.add(name)
            with torch.no_grad():
                plain = type(base).forward(base, *args)
                error = (out - plain).abs().max() / plain.abs().max().clamp_min(1e-30)
            if not float(error) <= IDENTITY_TOLERANCE * (10 if out.dtype.itemsize < 4 else 1):
                reasons[name] = f"its fresh adapter is not the identity (output differs by {float(error):.1e})"

        handles.append(wrapped.register_forward_hook(check))
    try:
        space.problem.evaluate(0)
    finally:
        for handle in handles:
            handle.remove()
    for layer in space.layers:
        if layer.name not in called:
            reasons[layer.name] = "its forward is not called"
    return reasons

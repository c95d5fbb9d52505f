"""PEFT adapters as coordinates of a move: put in, moved, merged, taken out, without a trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cost_mtl._torch.rng import RandomStreams
from cost_mtl._torch.undo import undoing
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.reductions import row_norms
from cost_mtl.teleport.base import TeleportProblem
from cost_mtl.teleport.coordinates.layers import Layer

ADAPTER = "teleport"
IDENTITY_TOLERANCE = 1e-3
"""Largest relative difference between a layer's output with and without its fresh adapter."""


class AdapterCoordinates:
    """phi = the adapters' trainable parameters, relative to their initial values (a :class:`level_set.Coordinates`).

    PEFT is given a tree of modules that holds the target layers alone, under their names in the model; its adapters
    are then put in the layers' places in the model. So it neither sees nor changes (flags, modes, attributes) any
    other module, and a layer that is used under several names gets one adapter in all of them.
    """

    def __init__(self, problem: TeleportProblem, layers: Sequence[Layer], tuner: Any, *, plain_lora: bool) -> None:
        self.problem = problem
        self.plain_lora = plain_lora
        self.layers = list(layers)
        self.tuner = tuner
        self.theta = [p.detach().clone() for p in problem.params]
        self.fresh = True
        """Whether the model stands at phi = 0."""
        self.variables = [p for n, p in tuner.model.named_parameters() if tuner.prefix in n and p.requires_grad]
        self.layout = Layout(self.variables)
        self.origin = self.layout.flatten(self.variables)

    def gradients(self, batch: int) -> tuple[Tensor, Tensor]:
        known = self.problem.known_gradients(batch)  # taken even where it is of no use: it is as large as G
        if known is not None and self.plain_lora and self.fresh:
            return known[0], self._from_dense(known[1])
        return self.problem.evaluate_gradients(batch, wrt=self.variables)

    def _from_dense(self, G: Tensor) -> Tensor:
        """Gradients [K, n] at a fresh LoRA adapter (B = 0) from those of the weights, without an evaluation:
        W + s B A gives dL/dB = s (dL/dW) A^T and dL/dA = 0."""
        source = Layout(self.problem.params)
        J = torch.zeros(len(G), self.layout.numel, dtype=self.layout.dtype, device=self.layout.device)
        for layer in self.layers:
            wrapped = self.tuner.model.get_submodule(layer.name)
            A, B = wrapped.lora_A[ADAPTER].weight, wrapped.lora_B[ADAPTER].weight
            k, j = source.index[id(layer.module.weight)], self.layout.index[id(B)]
            for row, target in zip(G, J, strict=True):
                dW = source.view(row, k).flatten(1)
                dB = wrapped.scaling[ADAPTER] * (dW @ A.detach().to(dW.dtype).flatten(1).T)
                self.layout.view(target, j).copy_(dB.view_as(B))
        return J

    def task_gradients(self, batch: int) -> Tensor:
        # W enters as W + Delta W (times a rotation, for the orthogonal methods): its gradient is the merged weight's.
        if batch == 0 and self.fresh:
            return self.problem.gradients
        with self._weights_trainable():
            return self.problem.evaluate_gradients(batch)[1]

    def gradients_at(self, delta: Tensor, batch: int, tasks: Sequence[Sequence[int]]) -> Tensor:
        with self.problem.at(delta):
            return self.problem.evaluate_gradients(batch, wrt=self.variables, tasks=tasks)[1]

    def losses_at(self, delta: Tensor, batch: int) -> Tensor:
        with self.problem.at(delta):
            return self.problem.evaluate(batch)

    def curvature(self, directions: Tensor, tasks: Sequence[Sequence[int]], batch: int) -> Tensor:
        with self._weights_trainable():
            return self.problem.evaluate_curvature(directions, tasks, batch, wrt=self.variables)

    @contextmanager
    def _weights_trainable(self) -> Iterator[None]:
        """PEFT has frozen the weights below its adapters."""
        frozen = [p for p in self.problem.params if not p.requires_grad]

        def freeze() -> None:
            for p in frozen:
                p.requires_grad_(False)

        with undoing(freeze):
            for p in frozen:
                p.requires_grad_(True)
            yield

    def metric(self, J: Tensor) -> Tensor | None:
        """From the scale of the task gradients in these coordinates: 1 / root mean square over the rows of J."""
        unit = J / row_norms(J).clamp_min(1e-30)
        scale = unit.square().mean(dim=0).sqrt()
        positive = scale[scale > 0]
        if positive.numel() == 0:
            return None
        metric: Tensor = 1 / (scale / positive.median()).clamp(0.3, 10.0)
        return metric

    def place(self, phi: Tensor) -> None:
        self.fresh = not bool((phi != 0).any())
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
        storages = [p.data for p in params]

        def back() -> None:
            with torch.no_grad():
                for p, storage, start in zip(params, storages, self.theta, strict=True):
                    p.data = storage
                    p.copy_(start)

        with torch.no_grad(), undoing(back):
            self.tuner.merge_adapter()
            delta = Layout(params).flatten([p.detach().float() - t.float() for p, t in zip(params, self.theta)])  # noqa: B905
            self.tuner.unmerge_adapter()
        return delta


@contextmanager
def adapters(
    problem: TeleportProblem, layers: Sequence[Layer], config: Any, *, plain_lora: bool = False
) -> Iterator[AdapterCoordinates]:
    """Adapters on the given layers, seeded by ``problem.generator``; whatever happens, the model comes out with the
    modules, flags and storages it had.

    Args:
        plain_lora: ``config`` is LoRA as it comes, W + s B A with B = 0 at first.
    """
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    config = copy.deepcopy(config)
    config.target_modules = [layer.name for layer in layers]
    tree = _tree(layers)
    frozen = [(p, p.requires_grad, p.data) for layer in layers for p in layer.module.parameters()]
    streams = RandomStreams.capture({p.device for p, _, _ in frozen})

    def take_out() -> None:
        for layer in layers:
            for parent, child in layer.places:
                parent._modules[child] = layer.module
        for p, flag, storage in frozen:
            p.requires_grad_(flag)
            p.data = storage
        streams.restore()

    with undoing(take_out):
        torch.manual_seed(int(torch.randint(2**31, (), generator=problem.generator)))
        tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type](tree, config, ADAPTER)
        for layer in layers:
            wrapped = tree.get_submodule(layer.name)
            training = layer.module.training
            wrapped.eval()  # an adapter's own dropout (LoHa's and LoKr's, even at rate 0) would shift the model's masks
            layer.module.train(training)
            for parent, child in layer.places:
                parent._modules[child] = wrapped
        yield AdapterCoordinates(problem, layers, tuner, plain_lora=plain_lora)


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


def refused_layers(problem: TeleportProblem, layers: Sequence[Layer], config: Any) -> dict[str, str]:
    """Layers that PEFT itself refuses (sizes that its blocks do not divide, say), tried one at a time."""
    reasons: dict[str, str] = {}
    for layer in layers:
        try:
            with adapters(problem, [layer], config):
                pass
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            reasons[layer.name] = f"PEFT refuses it: {error}"
    return reasons


def unfit_layers(problem: TeleportProblem, layers: Sequence[Layer], config: Any) -> dict[str, str]:
    """Layers whose fresh adapter is not the identity on the current batch's real activations, or is never called.

    PEFT's OFT, for one, is far from the identity on convolutions with a kernel larger than 1.
    """
    reasons = {layer.name: "its forward is not called" for layer in layers}
    with adapters(problem, layers, config) as coordinates:
        # The hooks are on the adapters, and go with them: nothing to be undone.
        for layer in layers:
            coordinates.tuner.model.get_submodule(layer.name).register_forward_hook(_identity_check(layer, reasons))
        problem.evaluate(0)
    return {name: reason for name, reason in reasons.items() if reason}


def _identity_check(layer: Layer, reasons: dict[str, str]) -> Any:
    def check(module: Any, args: Any, out: Tensor) -> None:
        with torch.no_grad():
            plain = type(layer.module).forward(layer.module, *args)
            error = float((out - plain).abs().max() / plain.abs().max().clamp_min(1e-30))
        if reasons[layer.name] == "its forward is not called":
            reasons[layer.name] = ""
        if not error <= IDENTITY_TOLERANCE * (10 if out.dtype.itemsize < 4 else 1):
            reasons[layer.name] = f"its fresh adapter is not the identity (output differs by {error:.1e})"

    return check

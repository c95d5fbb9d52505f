"""Objectives that are functions of the task gradients alone, phi(g_1, ..., g_K).

Such a phi is described by the rows a_j = d phi / d g_j. Each is a combination of the task gradients,
a_j = sum_k A[j, k] g_k, so the whole objective is one coefficient matrix A [K, K] made from the Gramian. Its gradient
in the coordinates of a move is the sum of the Hessian-vector products H_j a_j.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from cost_mtl.gradients.reductions import norm
from cost_mtl.teleport.objectives.base import ObjectiveContext, Slope

Tasks = list[list[int]]
"""The tasks whose summed losses belong to each row."""

Products = Callable[[ObjectiveContext, Tensor, Tasks], tuple[Tensor, tuple[str, ...]]]
"""From rows a [R, m] and their tasks: sum_r d <a_r, g_r> / d coordinates [n], and remarks for the report."""


class FunctionOfGradients(Protocol):
    """phi, as functions of the Gramian M [K, K]."""

    def value(self, M: Tensor, /) -> float:
        """phi."""
        ...

    def coefficients(self, M: Tensor, /) -> Tensor:
        """A [K, K]."""
        ...

    def wanted(self, M: Tensor, /) -> float:
        """Rise of phi to aim for."""
        ...

    def rate(self, M: Tensor, /) -> float:
        """The objective's gain for a small rise of phi."""
        ...


def slope_of(phi: FunctionOfGradients, context: ObjectiveContext, products: Products) -> Slope:
    """The slope of phi, its Hessian-vector products found by ``products``."""
    G, M = context.task_gradients()
    groups = group_rows(phi.coefficients(M))
    notes: tuple[str, ...] = ()
    u = torch.zeros_like(context.J[0])
    if groups:
        a = torch.stack([row for row, _ in groups]).to(G.device, G.dtype) @ G
        u, notes = products(context, a, [tasks for _, tasks in groups])
    return Slope(phi.value(M), u, phi.wanted(M), notes, phi.rate(M))


def finite_differences(context: ObjectiveContext, a: Tensor, tasks: Tasks) -> tuple[Tensor, tuple[str, ...]]:
    """sum_r d <a_r, g_r> / d coordinates [n] as [grad L_r(. + eps a_r / ||a_r||) - grad L_r(.)] ||a_r|| / eps:
    the Hessian-vector products that double backward would give, from one more pass each and without it."""
    u, epsilon = torch.zeros_like(context.J[0]), context.epsilon * context.length
    for row, members in zip(a, tasks, strict=True):
        length = float(norm(row, exact=True))
        if length > 0.0:
            (moved,) = context.coordinates.gradients_at(row * (epsilon / length), context.batch, [members])
            u += (moved - context.J[members].sum(dim=0)) * (length / epsilon)
    return u, ()


def group_rows(A: Tensor) -> list[tuple[Tensor, list[int]]]:
    """Distinct non-zero rows of A with the tasks that share each: one perturbed evaluation serves a whole group
    (under the conflict objective all tasks but the worst ones share one)."""
    groups: list[tuple[Tensor, list[int]]] = []
    for j, row in enumerate(A):
        if not bool((row != 0).any()):
            continue
        for other, tasks in groups:
            if torch.equal(row, other):
                tasks.append(j)
                break
        else:
            groups.append((row, [j]))
    return groups

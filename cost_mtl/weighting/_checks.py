"""Checks of the Gramian that a weighting gets, of the weights it returns and of the numbers it is given per task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cost_mtl._validation import is_number

__all__ = ["as_tensor", "check_positive", "check_shape", "checked_weights", "host_matrix", "numbers_of_tasks"]


def check_shape(gramian: Tensor) -> None:
    """Raises unless the argument is a real floating-point tensor [K, K]."""
    if not isinstance(gramian, Tensor):
        raise TypeError(f"gramian: expected a tensor [K, K], got {type(gramian).__name__}")
    if gramian.dim() != 2 or gramian.shape[0] != gramian.shape[1] or gramian.shape[0] == 0:
        raise ValueError(f"gramian: expected a matrix [K, K] with K >= 1, got shape {list(gramian.shape)}")
    if not gramian.is_floating_point():
        raise TypeError(f"gramian: expected a floating-point dtype, got {gramian.dtype}")


def host_matrix(gramian: Tensor) -> NDArray[np.float64]:
    """The checked Gramian as a symmetric float64 array on the host.

    A task whose squared norm is so small that the dtype has lost its digits (below about 1e-43 in float32) counts as
    one without gradient: its row and column are 0.

    Raises:
        TypeError, ValueError: the argument is no floating-point tensor [K, K]; an entry is NaN or infinite (the tasks
            are named); or the matrix is no Gramian: not symmetric, a negative diagonal entry, or |M_ij| > sqrt(M_ii
            M_jj) beyond rounding.
    """
    check_shape(gramian)
    M: NDArray[np.float64] = gramian.detach().to("cpu", torch.float64).numpy()
    diagonal = M.diagonal()
    if not np.isfinite(M).all():
        bad = np.flatnonzero(~np.isfinite(diagonal))
        tasks = bad if len(bad) else np.flatnonzero(~np.isfinite(M).all(axis=1))
        raise ValueError(f"gramian: expected finite entries, got NaN or inf: not finite are the gradients of task(s) "
                         f"{tasks.tolist()}")  # fmt: skip
    if diagonal.min() < 0:
        i = int(diagonal.argmin())
        raise ValueError(f"gramian: expected squared norms >= 0, got the diagonal entry of task {i}: {diagonal[i]:g}")
    kind = torch.finfo(gramian.dtype)
    # Of a square that underflows, the entries beside it tell more than is left of it.
    norms = np.sqrt(diagonal + kind.tiny)
    bound = norms[:, None] * norms
    slack = max(1e-4, 64 * kind.eps) * bound
    asymmetry = np.abs(M - M.T)
    excess = np.abs(M) - bound
    if (asymmetry > slack).any():
        i, j = divmod(int((asymmetry - slack).argmax()), len(M))
        raise ValueError(f"gramian: expected a symmetric matrix, got one that is not symmetric: M[{i}, {j}] = "
                         f"{M[i, j]:g}, M[{j}, {i}] = {M[j, i]:g}")  # fmt: skip
    if (excess > slack).any():
        i, j = divmod(int((excess - slack).argmax()), len(M))
        raise ValueError(
            f"gramian: expected |M[{i}, {j}]| <= sqrt(M[{i}, {i}] M[{j}, {j}]), got {abs(M[i, j]):g}, which exceeds "
            f"the product of norms {bound[i, j]:g}"
        )
    M = np.asarray((M + M.T) / 2)
    lost = diagonal < 100 * kind.tiny * kind.eps
    if lost.any():
        M[lost, :] = M[:, lost] = 0
    return M


def checked_weights(weights: Any, gramian: Tensor, name: str) -> Tensor:
    """A detached copy of ``weights`` [K] in M's dtype and on its device. ``name`` says whose they are, in errors.

    Raises:
        TypeError: not a real tensor.
        ValueError: not of shape [K], or not finite.
    """
    if not isinstance(weights, Tensor) or weights.is_complex():
        got = "a complex tensor" if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"{name}: expected a real tensor of weights [K], got {got}")
    num_tasks = gramian.shape[0]
    if weights.shape != (num_tasks,):
        raise ValueError(f"{name}: expected weights of shape [{num_tasks}], got {list(weights.shape)}")
    weights = weights.detach()
    if not bool(torch.isfinite(weights).all()):
        bad = torch.nonzero(~torch.isfinite(weights)).flatten().tolist()
        raise ValueError(f"{name}: expected finite weights, got weights that are not finite for task(s) {bad}: "
                         f"{weights.tolist()}")  # fmt: skip
    checked: Tensor = weights.to(gramian.device, gramian.dtype, copy=True)
    return checked


def check_positive(losses: Tensor, names: Sequence[str], who: str, why: str, when: str = "") -> None:
    """Raises ValueError, naming the task, if one of the losses [K] is negative."""
    values = losses.tolist()
    negative = [i for i, value in enumerate(values) if value < 0]
    if negative:
        i = negative[0]
        raise ValueError(
            f"losses: {who} expected numbers >= 0,{when} got {values[i]:g} for task {names[i]!r}: it {why}"
        )


def numbers_of_tasks(name: str, given: Any) -> dict[str, float] | tuple[float, ...]:
    """Finite numbers, by task name or in the order of the tasks, as a copy that later changes do not reach.

    Raises:
        ValueError: neither a mapping nor a sequence, or an entry that is not a finite number.
    """
    by_name = isinstance(given, Mapping)
    if isinstance(given, str) or not (by_name or isinstance(given, Sequence)):
        raise ValueError(f"{name}: expected numbers in the order of the tasks, or task name -> number, got {given!r}")
    values = list(given.values() if by_name else given)
    if not all(is_number(value) and math.isfinite(value) for value in values):
        raise ValueError(f"{name}: expected finite numbers, one per task, got {given!r}")
    numbers = tuple(float(value) for value in values)
    return dict(zip(map(str, given), numbers, strict=True)) if by_name else numbers


def as_tensor(w: Tensor, like: Tensor) -> Tensor:
    """The weights in the dtype of M and on its device. Where they leave its range, the largest and the smallest
    positive number take their place: no weight becomes infinite, or 0 that is not."""
    if like.dtype != torch.float64:
        kind = torch.finfo(like.dtype)
        w = w.clamp(-kind.max, kind.max)
        w = torch.where(w > 0, w.clamp(min=kind.tiny * kind.eps), w)
    return w.to(like.dtype).to(like.device)

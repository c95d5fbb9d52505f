"""NGDiff: unlearn one task while another is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cost_mtl._validation import one_of
from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._checks import as_tensor, check_shape, host_matrix

__all__ = ["NGDiff"]


@dataclass(frozen=True)
class NGDiff:
    """Normalised gradient difference for unlearning (Bu et al., NAACL 2025, arXiv 2410.22086).

    d = g_retain / ||g_retain|| - g_forget / ||g_forget||: the first loss falls and the second rises, whatever their
    scales; the one weighting here with a negative weight by intention. A task with a zero gradient gets weight 0. The
    paper's learning-rate scheduler is not part of it.

    Args:
        retain, forget: which of the two losses is to fall (0, default) and which to rise (1, default); where the tasks
            have names, 0 is the one that appeared first.

    Raises:
        ValueError: the two are not 0 and 1 in some order, there are not two tasks, or the matrix is not finite (the
            task is named) or no Gramian.

    Example:
        >>> NGDiff()(torch.diag(torch.tensor([4.0, 16.0])))  # gradients of length 2 and 4
        tensor([ 0.5000, -0.2500])
    """

    retain: int = 0
    forget: int = 1

    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("retain", self.retain, (0, 1))
        one_of("forget", self.forget, (0, 1))
        if self.retain == self.forget:
            raise ValueError(f"retain, forget: expected 0 and 1 in some order, got {self.retain!r} for both")

    def __call__(self, gramian: Tensor) -> Tensor:
        """Weights [2] for the Gramian [2, 2]."""
        check_shape(gramian)
        if len(gramian) != 2:
            raise ValueError(f"gramian: NGDiff expected two tasks, one to retain and one to forget, got {len(gramian)}")
        norms = torch.from_numpy(host_matrix(gramian)).diagonal().sqrt()
        signed = torch.where(norms == 0, 0.0, 1 / norms)
        signed[self.forget] *= -1
        return as_tensor(signed, gramian)

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K] of those of the two tasks that are there."""
        M, known = inputs.gramian, len(inputs.known)
        if known != 2:
            raise ValueError(f"losses: NGDiff expected two tasks, one to retain and one to forget, both in the first "
                             f"step, got {list(inputs.known)}")  # fmt: skip
        whole = torch.zeros(2, 2, dtype=M.dtype, device=M.device)
        at = torch.tensor(inputs.places, device=M.device)
        whole[at[:, None], at] = M
        return Weighed(self(whole)[at], state)

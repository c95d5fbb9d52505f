"""Random loss weighting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from cost_mtl._validation import integer, one_of
from cost_mtl.base import State, Weighed, WeightingInputs
from cost_mtl.weighting._keyed import keyed_generator

__all__ = ["RLW"]


@dataclass(frozen=True)
class RLW:
    """Random loss weighting (Lin et al., TMLR 2022, arXiv 2111.10603, Algorithm 2): new weights in every step.

    Stateless: the draw depends on ``seed`` and the number of the step only, so that a resumed run goes on as it would
    have, and no global random stream is touched.

    Args:
        distribution: ``"normal"`` (default): softmax of K standard normal numbers, as in the published experiments;
            ``"dirichlet"``: uniform on the simplex.
        scale: ``"mean"`` (default): the weights sum to 1; ``"sum"``: to K.
        seed: of the draws.

    Raises:
        ValueError: a setting is not one of those above.

    Example:
        >>> from cost_mtl.base import WeightingInputs
        >>> weighting = RLW()
        >>> losses, G = torch.tensor([1.0, 4.0]), torch.tensor([[1.0, -2.0], [3.0, 1.0]])
        >>> inputs = WeightingInputs(cost_mtl.gramian(G), losses, G, step=0)
        >>> weighting.weigh(inputs, weighting.initial_state(2)).weights.sum()
        tensor(1.)
    """

    distribution: Literal["normal", "dirichlet"] = "normal"
    scale: Literal["mean", "sum"] = "mean"
    seed: int = 0

    needs: ClassVar[str] = "gramian"
    by_name: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of("distribution", self.distribution, ("normal", "dirichlet"))
        one_of("scale", self.scale, ("mean", "sum"))
        integer("seed", self.seed)

    def initial_state(self, num_tasks: int) -> State:
        return {}

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed:
        """Weights [K]; the inputs' number of tasks and step are all that counts."""
        num_tasks = len(inputs.gramian)
        generator = keyed_generator(self.seed, inputs.step)
        if self.distribution == "normal":
            w = torch.randn(num_tasks, generator=generator, dtype=torch.float64, device="cpu").softmax(0)
        else:
            w = torch.empty(num_tasks, dtype=torch.float64, device="cpu").exponential_(generator=generator)
            w = w / w.sum()
        if self.scale == "sum":
            w = w * num_tasks
        return Weighed(w.to(inputs.gramian.device, inputs.gramian.dtype, non_blocking=True), state)

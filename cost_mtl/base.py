"""The protocols and report types: the one file to read first.

Nothing here computes. A weighting turns a Gramian into weights, a trigger turns one into a decision, a teleporter
turns a problem into a move; :class:`cost_mtl.COST` connects them. Notation throughout (Zhou et al., COST, 2025):
K tasks, losses L [K], task gradients G [K, m] of the m shared parameters theta, Gramian M = G G^T [K, K], mean
gradient g_0 = (1/K) sum_i g_i, weights w [K], combined direction d = G^T w [m].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:  # a report carries another room's
    from cost_mtl.teleport.base import TeleportReport

Losses = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""K scalar losses with their graph: a tensor [K] (or [] for one task), a sequence or a mapping of scalar tensors."""


Closure = Callable[..., Losses]
"""``closure(*batch) -> Losses``. Called once in an ordinary step, several times in a step that teleports."""


State = dict[str, Any]
"""Tensors, numbers, strings and plain containers of them: what ``torch.load(weights_only=True)`` accepts."""


# ------------------------------------------------------------------------------------------------ weightings


@runtime_checkable
class Weighting(Protocol):
    """A rule that sees only the Gramian.

    Example:
        >>> def inverse_norms(gramian):
        ...     return 1 / gramian.diagonal().sqrt()
        >>> isinstance(inverse_norms, Weighting)  # COST(..., weighting=inverse_norms)
        True
    """

    def __call__(self, gramian: Tensor, /) -> Tensor:
        """Weights w [K] for the Gramian M [K, K], on M's device and in M's dtype."""
        ...


DETERMINED = 1e-2
"""Rounding errors of M may change an answer by this, relative, if it is to count as one."""


@dataclass(frozen=True)
class SolverReport:
    """How a solve ended.

    Attributes:
        iterations: iterations done.
        residual: relative residual of the method's own equation (its docstring says which).
        code: index into :attr:`STATUSES`.
        rounding: how far the rounding errors of M may have changed what the method is about (the rates g_i^T d,
            projections, or the length of a direction), relative: 0 if the method does not say, 1 and more if M's digits
            tell nothing. COST computes M again, in float64 throughout, where it is above :data:`DETERMINED`.

    Example:
        >>> report = cost_mtl.NashMTL().solve(torch.eye(2, dtype=torch.float64)).report
        >>> report.status, report.residual < 1e-6
        ('converged', True)
    """

    STATUSES = ("converged", "stationary", "not_converged")

    iterations: int
    residual: float
    code: int = 0
    rounding: float = 0.0

    @property
    def status(self) -> str:
        """``"converged"``; ``"stationary"`` (a convex combination of the task gradients vanishes, as far as M's digits
        tell, so that the equation has no finite solution or none that they determine to 1 %: the documented bounded
        answer was returned); ``"not_converged"``."""
        return self.STATUSES[self.code]


@dataclass(frozen=True)
class Solution:
    """Weights [K] and how they were found."""

    weights: Tensor
    report: SolverReport


@runtime_checkable
class SolvingWeighting(Weighting, Protocol):
    """A weighting that also says how its solve went; ``solve(M).weights`` is what calling it returns."""

    def solve(self, gramian: Tensor, /) -> Solution:
        """The weights and the report. A method with a second argument ``noise: float | None`` is told the precision of
        M (see :class:`WeightingInputs`)."""
        ...


@dataclass(frozen=True)
class WeightingInputs:
    """All that a :class:`StatefulWeighting` may look at in one step.

    Attributes:
        gramian: M [K, K], from COST in float64 and on the host.
        losses: detached losses [K].
        gradients: G [K, m]. Read only: it is COST's buffer.
        step: steps done before this one, counted from 0; randomness is keyed on (the method's seed, step).
        noise: rounding error of M's entries, relative to ||g_i|| ||g_j||, which its dtype does not tell: from COST 3e-7
            for gradients in float32 (1e-12 where M had to be computed again), 1e-14 in float64. None: the dtype's.
        names: the K tasks of the rows. Default: "0", "1", ...
        known: all tasks seen so far, these among them, in the order of their first appearance. Default: names.
        named: whether the closure named its tasks (a mapping). If not, the names are places in a list.
    """

    gramian: Tensor
    losses: Tensor
    gradients: Tensor
    step: int
    noise: float | None = None
    names: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    named: bool = False

    def __post_init__(self) -> None:
        names = self.names or tuple(str(i) for i in range(len(self.losses)))
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "known", self.known or names)

    @property
    def places(self) -> list[int]:
        """Place of each row's task among the known ones [K]: what a setting by position goes by."""
        return [self.known.index(name) for name in self.names]


@dataclass(frozen=True)
class Weighed:
    """What a :class:`StatefulWeighting` returns.

    Attributes:
        weights: w [K], on any device; COST moves them to the gradients.
        state: the state for the next call.
        direction: the combined gradient [m], for the methods that are no linear combination of the rows of G
            (GradDrop); None means G^T w.
        solver: how the solve went, if there was one.
        parameter_grads: (parameter, gradient) pairs of the method's own learnable parameters (Uncertainty);
            COST writes them to ``.grad`` and whichever optimizer holds the parameters steps them.
        at_rest: (parameter, mask) pairs: entries of these parameters (True in the mask) that belong to absent tasks.
            COST puts them, and the base optimizer's state of them, back after the update: momentum and weight decay
            move an entry whose gradient is zero.
    """

    weights: Tensor
    state: State = field(default_factory=dict)
    direction: Tensor | None = None
    solver: SolverReport | None = None
    parameter_grads: tuple[tuple[nn.Parameter, Tensor], ...] = ()
    at_rest: tuple[tuple[nn.Parameter, Tensor], ...] = ()


@runtime_checkable
class StatefulWeighting(Protocol):
    """A rule that needs the losses, the whole gradients or a memory. The object holds settings only; COST keeps the
    state, hands it in, and saves it in ``state_dict()``. ``weigh`` gets a copy of the state: a step that is left out
    goes on from the one before.

    Two optional class attributes say more of it:

    ``by_name``: True: its settings and its state go by task name, so that the tasks may differ from step to step. A
    task that is absent (missing from the closure's mapping, or without a gradient in this batch) is left out of its
    inputs, and gets weight 0. Default False: it is handed all tasks, and its state starts again when they change.

    ``needs``: ``"gramian"``: it never looks at ``inputs.gradients``, which may then be incomplete in a group of
    processes. Default ``"gradients"``.
    """

    def initial_state(self, num_tasks: int) -> State: ...

    def weigh(self, inputs: WeightingInputs, state: State) -> Weighed: ...


@runtime_checkable
class ObservingWeighting(StatefulWeighting, Protocol):
    """A stateful rule that also wants the losses after the update, on the same batch (FAMO). COST calls the closure
    once more after the base optimizer's step, without a backward pass: the one exception to one call a step. As in
    every call, gradients are enabled in it, since some losses differentiate inside (forces from an energy)."""

    def observe(self, losses_after: Tensor, state: State) -> State: ...


# ------------------------------------------------------------------------------------------------ triggers


@runtime_checkable
class Trigger(Protocol):
    """When to teleport, from the Gramian alone. COST hands in a host copy, so a plain bool costs no extra sync.

    Example:
        >>> def strong_conflict(gramian):
        ...     return bool((cost_mtl.cosines(gramian) < -0.3).any())
        >>> strong_conflict(torch.eye(2))  # COST(..., trigger=strong_conflict)
        False
    """

    def __call__(self, gramian: Tensor, /) -> bool: ...


@dataclass(frozen=True, eq=False)  # tensors do not compare to a bool
class StepReport:
    """One optimizer step. Tensors stay on the device until you read them.

    Attributes:
        losses: detached losses [K], before the step (and before a teleport).
        names: task names, the mapping's keys or "0", "1", ...
        gramian: M [K, K] of the gradients that the update was made from; None in a step that reuses its weights
            (``every`` > 1) or has one task.
        weights: w [K].
        cosines: cos(g_i, g_0) [K]; None where gramian is.
        norms: ||g_i|| [K]; None where gramian is.
        conflict: what the trigger said; None when it was not evaluated.
        teleport: the teleport attempted in this step, or None.
        no_teleport: why a conflict led to no attempt; "" where there was none, or one was made of it.
        solver: how the weighting's solve went, or None if it does not say.
        skipped: True when ``on_nonfinite="skip"`` (or a loss scaler) left the parameters alone.
        skipped_total: steps skipped so far.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = cost_mtl.COST(torch.optim.SGD(model.parameters(), lr=0.1), model, teleporter=None)
        >>> x = torch.randn(8, 3)
        >>> losses = optimizer.step(lambda: dict(zip(("a", "b"), model(x).square().mean(0))))
        >>> optimizer.last_step.names, optimizer.last_step.gramian.shape, optimizer.last_step.skipped
        (('a', 'b'), torch.Size([2, 2]), False)
    """

    losses: Tensor
    names: tuple[str, ...]
    weights: Tensor
    gramian: Tensor | None = None
    cosines: Tensor | None = None
    norms: Tensor | None = None
    conflict: bool | None = None
    teleport: TeleportReport | None = None
    solver: SolverReport | None = None
    skipped: bool = False
    skipped_total: int = 0
    no_teleport: str = ""

"""The protocols and report types: the one file to read first.

Nothing here computes. A weighting turns a Gramian into weights, a trigger turns one into a decision, a teleporter
turns a problem into a move; :class:`cost_mtl.COST` connects them. Notation throughout (Zhou et al., COST, 2025):
K tasks, losses L [K], task gradients G [K, m] of the m shared parameters theta, Gramian M = G G^T [K, K], mean
gradient g_0 = (1/K) sum_i g_i, weights w [K], combined direction d = G^T w [m].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cost_mtl._validation import positive

__all__ = [
    "Acceptance",
    "Closure",
    "Losses",
    "Move",
    "NoDoubleBackwardError",
    "ObservingWeighting",
    "RemembersIterates",
    "Solution",
    "SolverReport",
    "SolvingWeighting",
    "State",
    "StatefulWeighting",
    "StepReport",
    "TeleportProblem",
    "TeleportReport",
    "Teleporter",
    "Trigger",
    "Weighed",
    "Weighting",
    "WeightingInputs",
]

Losses = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""K scalar losses with their graph: a tensor [K] (or [] for one task), a sequence or a mapping of scalar tensors."""

Closure = Callable[..., Losses]
"""``closure(*batch) -> Losses``. Called once in an ordinary step, several times in a step that teleports."""

State = dict[str, Any]
"""Tensors, numbers, strings and plain containers of them: what ``torch.load(weights_only=True)`` accepts."""


# ------------------------------------------------------------------------------------------------ weightings


@runtime_checkable
class Weighting(Protocol):
    """A rule that sees only the Gramian."""

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
    """When to teleport, from the Gramian alone. COST hands in a host copy, so a plain bool costs no extra sync."""

    def __call__(self, gramian: Tensor, /) -> bool: ...


# ------------------------------------------------------------------------------------------------ teleports


class TeleportProblem(Protocol):
    """What a teleporter may see and do: evaluate the losses where the model stands now, and move it.

    Every evaluation of one batch runs under the same random streams and from the same buffers, so two of them differ
    only in the parameters; running statistics do not accumulate. With several processes losses and gradients are
    already the mean over them. Parameters may be moved at will: the transaction that calls the teleporter puts every
    bit back before it applies the returned move.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def params(self) -> Sequence[Tensor]:
        """The trainable shared parameters, in the order of the columns of G."""
        ...

    @property
    def batches(self) -> int:
        """Number of batches that may be used: 0 is the current one, 1, 2, ... earlier ones, latest first."""
        ...

    @property
    def losses(self) -> Tensor:
        """L [K], float64, at theta on batch 0."""
        ...

    @property
    def gradients(self) -> Tensor:
        """G [K, m] at theta on batch 0."""
        ...

    @property
    def gramian(self) -> Tensor:
        """M [K, K], float64, of G."""
        ...

    @property
    def scale(self) -> Tensor | None:
        """Root of the base optimizer's second moment [m], or None where it has none (SGD, or no step yet)."""
        ...

    @property
    def iterates(self) -> Sequence[Tensor]:
        """Earlier values of the shared parameters [m], latest last, for a :class:`RemembersIterates`."""
        ...

    @property
    def generator(self) -> torch.Generator:
        """CPU generator keyed on (seed, step), the same on every process."""
        ...

    def evaluate(self, batch: int = 0) -> Tensor:
        """L [K], float64, detached, on the given batch where the model stands now."""
        ...

    def reference(self, batch: int) -> Tensor:
        """L [K], float64, at theta on the given batch; computed once. Ask before anything but ``params`` is moved."""
        ...

    def known_gradients(self, batch: int) -> tuple[Tensor, Tensor] | None:
        """L [K] and G [K, m] at theta on the given batch if they are there already, else None. Those of an earlier
        batch are handed out once, so that nothing of size [K, m] is kept for longer than needed."""
        ...

    def evaluate_gradients(
        self, batch: int = 0, *, wrt: Sequence[Tensor] | None = None, tasks: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Losses [K] and gradients [R, n] with respect to ``wrt`` (default: params). Row r is the gradient of the sum
        of the losses in ``tasks[r]``; by default R = K and row i is task i's."""
        ...

    def evaluate_curvature(
        self, directions: Tensor, tasks: Sequence[Sequence[int]], batch: int = 0, *, wrt: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Gradient [n] with respect to ``wrt`` (default: params) of sum_r <directions[r], g_r>, where g_r [m] is the
        gradient of the sum of the losses in ``tasks[r]`` with respect to the params: the sum of the Hessian-vector
        products, by double backward.

        Args:
            directions: [R, m].

        Raises:
            NoDoubleBackwardError: the closure's graph can't be differentiated twice.
        """
        ...

    def at(self, delta: Tensor) -> AbstractContextManager[None]:
        """Context in which the parameters stand at theta + delta [m]; afterwards they have their bits back."""
        ...


class NoDoubleBackwardError(RuntimeError):
    """The closure's graph can't be differentiated twice (fused attention, cuDNN RNNs, compiled models)."""


@dataclass(frozen=True)
class Acceptance:
    """What a move has to keep and to gain, or it is rejected and everything restored.

    Args:
        tolerance: largest relative change of any task loss on the batches that the move was fitted on. Default 1 %:
            below the noise of one batch, above what float32 and the Gauss-Newton corrections leave.
        tolerance_heldout: the same on a batch that it was not fitted on. Default 5 %: the constraints cover a few
            batches only, and ordinary steps move held-out losses by about as much.
        min_angle: least fall of the largest angle between a task gradient and the mean gradient, in radians, for the
            conflict objective, and largest rise of it for the norm objective. Default 0.03: 0.03 of cosine where the
            gradients are at right angles.
        min_norm: least relative rise of the balanced gradient norms, for the norm objective, and largest fall for the
            conflict objective. Default 5 %. Of a least gain below 0, which every move has, the size is what may be
            lost.
        invariance: ``"each"`` (default): every task loss is kept. ``"mean"``: the mean loss alone, whose change is
            measured relative to the mean of |L_i|; for problems with hardly more parameters than tasks, where no
            direction keeps every loss. Tasks are then traded against each other.
    """

    tolerance: float = 0.01
    tolerance_heldout: float = 0.05
    min_angle: float = 0.03
    min_norm: float = 0.05
    invariance: Literal["each", "mean"] = "each"

    def __post_init__(self) -> None:
        for name in ("tolerance", "tolerance_heldout"):
            positive(name, getattr(self, name))
        if self.invariance not in ("each", "mean"):
            raise ValueError(f"invariance: expected 'each' or 'mean', got {self.invariance!r}")


@dataclass(frozen=True)
class Move:
    """A proposed change of the shared parameters, with its diagnostics.

    Attributes:
        delta: [m], in the order of ``problem.params``, added in each parameter's own dtype.
        objective: what it was meant to improve, one of ``"conflict"`` (the smallest cosine with the mean gradient),
            ``"norm"`` (the balanced gradient norms) or ``"none"`` (a placebo: accepted on drift alone).
        either: an improvement of the other objective will do as well (the objective was chosen for where the model
            stands, not by the user).
        otherwise: asked for another move if this one is rejected; None: there is no other.
        used: the batches that the move was fitted on; the transaction checks the drift on these and on one more.
        inner_steps: optimisation steps taken inside.
        skipped_layers: name -> why a layer of the shared part took no part.
        notes: anything else worth reporting (a fallback taken, say).
        acceptance: what the move has to keep and to gain.
        first_order: [m], the part of delta that is proportional to the length of the move, where the rest (corrections)
            goes with its square: t first_order + t^2 (delta - first_order) is the same move at t of its length. Where
            the losses are kept and the promise is not, one such is looked at, if it may keep it. None: none is.
        predicted: with ``first_order``, what the move gains to first order: radians, or a relative rise of the norms.
    """

    delta: Tensor
    objective: str
    either: bool = False
    used: tuple[int, ...] = (0,)
    inner_steps: int = 1
    skipped_layers: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    otherwise: Callable[[TeleportProblem], Move] | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    first_order: Tensor | None = None
    predicted: float | None = None

    def __post_init__(self) -> None:
        if self.objective not in ("conflict", "norm", "none"):
            raise ValueError(f"objective: expected 'conflict', 'norm' or 'none', got {self.objective!r}")


@runtime_checkable
class Teleporter(Protocol):
    """Proposes a move. Snapshot, verification, acceptance and restoring are COST's, the same for all teleporters."""

    def propose(self, problem: TeleportProblem, /) -> Move: ...


@runtime_checkable
class RemembersIterates(Protocol):
    """A teleporter that wants the last ``directions`` values of the shared parameters, ``every`` steps apart."""

    @property
    def directions(self) -> int: ...

    @property
    def every(self) -> int: ...


# ------------------------------------------------------------------------------------------------ reports


@dataclass(frozen=True, eq=False)  # tensors do not compare to a bool
class TeleportReport:
    """One attempted teleport.

    Attributes:
        accepted: whether the parameters were moved. If not, every bit is what it was.
        reason: one sentence: why it was accepted or rejected.
        losses_before, losses_after: [K] on the current batch (after: of the last candidate checked).
        norms_before, norms_after: task gradient norms [K]; ``norms_after`` is None where the candidate's gradients
            were not computed (its losses had already left the tolerance).
        cosines_before, cosines_after: cos(g_i, g_0) [K]; likewise.
        drift: largest relative change of a loss over the batches that the move was fitted on (of the mean loss under
            ``invariance="mean"``).
        drift_heldout: the same on a batch that it was not fitted on; None without one.
        sigma: HTR's blend factor for the coming step (1: history kept); None if rejected.
        inner_steps: optimisation steps inside the teleporter.
        closure_calls: evaluations of the closure that the teleport cost.
        seconds: wall time.
        skipped_layers: name -> why a shared layer took no part.
        objective: what the accepted move has improved, or a rejected one was meant to (see :class:`Move`).
        length: ||delta|| / ||theta|| of the last candidate checked.
        notes: remarks of the teleporter.
    """

    accepted: bool
    reason: str
    losses_before: Tensor
    losses_after: Tensor | None
    norms_before: Tensor
    norms_after: Tensor | None
    cosines_before: Tensor
    cosines_after: Tensor | None
    drift: float | None
    drift_heldout: float | None
    sigma: float | None
    inner_steps: int
    closure_calls: int
    seconds: float
    skipped_layers: Mapping[str, str]
    objective: str
    length: float
    notes: tuple[str, ...] = ()


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

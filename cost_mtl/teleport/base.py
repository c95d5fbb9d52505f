"""What a teleporter is and is handed, what a move has to keep and to gain, and the report of an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from cost_mtl._validation import number, one_of, positive

if TYPE_CHECKING:  # a teleporter is asked for a move, and a move is for an objective
    from cost_mtl.teleport.move import Move
    from cost_mtl.teleport.objectives.base import Objective

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
        for name in ("min_angle", "min_norm"):
            number(name, getattr(self, name))
        one_of("invariance", self.invariance, ("each", "mean"))


@runtime_checkable
class Teleporter(Protocol):
    """Proposes a move. Snapshot, verification, acceptance and restoring are COST's, the same for all teleporters."""

    def propose(self, problem: TeleportProblem, /) -> Move: ...


@runtime_checkable
class ProposesInTurn(Teleporter, Protocol):
    """A teleporter with more than one objective to try: where the move that ``propose`` made for the first is rejected,
    the transaction asks for one for the next, and so on."""

    def objectives_in_turn(self, problem: TeleportProblem, /) -> Sequence[Objective]:
        """The objectives; the first is that of ``propose``."""
        ...

    def propose_for(self, objective: Objective, problem: TeleportProblem, rejected: Move, /) -> Move:
        """A move for one of the others. ``rejected`` is the move before, which was rejected: what it has found out
        (the layers to be skipped, say) need not be found again."""
        ...


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
    """One attempted teleport. ``print(report)`` shows it as a short table.

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
        objective: what the accepted move has improved, or a rejected one was meant to (see
            :class:`cost_mtl.Move`); ``"none"``: nothing.
        length: ||delta|| / ||theta|| of the last candidate checked, over the shared parameters.
        notes: remarks of the teleporter.
        step: number of the optimizer step before which it was made, from 0; None for a report made by hand.
        names: of the tasks [K], in the order of all of the above; empty in a report made by hand.

    Example:
        >>> one = torch.ones(2)
        >>> report = cost_mtl.TeleportReport(
        ...     accepted=True, reason="every loss kept, conflict objective improved", losses_before=one,
        ...     losses_after=one * 1.001, norms_before=one, norms_after=one * 2, cosines_before=one * -0.1,
        ...     cosines_after=one * 0.2, drift=0.001, drift_heldout=None, sigma=0.9, inner_steps=3, closure_calls=7,
        ...     seconds=0.25, skipped_layers={}, objective="conflict", length=0.004, step=1200, names=("seg", "depth"))
        >>> print(report)
        teleport in step 1200 accepted: every loss kept, conflict objective improved
        task         loss            ‖g‖             cos with the mean
        seg             1  +0.10 %       1 →       2  -0.100 → +0.200
        depth           1  +0.10 %       1 →       2  -0.100 → +0.200
        loss drift 0.10 % (batches used), length 0.004 ‖θ‖, sigma 0.9, 7 closure calls, 0.25 s
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
    step: int | None = None
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = "" if self.step is None else f" in step {self.step}"
        verdict = "accepted" if self.accepted else "rejected"
        names = self.names or tuple(map(str, range(len(self.losses_before))))
        width = max(8, *map(len, names))
        lines = [
            f"teleport{where} {verdict}: {self.reason}",
            f"{'task':{width}}     loss            ‖g‖             cos with the mean",
        ]
        lines += [f"{name:{width}} {self._row(i)}".rstrip() for i, name in enumerate(names)]
        lines.append(self._summary())
        if self.skipped_layers:
            lines.append("skipped layers: " + "; ".join(f"{name} ({why})" for name, why in self.skipped_layers.items()))
        return "\n".join([*lines, *self.notes])

    def _row(self, i: int) -> str:
        """Loss with its relative change, gradient norm and cosine of task i, before and after as far as known."""
        loss, after = float(self.losses_before[i]), self.losses_after
        change = "" if after is None or loss == 0 else f"{float(after[i]) / loss - 1:+.2%}".replace("%", " %")
        pairs = ((self.norms_before, self.norms_after, "7.4g"), (self.cosines_before, self.cosines_after, "+6.3f"))
        cells = (f"{float(a[i]):{f}}" + ("" if b is None else f" → {float(b[i]):{f}}") for a, b, f in pairs)
        return f"{loss:8.4g} {change:>8} " + "  ".join(f"{cell:17}" for cell in cells)

    def _summary(self) -> str:
        parts = [] if self.drift is None else [f"loss drift {100 * self.drift:.2f} % (batches used)"]
        if self.drift_heldout is not None:
            parts.append(f"{100 * self.drift_heldout:.2f} % (held-out batch)")
        parts.append(f"length {self.length:.2g} ‖θ‖")
        if self.sigma is not None:
            parts.append(f"sigma {self.sigma:.3g}")
        return ", ".join([*parts, f"{self.closure_calls} closure calls", f"{self.seconds:.2f} s"])

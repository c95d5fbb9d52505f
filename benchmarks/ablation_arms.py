"""What ``ablation.py`` compares: COST as it comes, its controls, and variations of one part at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import cost_mtl
from cost_mtl import Acceptance, LevelSet, LoRATeleporter, Move, Penalty
from cost_mtl.history import sigma_for
from cost_mtl.teleport.attempt import fallback_objectives
from cost_mtl.teleport.base import TeleportProblem
from cost_mtl.teleport.invariance import relative_change
from cost_mtl.teleport.objectives import PROMISES
from cost_mtl.teleport.objectives.base import ObjectiveContext, Slope
from cost_mtl.teleport.objectives.conflict import ConflictGain
from cost_mtl.teleport.solvers.base import heldout_batch, theta_norm

# ------------------------------------------------------------------------------------------------ controls


def cost_move(problem: TeleportProblem, teleporter: LoRATeleporter) -> tuple[Move, Tensor] | None:
    """The move that the transaction would accept of COST's teleporter here, with the task gradients [K, m] beyond it;
    None if it would accept none. The parameters stay."""
    standing = torch.zeros_like(problem.gradients[0])
    with problem.at(standing):  # afterwards the parameters have their bits back
        move = teleporter.propose(problem)
    G = gradients_if_accepted(problem, move)
    for objective in fallback_objectives(teleporter, problem, move):
        if G is not None:
            break
        with problem.at(standing):
            move = teleporter.propose_for(objective, problem, move)
        G = gradients_if_accepted(problem, move)
    return None if G is None else (move, G)


def gradients_if_accepted(problem: TeleportProblem, move: Move) -> Tensor | None:
    """Task gradients [K, m] at theta + delta if the losses are kept there and the move's promise is, else None."""
    rule = move.acceptance
    if not bool(torch.isfinite(move.delta).all()) or not bool((move.delta != 0).any()):
        return None
    heldout = heldout_batch(problem, move.used)
    limits = dict.fromkeys(move.used, rule.tolerance)
    if heldout is not None:
        limits[heldout] = rule.tolerance_heldout
    references = {batch: problem.reference(batch) for batch in limits}
    with problem.at(move.delta):
        for batch, limit in limits.items():
            if not relative_change(references[batch], problem.evaluate(batch)) <= limit:
                return None
        _, G = problem.evaluate_gradients(0)
    after = cost_mtl.gramian(G, dtype=torch.float64)
    objectives = PROMISES if move.either else (move.judge,)
    gained = [o is None or o.gain(problem.gramian, after) >= o.least(rule) for o in objectives]
    return G if any(gained) else None


@dataclass(frozen=True)
class RandomDirection(ConflictGain):
    """An "objective" whose gradient is a random direction, and which can't have enough of it."""

    def slope(self, context: ObjectiveContext, /) -> Slope:
        u = torch.randn(context.J.shape[1], generator=context.problem.generator).to(context.J)
        u[(context.J == 0).all(dim=0)] = 0.0  # LoRA's A: no first-order effect at B = 0; COST does not move it either
        return Slope(0.0, u, float("inf"))


@dataclass(frozen=True)
class Placebo:
    """A random move along the level set wherever COST's own would have been accepted, and as long as that.

    COST's move is made and judged first. The random one is found by the same solver in the same kind of coordinates (a
    fresh LoRA adapter under the same metric), so it keeps and corrects the losses of the same batches in the same way,
    and goes through the same transaction, which asks no gain of it.
    """

    teleporter: LoRATeleporter = field(default_factory=LoRATeleporter)

    def propose(self, problem: TeleportProblem, /) -> Move:
        found = cost_move(problem, self.teleporter)
        if found is None:
            return Move(torch.zeros_like(problem.gradients[0]), "none", notes=("COST makes no move here",))
        return random_move(problem, float(found[0].delta.double().norm()), self.teleporter)


def random_move(problem: TeleportProblem, length: float, like: LoRATeleporter) -> Move:
    """A random move of the given ||Delta theta|| before corrections, made like those of a teleporter with LevelSet."""
    relative = length / theta_norm(problem)
    solver = replace(like.solver, length=relative, shortest=relative)
    move = replace(like, objective=RandomDirection(), solver=solver).propose(problem)
    return replace(move, objective="none")


@dataclass
class NoMove:
    """COST's attempt, its verdict and its sigma, but the parameters stay: what the evaluations and HTR do alone.

    ``sigma`` is that of the last attempt (None: COST would have been rejected); the caller hands it to COST, which
    itself makes none of a move of zero.
    """

    teleporter: LoRATeleporter = field(default_factory=LoRATeleporter)
    sigma: float | None = None

    def propose(self, problem: TeleportProblem, /) -> Move:
        found = cost_move(problem, self.teleporter)
        self.sigma = None
        if found is not None:
            before, after = problem.gradients.mean(dim=0), found[1].mean(dim=0)
            self.sigma = sigma_for("gradient", before=before, after=after, delta=found[0].delta, direction=None)
        return Move(torch.zeros_like(problem.gradients[0]), "none", notes=("on purpose",))


# ------------------------------------------------------------------------------------------------ arms


@dataclass(frozen=True)
class Arm:
    """One way to teleport; the fields are COST's own settings.

    Attributes:
        teleporter: makes one (a new one for each run), or None: a plain multi-task optimizer.
        cooldown: epochs from one attempt to the next.
        confirm: whether an earlier batch is asked for the conflict first.
    """

    text: str
    teleporter: Callable[[], Any] | None
    htr: str = "gradient"
    trigger: Any = field(default_factory=cost_mtl.DominatedConflict)
    cooldown: float = 1.0
    confirm: bool = True


def _peft(name: str, **settings: Any) -> Callable[[], LoRATeleporter]:
    def make() -> LoRATeleporter:
        import peft

        return LoRATeleporter(peft_config=getattr(peft, name)(**settings))

    return make


INF = float("inf")
ANYTHING = Acceptance(tolerance=INF, tolerance_heldout=INF, min_angle=-INF, min_norm=-INF)
"""No verification, as in the paper: whatever is finite is accepted."""


def _no_lt() -> LoRATeleporter:
    free = Acceptance(tolerance=INF, tolerance_heldout=INF)
    return LoRATeleporter(acceptance=free, solver=LevelSet(corrections=0, constraints=0))


def _paper(gamma: float) -> Callable[[], LoRATeleporter]:
    return lambda: LoRATeleporter(solver=Penalty(gamma=gamma), acceptance=ANYTHING)


MAIN = ("plain", "cost", "placebo", "no-move")
ARMS: dict[str, Arm] = {
    "plain": Arm("no teleports", None),
    "cost": Arm("COST, defaults", LoRATeleporter),
    "placebo": Arm("random move of COST's length", Placebo),
    "no-move": Arm("COST's attempts and HTR, no move", NoMove),
    "no-lt": Arm("no L_t: no tolerance, no corrections", _no_lt),
    "paper": Arm("the paper's penalty and HTR, unverified", _paper(0.1), htr="paper"),
    "paper-no-lt": Arm("the same, L_g alone", _paper(1e6), htr="paper"),
    "paper-no-htr": Arm("the same, history kept", _paper(0.1), htr="keep"),
    "htr-keep": Arm("no HTR (history kept)", LoRATeleporter, htr="keep"),
    "htr-momentum": Arm("HTR momentum", LoRATeleporter, htr="momentum"),
    "htr-paper": Arm("HTR paper", LoRATeleporter, htr="paper"),
    "htr-reset": Arm("HTR reset", LoRATeleporter, htr="reset"),
    "htr-rollback": Arm("HTR rollback", LoRATeleporter, htr="rollback"),
    "trigger-weak": Arm("weak conflict", LoRATeleporter, trigger=cost_mtl.WeakConflict()),
    "trigger-share": Arm("a sixth of the tasks", LoRATeleporter, trigger=cost_mtl.ConflictShare(1 / 6)),
    "adapter-loha": Arm("LoHa", _peft("LoHaConfig", r=5, alpha=5)),
    "adapter-oft": Arm("OFT", _peft("OFTConfig", r=0, oft_block_size=4)),
    "dense": Arm("dense, no adapter", cost_mtl.DenseTeleporter),
    "constraints": Arm("two earlier batches kept", lambda: LoRATeleporter(solver=LevelSet(constraints=2))),
    "norm": Arm("larger gradient norms alone", lambda: LoRATeleporter(objective="norm")),
    "unconfirmed": Arm("no second batch asked", LoRATeleporter, confirm=False),
}
AXES: tuple[tuple[tuple[str, str, str], tuple[str, ...]], ...] = tuple(
    ((problem, weighting, "adam"), tuple(arm for arm in ARMS if arm not in MAIN))
    for problem in ("multimnist", "qm9")
    for weighting in ("cagrad", "nashmtl", "fairgrad")
)
"""(problem, weighting, optimizer) -> the arms that vary one part there."""

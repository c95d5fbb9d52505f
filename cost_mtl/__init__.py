"""Multi-task learning optimizers for PyTorch with symmetry teleportation (COST), and model merging."""

from cost_mtl import merging
from cost_mtl._version import __version__
from cost_mtl.base import SolverReport, StepReport, Trigger, Weighting
from cost_mtl.gradients.backward import task_gradients
from cost_mtl.gradients.gramian import combine, cosines, gramian
from cost_mtl.history import reuse_trajectory_
from cost_mtl.optimizer import COST
from cost_mtl.teleport import (
    DenseTeleporter,
    DifferenceTeleporter,
    LevelSet,
    LoRATeleporter,
    NoAdaptableLayerError,
    Penalty,
    UnrepeatableClosureError,
)
from cost_mtl.teleport.base import Acceptance, Teleporter, TeleportReport
from cost_mtl.teleport.move import Move
from cost_mtl.triggers import ConflictShare, DominatedConflict, TeleportSchedule, WeakConflict
from cost_mtl.weighting import (
    DWA,
    FAMO,
    IMTLG,
    MGDA,
    RLW,
    CAGrad,
    EqualWeighting,
    FairGrad,
    GradDrop,
    NashMTL,
    NGDiff,
    PCGrad,
    ScaleInvariant,
    Uncertainty,
)

__all__ = [
    "COST",
    "DWA",
    "FAMO",
    "IMTLG",
    "MGDA",
    "RLW",
    "Acceptance",
    "CAGrad",
    "ConflictShare",
    "DenseTeleporter",
    "DifferenceTeleporter",
    "DominatedConflict",
    "EqualWeighting",
    "FairGrad",
    "GradDrop",
    "LevelSet",
    "LoRATeleporter",
    "Move",
    "NGDiff",
    "NashMTL",
    "NoAdaptableLayerError",
    "PCGrad",
    "Penalty",
    "ScaleInvariant",
    "SolverReport",
    "StepReport",
    "TeleportReport",
    "TeleportSchedule",
    "Teleporter",
    "Trigger",
    "Uncertainty",
    "UnrepeatableClosureError",
    "WeakConflict",
    "Weighting",
    "__version__",
    "combine",
    "cosines",
    "gramian",
    "merging",
    "reuse_trajectory_",
    "task_gradients",
]

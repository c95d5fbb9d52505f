"""How the K task gradients are combined: one file per method, the solvers they share beside them.

UPGrad, AlignedMTL, GradVac and the rest of torchjd's weightings of Gramians are not repeated here: hand them to
``COST`` as they are (``pip install torchjd``).
"""

from cost_mtl.weighting.cagrad import CAGrad
from cost_mtl.weighting.dwa import DWA
from cost_mtl.weighting.equal import EqualWeighting
from cost_mtl.weighting.fairgrad import FairGrad
from cost_mtl.weighting.famo import FAMO
from cost_mtl.weighting.graddrop import GradDrop
from cost_mtl.weighting.imtl import IMTLG
from cost_mtl.weighting.mgda import MGDA
from cost_mtl.weighting.nash import NashMTL
from cost_mtl.weighting.ngdiff import NGDiff
from cost_mtl.weighting.pcgrad import PCGrad
from cost_mtl.weighting.resolve import resolve
from cost_mtl.weighting.rlw import RLW
from cost_mtl.weighting.scale_invariant import ScaleInvariant
from cost_mtl.weighting.uncertainty import Uncertainty

__all__ = [
    "DWA",
    "FAMO",
    "IMTLG",
    "MGDA",
    "RLW",
    "CAGrad",
    "EqualWeighting",
    "FairGrad",
    "GradDrop",
    "NGDiff",
    "NashMTL",
    "PCGrad",
    "ScaleInvariant",
    "Uncertainty",
    "resolve",
]

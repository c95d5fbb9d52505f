"""How the K task gradients are combined: one file per method, the solvers they share beside them.

UPGrad, AlignedMTL and the rest of torchjd's weightings of Gramians are not repeated here: hand them to ``COST`` as they
are (``pip install torchjd``).
"""

from cost_mtl.weighting.cagrad import CAGrad
from cost_mtl.weighting.equal import EqualWeighting
from cost_mtl.weighting.fairgrad import FairGrad
from cost_mtl.weighting.mgda import MGDA
from cost_mtl.weighting.nash import NashMTL
from cost_mtl.weighting.resolve import resolve

__all__ = ["MGDA", "CAGrad", "EqualWeighting", "FairGrad", "NashMTL", "resolve"]

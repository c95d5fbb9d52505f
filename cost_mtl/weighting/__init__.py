"""How the K task gradients are combined: one file per method, the solvers they share beside them."""

from cost_mtl.weighting.cagrad import CAGrad
from cost_mtl.weighting.equal import EqualWeighting
from cost_mtl.weighting.fairgrad import FairGrad, NashMTL
from cost_mtl.weighting.resolve import resolve

__all__ = ["CAGrad", "EqualWeighting", "FairGrad", "NashMTL", "resolve"]

"""SegNet with split heads and SegNet-MTAN, with the parameter counts of the public scripts."""

from dense.models.mtan import SegNetMTAN
from dense.models.segnet import FILTERS, SegNet, head_channels

__all__ = ["FILTERS", "SegNet", "SegNetMTAN", "head_channels"]

"""Multi-task learning optimizers for PyTorch with symmetry teleportation (COST), and model merging."""

from cost_mtl._version import __version__

__all__ = ["__version__"]

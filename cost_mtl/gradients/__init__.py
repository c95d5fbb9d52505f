"""Task gradients, their Gramian and their combination: pure functions on tensors.

All of them can be used in a training loop of one's own::

    G = cost_mtl.task_gradients(losses, model.trunk.parameters())  # [K, m]
    w = cost_mtl.FairGrad(alpha=2.0)(cost_mtl.gramian(G))          # [K]
    d = cost_mtl.combine(G, w)                                     # [m]
"""

from cost_mtl.gradients.backward import task_gradients
from cost_mtl.gradients.gramian import combine, cosines, gramian, norms

__all__ = ["combine", "cosines", "gramian", "norms", "task_gradients"]

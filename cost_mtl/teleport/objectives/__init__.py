"""What a teleport improves, one file per objective. A new one: one file, one line in ``NAMED``.

==============  =====================================================  ===================  ==================
name            objective phi                                          its gradient         its gain
==============  =====================================================  ===================  ==================
``"conflict"``  sum_i p_i cos(g_i, g_0), p on the smallest cosines     finite differences   fall of an angle
``"norm"``      sum_i R_i log ||g_i||, R the balance weights           finite differences   relative rise
==============  =====================================================  ===================  ==================

The paper's own, and the same two by double backward, are in ``cost_mtl.teleport.paper``. p and R count as constants.
"""

from torch import Tensor

from cost_mtl.teleport.objectives.base import Objective, Promise
from cost_mtl.teleport.objectives.conflict import Conflict
from cost_mtl.teleport.objectives.norm import Norm

PROMISES: tuple[Promise, ...] = (Conflict(), Norm())
"""The standard objectives, in the order in which they are tried. A move for one must not harm another."""

NAMED: dict[str, Objective] = {objective.name: objective for objective in PROMISES}
"""Objectives by name."""


def standard_objectives(M: Tensor) -> tuple[Objective, ...]:
    """The standard objectives to try in turn from the Gramian M [K, K]: first those that can be climbed there. With one
    task the others are left out, since there are no angles."""
    able = [promise for promise in PROMISES if promise.has_slope(M)]
    others = [promise for promise in PROMISES if promise not in able]
    return (*able, *(others if len(M) > 1 else ()))

"""Conditions for a teleport, and its schedule. A new one: one file, one line here, one row in the contract test."""

from cost_mtl.triggers.conflicts import ConflictShare, DominatedConflict, WeakConflict
from cost_mtl.triggers.schedule import TeleportSchedule

__all__ = ["ConflictShare", "DominatedConflict", "TeleportSchedule", "WeakConflict"]

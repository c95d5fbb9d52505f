"""Teleports: the transaction, the objective, one file per teleporter. A new one: one file, one line here."""

from cost_mtl.teleport.dense import DenseTeleporter
from cost_mtl.teleport.difference import DifferenceTeleporter
from cost_mtl.teleport.lora import LoRATeleporter, NoAdaptableLayerError
from cost_mtl.teleport.paper import Penalty, Sharpness, Sphere
from cost_mtl.teleport.problem import UnrepeatableClosureError
from cost_mtl.teleport.solvers.level_set import LevelSet

__all__ = [
    "DenseTeleporter",
    "DifferenceTeleporter",
    "LevelSet",
    "LoRATeleporter",
    "NoAdaptableLayerError",
    "Penalty",
    "Sharpness",
    "Sphere",
    "UnrepeatableClosureError",
]

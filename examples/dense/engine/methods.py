"""Which weighting a command-line word means, with the conventions of the published script or of ``cost_mtl``.

The published scripts differ in more than the weighting (read from their code; K is the number of tasks):

=========  =====================================  ==========================  =========  =====================
word       setting                                shared gradient             clip       heads' gradient
=========  =====================================  ==========================  =========  =====================
ls         –                                      sum of the g_i              none       own loss
cagrad     c = 0.4, divided by 1 + c²             K times the direction       none       own loss
nashmtl    M w = 1/w                              sum of w_i g_i, norm √K     norm 1     weighted like the trunk
fairgrad   alpha = 2 (the COST paper says 1)      K times the sum             norm 1     own loss
=========  =====================================  ==========================  =========  =====================

``--preset WORD`` takes a row of this table; ``--method WORD`` takes the weighting with cost_mtl's defaults: no clip,
and each head follows its own loss (weightings of losses, like DWA or FAMO, weight the heads too).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from cost_mtl import weighting
from dense.errors import UserError

__all__ = ["SMOKE_ROWS", "STL", "WORDS", "Recipe", "Row", "adam", "parse_rows", "recipe"]

STL = "stl"
"""The single-task baseline: one network per task, trained alone."""

SMOKE_ROWS = ("stl", "ls", "cagrad", "nashmtl", "fairgrad", "fairgrad+cost")


@dataclass(frozen=True)
class Recipe:
    """A method ready for ``cost_mtl.COST``.

    Attributes:
        label: name in the tables.
        weighting: for ``COST(weighting=...)``.
        heads: for ``COST(heads=...)``.
        max_norm: for ``COST(max_norm=...)``.
    """

    label: str
    weighting: Any
    heads: Literal["own", "weighted"] = "own"
    max_norm: float | None = None


@dataclass(frozen=True)
class Row:
    """One row of the table to be run.

    Attributes:
        word: ``"stl"``, ``"ls"``, ``"cagrad"``, ...
        cost: with teleports.
        official: the published script's conventions (``--preset``) instead of cost_mtl's defaults (``--method``).
    """

    word: str
    cost: bool = False
    official: bool = True

    @property
    def key(self) -> str:
        """Folder name, and what the user typed plus ``-plain`` for ``--method``."""
        plain = not self.official and self.word not in (STL, "ls")
        return self.word + ("-plain" if plain else "") + ("+cost" if self.cost else "")

    @property
    def label(self) -> str:
        """Name in the tables."""
        if self.word == STL:
            return "STL"
        plain = not self.official and self.word != "ls"
        return WORDS[self.word] + (" (cost_mtl defaults)" if plain else "") + (" + COST" if self.cost else "")


WORDS = {
    "ls": "LS",
    "si": "SI",
    "rlw": "RLW",
    "dwa": "DWA",
    "uw": "UW",
    "mgda": "MGDA",
    "pcgrad": "PCGrad",
    "graddrop": "GradDrop",
    "cagrad": "CAGrad",
    "imtlg": "IMTL-G",
    "nashmtl": "Nash-MTL",
    "famo": "FAMO",
    "fairgrad": "FairGrad",
}
"""Command-line word -> name in the papers' tables."""

_OFFICIAL = ("stl", "ls", "cagrad", "nashmtl", "fairgrad")
_LOSS_WEIGHTINGS: dict[str, Any] = {
    "si": weighting.ScaleInvariant,
    "rlw": weighting.RLW,
    "dwa": weighting.DWA,
    "uw": weighting.Uncertainty,
    "famo": weighting.FAMO,
}
"""These weight whole losses, heads included."""
_GRADIENT_WEIGHTINGS = {
    "ls": weighting.EqualWeighting,
    "mgda": weighting.MGDA,
    "pcgrad": weighting.PCGrad,
    "graddrop": weighting.GradDrop,
    "cagrad": weighting.CAGrad,
    "imtlg": weighting.IMTLG,
    "nashmtl": weighting.NashMTL,
    "fairgrad": weighting.FairGrad,
}


def parse_rows(presets: list[str], methods: list[str], cost: bool | None) -> list[Row]:
    """Rows from ``--preset`` and ``--method`` words, each maybe with ``+cost``; ``cost`` sets or clears it on all.

    Raises:
        UserError: for an unknown word, a preset that does not exist, or teleports on single-task networks.
    """
    rows = []
    for official, words in ((True, presets), (False, methods)):
        for text in words:
            word, _, suffix = text.partition("+")
            if suffix not in ("", "cost") or word not in (STL, *WORDS):
                raise UserError(f"{text}: expected one of {', '.join((STL, *WORDS))}, each maybe with +cost")
            if official and word not in _OFFICIAL:
                raise UserError(f"--preset {word}: presets are {', '.join(_OFFICIAL)}; use --method {word}")
            teleports = bool(suffix) if cost is None else cost and word != STL
            if word == STL and teleports:
                raise UserError("stl+cost: a single task has no conflict to teleport away from")
            rows.append(Row(word, teleports, official))
    return list(dict.fromkeys(rows))


def recipe(row: Row, num_tasks: int, steps_per_epoch: int = 1) -> Recipe:
    """The recipe of a multi-task row for ``num_tasks`` tasks; DWA looks at whole epochs.

    The clip is COST's and not the weighting's own: the scripts clip the shared gradient alone, while weights that are
    clipped would scale Nash-MTL's heads as well.
    """
    if row.word in _LOSS_WEIGHTINGS:
        arguments = {"uw": {"num_tasks": num_tasks}, "dwa": {"steps_per_epoch": steps_per_epoch}}.get(row.word, {})
        return Recipe(row.label, _LOSS_WEIGHTINGS[row.word](**arguments), heads="weighted")
    if not row.official or row.word == "ls":
        return Recipe(row.label, _GRADIENT_WEIGHTINGS[row.word]())
    if row.word == "cagrad":
        return Recipe(row.label, weighting.CAGrad.official(c=0.4))
    if row.word == "nashmtl":
        return Recipe(row.label, weighting.NashMTL(), heads="weighted", max_norm=1.0)
    return Recipe(row.label, weighting.FairGrad(alpha=2.0, scale="tasks"), max_norm=1.0)


def adam(model: torch.nn.Module, rule: Any, lr: float) -> torch.optim.Adam:
    """Adam over the model, and over the weighting's own parameters where it has some (uncertainty weighting)."""
    parameters = list(model.parameters())
    if isinstance(rule, torch.nn.Module):
        parameters += list(rule.parameters())
    return torch.optim.Adam(parameters, lr=lr)

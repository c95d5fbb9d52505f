"""A run's log: one JSON line an epoch, and TensorBoard where asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dense.engine.problem import EpochRow

__all__ = ["Recorder", "read_log", "row_from_json", "row_to_json"]


def row_to_json(row: EpochRow) -> dict[str, Any]:
    """Plain containers; NaN becomes null, as JSON has none."""
    return _plain(asdict(row))


def row_from_json(data: dict[str, Any]) -> EpochRow:
    """The inverse of :func:`row_to_json`."""
    nan = float("nan")

    def numbers(values: dict[str, Any]) -> dict[str, float]:
        return {key: nan if value is None else value for key, value in values.items()}

    return EpochRow(
        epoch=data["epoch"],
        lr=data["lr"],
        train=numbers(data["train"]),
        metrics={split: numbers(values) for split, values in data["metrics"].items()},
        conflict=nan if data["conflict"] is None else data["conflict"],
        teleports=data["teleports"],
        seconds=data["seconds"],
    )


def read_log(path: Path) -> list[EpochRow]:
    """The epochs of a JSONL log."""
    return [row_from_json(json.loads(line)) for line in path.read_text().splitlines()]


class Recorder:
    """Writes ``log.jsonl``. A resumed run rewrites the lines up to its checkpoint, so that no epoch is there twice.

    Args:
        folder: of the run.
        history: epochs already done.
        tensorboard: also write event files to ``folder/tensorboard``.
    """

    def __init__(self, folder: Path, history: Sequence[EpochRow] = (), *, tensorboard: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "log.jsonl"
        self.path.write_text("".join(json.dumps(row_to_json(row)) + "\n" for row in history))
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # purge_step: events after the checkpoint are dropped from the display
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=len(history) + 1)

    def add(self, row: EpochRow) -> None:
        """Append one epoch."""
        with self.path.open("a") as file:
            file.write(json.dumps(row_to_json(row)) + "\n")
        if self._writer is not None:
            for name, value in _scalars(row).items():
                self._writer.add_scalar(name, value, row.epoch)
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _scalars(row: EpochRow) -> dict[str, float]:
    scalars = {f"train/{task}": value for task, value in row.train.items()}
    scalars |= {f"{split}/{name}": value for split, metrics in row.metrics.items() for name, value in metrics.items()}
    accepted = sum(bool(teleport["accepted"]) for teleport in row.teleports)
    return scalars | {"lr": row.lr, "conflict": row.conflict, "teleports/accepted": float(accepted)}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and value != value else value

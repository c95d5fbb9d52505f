"""Errors that all processes of a group raise together during a teleport; and what counts as out of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from cost_mtl.distributed.collectives import union


def lacks_memory(error: BaseException) -> bool:
    """Whether an exception means out of memory: torch raises ``OutOfMemoryError`` for its own allocator
    on an accelerator only, and a plain RuntimeError for the CPU's, cuDNN's, cuBLAS's and the driver's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


class FailTogether:
    """An error in one process of a group during a teleport is raised in all.

    No process communicates between two ``shared`` contexts. At the end of each, all processes exchange one flag, so
    that an error in one of them is raised in every one.

    Args:
        device: of the flags.
        group: process group, or None: every error then is simply raised.
    """

    def __init__(self, device: torch.device, group: Any) -> None:
        self.device, self.group = device, group
        self._agreed: Exception | None = None
        """The last error that all processes have raised."""

    @contextmanager
    def shared(self, equivalents: Sequence[Exception] = ()) -> Iterator[None]:
        """Context at whose end all processes have failed, or none has.

        Args:
            equivalents: what the others raise for an error of the same class, least severe first. Where processes
                fail for different reasons all raise the most severe error: out of memory ranks above
                ``equivalents``, and any other error above that.

        Raises:
            Exception: the one from inside, or the equivalent of another process's.
        """
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.group is None or error is self._agreed:
                raise
            mine = error
        if self.group is None:
            return
        kinds = [*equivalents, torch.OutOfMemoryError(_ELSEWHERE), RuntimeError(f"a teleport failed {_ELSEWHERE}")]
        code = 0 if mine is None else 1 + _kind_of(mine, equivalents)
        worst = int(union(torch.tensor([code], dtype=torch.uint8, device=self.device), self.group))
        if worst:
            self._agreed = mine if mine is not None and code == worst else kinds[worst - 1]
            raise self._agreed from (None if self._agreed is mine else mine)


_ELSEWHERE = "in another process of the group"


def _kind_of(error: Exception, equivalents: Sequence[Exception]) -> int:
    if lacks_memory(error):
        return len(equivalents)
    return next((k for k, other in enumerate(equivalents) if type(error) is type(other)), len(equivalents) + 1)

"""When teleports are allowed at all."""

from __future__ import annotations

from dataclasses import dataclass

from cost_mtl._validation import at_least, boolean


@dataclass(frozen=True)
class TeleportSchedule:
    """In optimizer steps, counting attempts, accepted or not. Where it does not allow a teleport, the trigger is not
    evaluated and the step costs nothing extra.

    Args:
        start: first step that may teleport, counted from 0. Default 1000: the paper waits for a quarter of training
            (epoch 50 of 200), so set it to about that.
        cooldown: least number of steps from one attempt to the next. Default 200; the official scripts allow one
            teleport an epoch.
        limit: most attempts in the whole run; None: no limit.
        confirm: a conflict must be there on an earlier batch as well, where COST remembers one, before an attempt is
            made of it. Default True: most are noise of one batch (measured, 53 to 75 % are gone on the next). Costs
            one evaluation of the task gradients each time, which an attempt with LoRA or dense moves makes use of and
            costs no more for. An unconfirmed conflict does not count as an attempt; the next one is looked for a tenth
            of ``cooldown`` later, so that this stays cheap where hardly any persists. False: the paper's rule.

    Example:
        >>> schedule = TeleportSchedule(start=1000, cooldown=200, limit=5)
        >>> schedule.allows(999, attempts=0, last_attempt=None), schedule.allows(1000, attempts=0, last_attempt=None)
        (False, True)
        >>> schedule.allows(1100, attempts=1, last_attempt=1000)
        False
    """

    start: int = 1000
    cooldown: int = 200
    limit: int | None = None
    confirm: bool = True

    def __post_init__(self) -> None:
        at_least("start", self.start, 0)
        at_least("cooldown", self.cooldown, 1)
        if self.limit is not None:
            at_least("limit", self.limit, 0)
        boolean("confirm", self.confirm)

    def allows(self, step: int, attempts: int, last_attempt: int | None, last_asked: int | None = None) -> bool:
        """Whether step number ``step`` (from 0) may teleport, after ``attempts`` attempts, the last one in step
        ``last_attempt``, an earlier batch asked for its conflict last in step ``last_asked``."""
        if step < self.start or (self.limit is not None and attempts >= self.limit):
            return False
        if last_asked is not None and step - last_asked < max(1, self.cooldown // 10):
            return False
        return last_attempt is None or step - last_attempt >= self.cooldown

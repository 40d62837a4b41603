"""How often may be recorded so that it costs no more than a share of the training time."""

from __future__ import annotations

import math

from lightning_recorder.errors import ArgumentError

__all__ = ["Budget", "check_overhead"]


_LEAST_MS = 1e-3  # for a step, whose time on the host may be nothing beside what recording takes on a GPU


class Budget:
    """Widens the interval between recorded steps until recording takes no more than a share of the time.

    The share is ``recording / (interval * step)``, from the mean time that recording takes in a recorded step and the
    mean time of a step without it. The first record is left out, for which much is done for the first time.

    Args:
        max_overhead: The share, as 0.02.

    Raises:
        ArgumentError: If it is no share.

    Example:
        >>> budget = Budget(0.02)
        >>> for spent_ms in 100.0, 12.0, 8.0:
        ...     budget.add_recorded(1, spent_ms + 10.0, spent_ms)
        >>> budget.interval(10)  # 10 ms for every step of 10 ms: a share of 0.02 is one step in 50
        50
        >>> budget.interval(100)
        100
    """

    def __init__(self, max_overhead: float) -> None:
        check_overhead(max_overhead)
        self.max_overhead = max_overhead
        self._steps = 0
        self._steps_ms = 0.0
        self._is_first = True
        self._recorded = 0
        self._spent_ms = 0.0

    def add_step(self, step_ms: float) -> None:
        """Take in a step that was not recorded."""
        self._steps += 1
        self._steps_ms += step_ms

    def add_recorded(self, steps: int, steps_ms: float, spent_ms: float) -> None:
        """Take in recorded steps, of which recording took so much."""
        if self._is_first:
            self._is_first = False
            return
        self._recorded += steps
        self._spent_ms += spent_ms
        self._steps += steps
        self._steps_ms += max(0.0, steps_ms - spent_ms)

    def interval(self, now: int) -> int:
        """The interval to go on with, in steps; never less than that of now."""
        if not self._recorded:
            return now
        step_ms = max(self._steps_ms / self._steps, _LEAST_MS)
        needed = (self._spent_ms / self._recorded) / (self.max_overhead * step_ms)
        return max(now, math.ceil(needed - 1e-9))


def check_overhead(value: object) -> None:
    """Refuse what is no share of the training time.

    Raises:
        ArgumentError: Naming what is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ArgumentError(f"max_overhead must be a share of the training time, above 0 and at most 1, got {value!r}")

"""The time that recording takes, and a limit on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import device as Device

from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.schedule import check_overhead

__all__ = ["OverheadLimit", "StepTiming"]

_LEAST_MS = 1e-3  # the minimum step time; on the CPU a step may take nearly no time compared with recording on a GPU


class OverheadLimit:
    """Widen the recording interval until recording takes at most a given share of the training time.

    The share is ``recording / (interval * step)``, with the mean recording time per recorded step and the mean step
    time without recording. The first record is excluded because it includes one-time costs.

    Args:
        max_overhead: The share of the training time, for example 0.02.

    Raises:
        ArgumentError: If the share is not above 0 and at most 1.

    Example:
        >>> budget = OverheadLimit(0.02)
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
        """Add the time of a step that was not recorded, in milliseconds."""
        self._steps += 1
        self._steps_ms += step_ms

    def add_recorded(self, steps: int, steps_ms: float, spent_ms: float) -> None:
        """Add the total time of recorded steps, and the part of it that recording took, in milliseconds."""
        if self._is_first:
            self._is_first = False
            return
        self._recorded += steps
        self._spent_ms += spent_ms
        self._steps += steps
        self._steps_ms += max(0.0, steps_ms - spent_ms)

    def interval(self, now: int) -> int:
        """Return the interval to use from now on, in steps. The interval never shrinks."""
        if not self._recorded:
            return now
        step_ms = max(self._steps_ms / self._steps, _LEAST_MS)
        needed = (self._spent_ms / self._recorded) / (self.max_overhead * step_ms)
        return max(now, math.ceil(needed - 1e-9))


class StepTiming:
    """Measure the step times of a run, and the part of each step time that recording takes."""

    def __init__(self, device: Device, clock: Callable[[], float], limit: OverheadLimit | None = None) -> None:
        self.stopwatch = Stopwatch(device, clock=clock)
        """Measures the time inside the hooks."""
        self.limit = limit
        self.recording_ms = self.flush_ms = 0.0
        """The time inside the hooks and the time of copying and merging, for the latest record, in milliseconds."""
        self._clock = clock
        self._batch_began = 0.0
        self._step_ms = 0.0
        self._recorded = 0  # recorded steps since the last record
        self._recorded_ms = 0.0

    def start_batch(self) -> None:
        """Start a batch."""
        self._batch_began = self._clock()

    def end_batch(self) -> None:
        """Add the time since the start of the batch to the step."""
        self._step_ms += 1000 * (self._clock() - self._batch_began)

    def end_step(self, *, recorded: bool) -> None:
        """End a step, after its last batch."""
        step_ms, self._step_ms = self._step_ms, 0.0
        if recorded:
            self._recorded += 1
            self._recorded_ms += step_ms
        elif self.limit is not None:
            self.limit.add_step(step_ms)

    def drop_step(self) -> None:
        """Discard the time of the current step."""
        self._step_ms = 0.0

    @contextmanager
    def flush(self) -> Iterator[None]:
        """Measure the copying and merging for a record, and pass the times since the last record to the limit."""
        began = self._clock()
        with self.stopwatch:
            yield
        self.flush_ms = 1000 * (self._clock() - began)
        self.recording_ms = max(0.0, self.stopwatch.take_ms() - self.flush_ms)
        if self.limit is not None and self._recorded:
            spent_ms = self.recording_ms + self.flush_ms
            self.limit.add_recorded(self._recorded, self._recorded_ms + self.flush_ms, spent_ms)
        self._recorded, self._recorded_ms = 0, 0.0

    @contextmanager
    def delivery(self) -> Iterator[None]:
        """Measure the delivery of a record. This time counts as recording time of the next record."""
        began = self._clock()
        with self.stopwatch:
            yield
        self._recorded_ms += 1000 * (self._clock() - began)

    def interval(self, now: int) -> int:
        """Return the interval to use from now on, in steps. The interval never shrinks."""
        return now if self.limit is None else self.limit.interval(now)

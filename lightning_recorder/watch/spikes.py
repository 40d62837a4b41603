"""Spikes of a series: values far above its running median."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

__all__ = ["SpikeDetector"]

_LEAST = 20  # values before the first spike
_WINDOW = 101  # values of the running median


class SpikeDetector:
    """Finds values above a multiple of the running median of a series.

    The median is that of the last 101 values, so single spikes do not move it. There is no spike among the first 20
    values. A loss near its minimum has a small median that rounding or a hard batch exceeds many times, so a value must
    also exceed everything that was seen in the window, and the noise of the series: the median plus 10 × the median
    absolute deviation.

    Args:
        factor: A spike is at least this many times the median.

    Example:
        >>> detector = SpikeDetector(10.0)
        >>> [value for value in [1.0, 1.1, 0.9] * 10 + [30.0] + [1.0] * 5 if detector.add(value)]
        [30.0]
        >>> detector.median
        1.0
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    @property
    def median(self) -> float:
        """The running median; NaN before the first value."""
        return self._sorted[len(self._sorted) // 2] if self._sorted else math.nan

    def add(self, value: float) -> bool:
        """Add a value, and return True if it is a spike compared with the values before it."""
        if not math.isfinite(value):
            return False
        is_spike = self._is_spike(value)
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        return is_spike

    def _is_spike(self, value: float) -> bool:
        middle = self.median
        if len(self._sorted) < _LEAST or value < self.factor * middle or middle <= 0 or value <= self._sorted[-1]:
            return False
        # Computed only for candidates.
        deviation = sorted(abs(each - middle) for each in self._sorted)[len(self._sorted) // 2]
        return value > middle + 10 * deviation

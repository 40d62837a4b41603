"""Detect spikes and rises of a series: values far above the earlier ones."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from statistics import median
from typing import NamedTuple

__all__ = ["JUMP", "LEAST", "RECENT", "Rise", "SpikeDetector"]

LEAST = 20
"""The number of first values of a series that are never spikes."""

RECENT = 10
"""The number of latest values that a spike must exceed by the factor :data:`JUMP`."""

JUMP = 3.0
"""A spike is at least this many times the largest of the recent values."""

_WINDOW = 101  # the number of values in the running median
_DEVIATIONS = 5.0
_NORMAL = 0.6745  # the median absolute deviation of a normal distribution of unit variance
_SMALLEST = 1e-12
_SHARE = 1e-3  # values below this share of the first values count as zero and are no spikes
_STAYS = 50  # a spike stays if the series is still high in the second half of this many steps after it
_RISEN = 5.0
_USUAL = 2.0
_FALLEN = 1e4


class Rise(NamedTuple):
    """The rise of a series up to its last value."""

    before: float
    """The usual value before the rise."""
    last: float
    steps: int
    """The number of latest values above twice the usual value."""


class SpikeDetector:
    """Finds values above a multiple of the running median of a series.

    The median is taken over the last 101 values, so single spikes do not move it. There is no spike among the first 20
    values. A noisy or growing series often exceeds a multiple of its median. A spike must therefore also exceed three
    times the largest of the last 10 values, and five standard deviations of the logarithm of the series, estimated by
    the median absolute deviation. It must be at least a thousandth of the largest of the first ten values.

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
        self.limit = math.inf
        """Values up to this limit are no spikes."""
        self.highest = 0.0  # the largest value before the last one
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._count, self._first = 0, math.nan
        self._largest = 1.0  # the largest magnitude of the first values, at least 1
        self._at_first = 0.0  # the largest of the first values
        self._peak, self._usual, self._age = math.inf, math.nan, 0  # the last spike: value, median before, age

    @property
    def median(self) -> float:
        """The running median; NaN before the first value. Each access sorts up to 101 values."""
        return sorted(self._values)[len(self._values) // 2] if self._values else math.nan

    def share(self, value: float) -> float:
        """Return a value divided by the largest of the first ten values, or infinity before there are ten values."""
        return value / self._at_first if self._count >= RECENT and self._at_first > 0 else math.inf

    def is_usual(self, value: float) -> bool:
        """Return True if the last added value, passed as ``value``, is not above the ten values before it."""
        return len(self._values) > RECENT and value <= max(list(self._values)[-1 - RECENT : -1])

    def fall(self) -> Rise | None:
        """Return the fall from the first value to the last one if the series has fallen far below zero.

        Each of the last ten values must be below -10,000, and below -10,000 × the largest magnitude of the first ten.
        """
        limit = -_FALLEN * self._largest
        if len(self._values) < RECENT or self._values[-1] >= limit:
            return None
        has_fallen = max(islice(reversed(self._values), RECENT)) < limit
        return Rise(self._first, self._values[-1], self._count - 1) if has_fallen else None

    def rise(self) -> Rise | None:
        """Return the rise up to the last value if it is at least five times the median of all but the last ten values.

        In a short series, the last value is compared with the first one.
        """
        values = list(self._values)
        if len(values) < 2:
            return None
        before, last = median(values[: max(1, len(values) - RECENT)]), values[-1]
        if before <= 0 or last < _RISEN * before:
            return None
        steps = next((count for count, each in enumerate(reversed(values)) if each <= _USUAL * before), len(values))
        return Rise(before, last, steps)

    def stays(self) -> Rise | None:
        """Return the rise 50 steps after the last spike, if the series has not fallen back to its usual values.

        The median of the last 25 values must be above three times the usual value and above a third of the spike.
        """
        if self._age != _STAYS:
            return None
        level = median(list(self._values)[-_STAYS // 2 :])
        has_stayed = level > JUMP * self._usual and JUMP * level > self._peak
        return Rise(self._usual, level, _STAYS) if has_stayed else None

    def add(self, value: float) -> float | None:
        """Add a value. If the value is a spike, return the running median of the values before it, otherwise None."""
        if not math.isfinite(value):
            return None
        values = self._values
        median = self.median_below(value) if value > self.limit else None  # most values need no call
        if not self._count:
            self._first = value
        if self._count < RECENT:
            self._largest = max(self._largest, abs(value))
            self._at_first = max(self._at_first, value)
        if values and values[-1] > self.highest:
            self.highest = values[-1]
        values.append(value)
        if len(values) >= LEAST:
            self.limit = JUMP * value
        self._count, self._age = self._count + 1, self._age + 1
        if median is not None:
            self._peak, self._usual, self._age = value, median, 0
        return median

    def median_below(self, value: float) -> float | None:
        """Return the running median if a value would be a spike, otherwise None. The value is not added."""
        # The median is computed only for candidates, which are rare.
        return self.median if value > self.limit and self._is_spike(value) else None

    def early_median_below(self, value: float) -> float | None:
        """Return the running median if a value would be a spike, but is one of the first 20, which are never spikes."""
        is_candidate = 0 < len(self._values) < LEAST and value > JUMP * self._values[-1]
        return self.median if is_candidate and self._is_spike(value) else None

    @property
    def recent_limit(self) -> float:
        """The limit that a spike must exceed: three times the largest of the last ten values."""
        return JUMP * max(islice(reversed(self._values), RECENT))

    def exceeds_spike(self) -> float | None:
        """Return the median before the last spike if the last value is the largest since then, otherwise None.

        Only the ten values after a spike belong to the spike.
        """
        if not 0 < self._age <= RECENT or self._values[-1] <= self._peak:
            return None
        self._peak = self._values[-1]
        return self._usual

    def _is_spike(self, value: float) -> bool:
        middle = self.median
        if value < max(self.factor * middle, _SHARE * self._at_first) or middle <= 0:
            return False
        logs = [math.log(max(each / middle, _SMALLEST)) for each in self._values]
        deviation = sorted(map(abs, logs))[len(logs) // 2] / _NORMAL
        return value > self.recent_limit and math.log(value / middle) > _DEVIATIONS * deviation

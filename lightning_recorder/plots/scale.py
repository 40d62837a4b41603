"""Where a value lies between the two ends of an axis or of a row of colours."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.plots.arrays import Floats

__all__ = ["Kind", "Scale", "number", "scale_of", "value_scale"]

Kind = Literal["linear", "log", "symlog"]

# The most powers of ten that an axis shows: the rest of float64's would take all the room for numbers nobody reads.
_DECADES = 12
# Beyond this ratio of the largest to a small value a linear scale shows the small ones as nothing.
_WIDE = 50.0


@dataclass(frozen=True)
class Scale:
    """A monotone map of the values between ``low`` and ``high`` to 0 … 1; what lies beyond goes to the nearer end.

    ``symlog`` is ``sign(v) log(1 + |v| / threshold)``: as good as linear below the threshold, logarithmic above it.

    Args:
        kind: ``linear``, ``log`` or ``symlog``.
        low: What lies at 0.
        high: What lies at 1; greater than ``low``.
        threshold: Of ``symlog``.

    Example:
        >>> Scale("log", 0.01, 100.0).place([0.01, 1.0, 1000.0]).round(3).tolist()
        [0.0, 0.5, 1.0]
        >>> Scale("linear", -1.0, 1.0).ticks(5)
        [(0.0, '-1'), (0.25, '-0.5'), (0.5, '0'), (0.75, '0.5'), (1.0, '1')]
    """

    kind: Kind
    low: float
    high: float
    threshold: float = 1.0

    def place(self, values: Any) -> Floats:
        """Where values lie, in their shape, float64; NaN where they are NaN."""
        low, high = self._bent(np.array([self.low, self.high]))
        with np.errstate(invalid="ignore", over="ignore"):
            bent = self._bent(np.clip(np.asarray(values, dtype=np.float64), self.low, self.high))
            places: Floats = np.clip((bent - low) / (high - low), 0.0, 1.0)
        return places

    def values(self, places: Any) -> Floats:
        """The values that lie at places from 0 to 1; the inverse of :meth:`place`."""
        low, high = self._bent(np.array([self.low, self.high]))
        bent = low + np.asarray(places, dtype=np.float64) * (high - low)
        if self.kind == "linear":
            # In parts, since the distance of two float64 can be more than a float64.
            found = bent * self._unit
        elif self.kind == "log":
            found = np.exp(bent)
        else:
            size = np.abs(bent)
            with np.errstate(divide="ignore", over="ignore"):
                # exp(size) alone may be too large where the product is not.
                found = np.sign(bent) * np.exp(math.log(self.threshold) + size + np.log1p(-np.exp(-size)))
        clipped: Floats = np.clip(found, self.low, self.high)
        return clipped

    @property
    def _unit(self) -> float:
        return max(abs(self.low), abs(self.high)) or 1.0

    def _bent(self, values: Floats) -> Floats:
        if self.kind == "linear":
            return values / self._unit
        with np.errstate(divide="ignore"):
            if self.kind == "log":
                return np.log(values)
            # log(1 + |v| / c), without the quotient, which may be too large.
            return np.sign(values) * np.logaddexp(0.0, np.log(np.abs(values)) - math.log(self.threshold))

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """At most so many places, at least 2, with the numbers that lie there, from low to high."""
        chosen = _round_numbers(self.low, self.high, most) if self.kind == "linear" else self._powers(most)
        return [(float(self.place(value)), number(value)) for value in chosen]

    def _powers(self, most: int) -> list[float]:
        """Powers of ten, thinned; round numbers where there are less than two of them."""
        signs = (1,) if self.kind == "log" else (-1, 1)
        # Those nearest to 0 would stand in its place.
        least = self.low if self.kind == "log" else min(self.threshold * 10, self._unit)
        first, last = math.floor(math.log10(least)), math.floor(math.log10(self._unit))
        zero = [0.0] if self.kind == "symlog" and self.low <= 0 <= self.high else []
        for every in range(1, last - first + 2):
            powers = [10.0**power for power in range(last, first - 1, -every)]
            # 10.0**power is off by a rounding from a bound that was read from text.
            found = [s * p for s in signs for p in powers if self._holds(s * p)]
            if len(found) + len(zero) <= most:
                break
        if len(found) + len(zero) > most:
            return sorted(found)
        if len(found) + len(zero) >= 2:
            return sorted(found + zero)
        return _round_numbers(self.low, self.high, most)

    def _holds(self, value: float) -> bool:
        slack = 1e-9 * abs(value)
        return self.low - slack <= value <= self.high + slack


def scale_of(values: NDArray[Any], *, log: bool | None = None) -> Scale:
    """The scale on which a statistic is shown: logarithmic for positive values over decades, symmetric for signed ones.

    Args:
        values: Of any shape; what is not finite is of no account, nor are zeros on a logarithmic scale.
        log: ``True`` or ``False`` to decide whether it is (sym)logarithmic.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Scale("linear", 0.0, 1.0)
    if finite.min() < 0:
        return _signed_scale_of(finite, log=log)
    positive = finite[finite > 0]
    if not positive.size:
        return Scale("linear", 0.0, 1.0)
    low, high = float(positive.min()), float(positive.max())
    wide = high / _WIDE > low if log is None else log
    if wide and low < high:
        return Scale("log", max(low, high * 10.0**-_DECADES), high)
    # From 0, unless what differs would then be one colour.
    floor = float(finite.min())
    return _widened(floor if floor > high / 2 else 0.0, high)


def _signed_scale_of(finite: NDArray[Any], *, log: bool | None = None) -> Scale:
    """A scale with 0 in its middle."""
    size = np.abs(finite[finite != 0])
    if not size.size:
        return Scale("linear", -1.0, 1.0)
    high = float(size.max())
    small = float(np.quantile(size, 0.1))
    if high / _WIDE / 10 > small if log is None else log:
        return Scale("symlog", -high, high, _threshold(small, high))
    return Scale("linear", -high, high)


def value_scale(low: float, high: float, spread: float) -> Scale:
    """The axis for values that lie between two ends.

    It is symlog where most values of a narrow histogram would take less than a fiftieth of a linear one. It is then
    linear as far as that histogram reaches, since on a logarithmic axis a bell around 0 would be two.

    Args:
        low: The smallest value.
        high: The largest value.
        spread: How wide the range is in which most values of a narrow histogram lie.
    """
    if spread > 0 and high / _WIDE - low / _WIDE > spread:
        return Scale("symlog", low, high, _threshold(spread, max(abs(low), abs(high))))
    return _widened(low, high)


def _threshold(small: float, high: float) -> float:
    """The power of ten below a small value, no more than the decades of an axis below the largest."""
    least = max(small, high * 10.0**-_DECADES, 1e-300)
    return float(10.0 ** math.floor(math.log10(least)))


def _widened(low: float, high: float) -> Scale:
    """A linear scale, also where all values are equal."""
    if high / 2 - low / 2 <= 1e-9 * max(abs(low), abs(high)):
        half = max(abs(high) / 2, 1e-300) if high else 1.0
        low, high = max(low - half, -1.7e308), min(high + half, 1.7e308)
    return Scale("linear", low, high)


def _round_numbers(low: float, high: float, most: int) -> list[float]:
    """At most so many multiples of 1, 2 or 5 times a power of ten between two ends."""
    unit = max(abs(low), abs(high)) or 1.0
    power = math.floor(math.log10(unit)) if unit > 1e-290 else 0
    size = 10.0**power
    # Of numbers near 1, since 5e308 / 2 is more than a float64 can be.
    start, end = low / size, high / size
    rough = max((end - start) / max(most - 1, 1), 1e-12)
    exponent = math.floor(math.log10(rough))
    for factor in (1, 2, 5, 10, 20, 50):
        distance = factor * 10.0**exponent
        first, last = math.ceil(start / distance - 1e-9), math.floor(end / distance + 1e-9)
        if last - first + 1 <= most:
            break
    return [position * distance * size for position in range(first, last + 1)]


def number(value: float) -> str:
    """A number in few characters.

    Example:
        >>> [number(value) for value in (0.0, 1.0, -0.25, 1234567.0, 1e-7, 0.30000000000000004, float("nan"))]
        ['0', '1', '-0.25', '1.23e6', '1e-7', '0.3', 'NaN']
    """
    if math.isnan(value):
        return "NaN"
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.6g}" if abs(value) >= 1000 else f"{value:.3g}"

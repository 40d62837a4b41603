"""Axes of an image: checked arrays, scales of values, and columns of recorded steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError

__all__ = [
    "Columns",
    "Floats",
    "Scale",
    "checked_degrees",
    "checked_names",
    "checked_steps",
    "columns_of",
    "furthest",
    "number",
    "scale_of",
    "to_floats",
    "value_scale",
]

Floats = NDArray[np.float64]


def to_floats(name: str, values: Any, expected: str, *dimensions: int) -> Floats:
    """Convert numbers to a float64 array. Values that already are float64 on the CPU are not copied.

    Args:
        name: The name of the argument, for the error message.
        values: A tensor, an array or a nested sequence of numbers.
        expected: A description of the allowed shapes, for example ``[layers, steps]``.
        dimensions: The allowed numbers of dimensions.

    Raises:
        ArgumentError: If the values are not numbers or have a wrong number of dimensions. The message gives the
            expected shape.

    Note:
        A tensor on a device is copied to the host, which synchronizes the device.
    """
    if isinstance(values, torch.Tensor):
        if values.device.type == "meta" or values.is_complex() or values.layout != torch.strided:
            raise ArgumentError(f"{name} must be numbers {expected}, got a tensor that has no such values")
        values = values.detach().to("cpu", torch.float64).numpy()
    try:
        found = np.asarray(values)
        if found.dtype.kind not in "fiub":
            raise TypeError(f"an array of {found.dtype}")
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name} must be numbers {expected}, got {error}") from error
    if found.ndim not in dimensions:
        raise ArgumentError(f"{name} must have the shape {expected}, got {list(found.shape)}")
    return found.astype(np.float64, copy=False)


def checked_steps(steps: Any) -> Floats:
    """Convert steps to float64, ``[steps]``.

    Raises:
        ArgumentError: If the steps are not finite or not strictly ascending.
    """
    found = to_floats("steps", steps, "[steps]", 1)
    if not np.isfinite(found).all() or (np.diff(found) <= 0).any():
        raise ArgumentError("steps must be finite and ascend, each greater than the one before")
    return found


def checked_names(names: Sequence[str], count: int, what: str) -> list[str]:
    """Convert names to strings and check that there is one per row.

    Raises:
        ArgumentError: If the number of names differs from ``count``.
    """
    if isinstance(names, str) or len(names) != count:
        raise ArgumentError(f"names must be one for each of the {count} {what}, got {names!r:.80}")
    return [str(name) or "(root)" for name in names]


def checked_degrees(degrees: Any, count: int) -> Floats:
    """Convert degrees, which say how unusual each layer is, to float64, ``[layers]``.

    Raises:
        ArgumentError: If the number of degrees differs from ``count``.
    """
    found = to_floats("degrees", degrees, "[layers]", 1)
    if len(found) != count:
        raise ArgumentError(f"degrees must have the shape [{count}], got {list(found.shape)}")
    return found


_Kind = Literal["linear", "log", "symlog"]

# The maximum number of decades on an axis. The full range of float64 would leave no space for the values of interest.
_DECADES = 12
# Beyond this ratio of the largest to a small value, the small value is indistinguishable from 0 on a linear scale.
_WIDE = 50.0
_MOST_COLUMNS = 97  # even next to the longest names, a column is two pixels wide; narrower ones would be hard to see


@dataclass(frozen=True)
class Scale:
    """A monotonic map from values between ``low`` and ``high`` to the range 0 to 1. Other values are clipped.

    ``symlog`` is ``sign(v) log(1 + |v| / threshold)``. It is nearly linear below the threshold, logarithmic above it.

    Args:
        kind: ``linear``, ``log`` or ``symlog``.
        low: The value at 0.
        high: The value at 1; greater than ``low``.
        threshold: The threshold of ``symlog``.
        whole: True if the ticks of a linear scale must be whole numbers, such as steps.

    Example:
        >>> Scale("log", 0.01, 100.0).place([0.01, 1.0, 1000.0]).round(3).tolist()
        [0.0, 0.5, 1.0]
        >>> Scale("linear", -1.0, 1.0).ticks(5)
        [(0.0, '-1'), (0.25, '-0.5'), (0.5, '0'), (0.75, '0.5'), (1.0, '1')]
    """

    kind: _Kind
    low: float
    high: float
    threshold: float = 1.0
    whole: bool = False

    def place(self, values: Any) -> Floats:
        """Return the positions of values, float64 in the shape of the values; NaN for NaN."""
        low, high = self._bent(np.array([self.low, self.high]))
        with np.errstate(invalid="ignore", over="ignore"):
            bent = self._bent(np.clip(np.asarray(values, dtype=np.float64), self.low, self.high))
            places: Floats = np.clip((bent - low) / (high - low), 0.0, 1.0)
        return places

    def values(self, places: Any) -> Floats:
        """Return the values at positions from 0 to 1. This is the inverse of :meth:`place`."""
        low, high = self._bent(np.array([self.low, self.high]))
        bent = low + np.asarray(places, dtype=np.float64) * (high - low)
        if self.kind == "linear":
            # Compute in units of the largest magnitude, because the difference of two float64 may overflow.
            found = bent * self._unit
        elif self.kind == "log":
            found = np.exp(bent)
        else:
            size = np.abs(bent)
            with np.errstate(divide="ignore", over="ignore"):
                # Do not compute exp(size) alone, which may overflow even if the product does not.
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
            # log(1 + |v| / c), without the quotient, which may overflow.
            return np.sign(values) * np.logaddexp(0.0, np.log(np.abs(values)) - math.log(self.threshold))

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Return at most ``most`` (at least 2) ticks as positions with labels, from low to high."""
        least = 1.0 if self.whole else 0.0
        chosen = _round_numbers(self.low, self.high, most, least) if self.kind == "linear" else self._powers(most)
        return [(float(self.place(value)), number(value)) for value in chosen]

    def _powers(self, most: int) -> list[float]:
        """Return at most ``most`` powers of ten as ticks, or round numbers if fewer than two powers fit."""
        signs = (1,) if self.kind == "log" else (-1, 1)
        # Labels of smaller powers would overlap the label of 0.
        least = self.low if self.kind == "log" else min(self.threshold * 10, self._unit)
        first, last = math.floor(math.log10(least)), math.floor(math.log10(self._unit))
        zero = [0.0] if self.kind == "symlog" and self.low <= 0 <= self.high else []
        for every in range(1, last - first + 2):
            powers = [10.0**power for power in range(last, first - 1, -every)]
            # _holds has a tolerance, since 10.0**power is rounded and may differ from a bound parsed from text.
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
    """Return the scale for a statistic: logarithmic for positive values that span decades, symmetric for signed values.

    Values that are not finite are ignored. Zeros are ignored on a logarithmic scale. ``log`` forces or forbids a
    logarithmic scale (symlog for signed values).
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
    # The scale starts at 0, unless all values would then have nearly the same color.
    floor = float(finite.min())
    return _widened(floor if floor > high / 2 else 0.0, high)


def _signed_scale_of(finite: NDArray[Any], *, log: bool | None = None) -> Scale:
    """Return a scale with 0 at its center."""
    size = np.abs(finite[finite != 0])
    if not size.size:
        return Scale("linear", -1.0, 1.0)
    high = float(size.max())
    small = float(np.quantile(size, 0.1))
    if high / _WIDE / 10 > small if log is None else log:
        return Scale("symlog", -high, high, _threshold(small, high))
    return Scale("linear", -high, high)


def value_scale(low: float, high: float, spread: float) -> Scale:
    """Return the axis for values from ``low`` to ``high``.

    ``spread`` is the width of the range that contains most values of a narrow histogram. If this range would take less
    than a fiftieth of a linear axis, the axis is symlog. A symlog axis is nearly linear over a range of this width
    around 0. A logarithmic axis would show a bell curve around 0 with two peaks.
    """
    if spread > 0 and high / _WIDE - low / _WIDE > spread:
        return Scale("symlog", low, high, _threshold(spread, max(abs(low), abs(high))))
    return _widened(low, high)


def _threshold(small: float, high: float) -> float:
    """Return the power of ten below a small value, at most ``_DECADES`` decades below the largest value."""
    least = max(small, high * 10.0**-_DECADES, 1e-300)
    return float(10.0 ** math.floor(math.log10(least)))


def _widened(low: float, high: float) -> Scale:
    """Return a linear scale, widened if all values are equal."""
    if high / 2 - low / 2 <= 1e-9 * max(abs(low), abs(high)):
        half = max(abs(high) / 2, 1e-300) if high else 1.0
        low, high = max(low - half, -1.7e308), min(high + half, 1.7e308)
    return Scale("linear", low, high)


def _round_numbers(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """Return at most ``most`` round numbers from ``low`` to ``high``.

    The distance between them is 1, 2 or 5 times a power of ten, and at least ``least``.
    """
    unit = max(abs(low), abs(high)) or 1.0
    power = math.floor(math.log10(unit)) if unit > 1e-290 else 0
    size = 10.0**power
    # Scale to numbers near 1, because the difference of the bounds may overflow float64.
    start, end = low / size, high / size
    rough = max((end - start) / max(most - 1, 1), least / size, 1e-12)
    exponent = math.floor(math.log10(rough))
    for factor in (1, 2, 5, 10, 20, 50):
        distance = factor * 10.0**exponent
        first, last = math.ceil(start / distance - 1e-9), math.floor(end / distance + 1e-9)
        if last - first + 1 <= most and distance * size >= least * (1 - 1e-9):
            break
    return [position * distance * size for position in range(first, last + 1)]


@dataclass(frozen=True)
class Columns:
    """Equal intervals of the time axis. Each column has a contiguous range of recorded steps."""

    axis: Scale  # the scale of the time axis, in steps
    starts: NDArray[np.int64]  # the index of the first recorded step of each column, ``[columns]``
    stops: NDArray[np.int64]  # the index after the last recorded step of each column, ``[columns]``

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[slice]:
        return (slice(int(start), int(stop)) for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def most(self) -> int:
        """The largest number of steps in a column."""
        return int((self.stops - self.starts).max(initial=0))

    def by_length(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Group the columns by their number of steps. Yield column indices, ``[c]``, and step indices, ``[c, k]``.

        Most columns have about the same number of steps, so a few array operations handle all columns.
        """
        lengths = self.stops - self.starts
        for length in np.unique(lengths).tolist():
            group = np.flatnonzero(lengths == length)
            yield group, self.starts[group, None] + np.arange(length)

    def spread(self, width: int) -> NDArray[np.int64]:
        """Return the index of the column at each of ``width`` pixels."""
        return np.arange(width) * len(self) // max(width, 1)

    def left_of(self, steps: Floats, step: int, width: int) -> int:
        """Return the first pixel of the column that contains a step; for an unrecorded step, the next recorded step.

        All columns together are ``width`` pixels wide.
        """
        place = min(int(np.searchsorted(steps, step)), int(self.stops[-1]) - 1)
        column = int(np.searchsorted(self.stops, place, side="right"))
        return -(-column * width // len(self))


def columns_of(steps: Floats, most: int = _MOST_COLUMNS) -> Columns:
    """Divide ascending steps into at most ``most`` columns. An interval without a step shows the nearest step."""
    gaps = np.diff(steps)
    low, high = steps[0] - (gaps[0] / 2 if len(gaps) else 0.5), steps[-1] + (gaps[-1] / 2 if len(gaps) else 0.5)
    count = len(steps)
    # If there are few equidistant steps, each has its own column. Otherwise use the maximum number of columns, so that
    # their boundaries are close to the true steps.
    if count > most or (count > 1 and gaps.max() > gaps.min() * (1 + 1e-9)):
        count = most
    bounds = np.linspace(low, high, count + 1)
    starts = np.searchsorted(steps, bounds[:-1], side="left")
    stops = np.searchsorted(steps, bounds[1:], side="left")
    empty = stops <= starts
    nearest = np.searchsorted((steps[1:] + steps[:-1]) / 2, (bounds[:-1] + bounds[1:]) / 2)
    starts, stops = np.where(empty, nearest, starts), np.where(empty, nearest + 1, stops)
    axis = Scale("linear", float(low), float(high), whole=bool((steps == np.round(steps)).all()))
    return Columns(axis, starts.astype(np.int64), stops.astype(np.int64))


def number(value: float) -> str:
    """Format a number in few characters.

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


def furthest(values: Floats, recorded: NDArray[np.bool_]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the most conspicuous value of each cell: an infinity, else NaN, else the value furthest from 0.

    So spikes and NaN stay visible if several records share a column.

    Args:
        values: The values, ``[rows, columns, k]``.
        recorded: A mask of the recorded values, ``[rows, columns, k]``. Other values are ignored.

    Returns:
        The values, ``[rows, columns]``, and a mask of the cells with a recorded value, ``[rows, columns]``.
    """
    weight = np.abs(values)
    # NaN ranks above every finite value, and an infinity above NaN.
    weight = np.where(np.isnan(weight), np.finfo(np.float64).max, weight)
    weight = np.where(recorded, weight, -1.0)
    chosen = weight.argmax(axis=-1, keepdims=True)
    return np.take_along_axis(values, chosen, axis=-1)[..., 0], np.asarray(recorded.any(axis=-1))

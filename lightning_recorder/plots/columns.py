"""Assignment of recorded steps to the columns of an image."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.plots.arrays import Floats
from lightning_recorder.plots.scale import Scale

__all__ = ["Columns", "columns_of", "furthest"]

_MOST_COLUMNS = 97  # two pixels per column next to the longest names; more columns would be indistinguishable


@dataclass(frozen=True)
class Columns:
    """Equal intervals of the time axis, each with a contiguous range of recorded steps.

    Args:
        axis: The scale of the time axis, in steps.
        starts: The index of the first recorded step of each column, ``[columns]``.
        stops: The index after the last recorded step of each column, ``[columns]``.
    """

    axis: Scale
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[slice]:
        return (slice(int(start), int(stop)) for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def most(self) -> int:
        """The largest number of steps in a column."""
        return int((self.stops - self.starts).max(initial=0))

    def spread(self, width: int) -> NDArray[np.int64]:
        """Return the index of the column at each of ``width`` pixels."""
        return np.arange(width) * len(self) // max(width, 1)


def columns_of(steps: Floats, most: int = _MOST_COLUMNS) -> Columns:
    """Divide ascending steps into columns; an interval without a step shows the nearest step.

    Args:
        steps: The steps, ``[steps]``, at least one.
        most: The maximum number of columns.
    """
    gaps = np.diff(steps)
    low, high = steps[0] - (gaps[0] / 2 if len(gaps) else 0.5), steps[-1] + (gaps[-1] / 2 if len(gaps) else 0.5)
    count = len(steps)
    # Equidistant steps have one column each. Others use the maximum, so that the boundaries lie close to the true
    # steps.
    if count > most or (count > 1 and gaps.max() > gaps.min() * (1 + 1e-9)):
        count = most
    bounds = np.linspace(low, high, count + 1)
    starts = np.searchsorted(steps, bounds[:-1], side="left")
    stops = np.searchsorted(steps, bounds[1:], side="left")
    empty = stops <= starts
    nearest = np.searchsorted((steps[1:] + steps[:-1]) / 2, (bounds[:-1] + bounds[1:]) / 2)
    starts, stops = np.where(empty, nearest, starts), np.where(empty, nearest + 1, stops)
    return Columns(Scale("linear", float(low), float(high)), starts.astype(np.int64), stops.astype(np.int64))


def furthest(values: Floats, recorded: NDArray[np.bool_]) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the most conspicuous value of each row: an infinity, else NaN, else the value furthest from 0.

    This keeps spikes and NaN visible if several steps share a column.

    Args:
        values: The values, ``[rows, k]``.
        recorded: A mask of the recorded values, ``[rows, k]``; all others are ignored.

    Returns:
        The values, ``[rows]``, and a mask of the rows that have any recorded value, ``[rows]``.
    """
    weight = np.abs(values)
    # NaN ranks above every finite value, and an infinity above NaN.
    weight = np.where(np.isnan(weight), np.finfo(np.float64).max, weight)
    weight = np.where(recorded, weight, -1.0)
    chosen = weight.argmax(axis=-1)
    return values[np.arange(len(values)), chosen], np.asarray(recorded.any(axis=-1))

"""Which recorded steps each column of a picture shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.plots.arrays import Floats
from lightning_recorder.plots.scale import Scale

__all__ = ["Columns", "columns_of", "furthest"]

_MOST_COLUMNS = 97  # two pixels each beside the longest names; more would hardly be told apart


@dataclass(frozen=True)
class Columns:
    """Equal parts of the time axis, each with a run of recorded steps.

    Args:
        axis: The steps from the left end to the right one.
        starts: The first recorded step of each part, by its number, ``[columns]``.
        stops: One behind the last.
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
        """How many steps the fullest column has."""
        return int((self.stops - self.starts).max(initial=0))

    def spread(self, width: int) -> NDArray[np.int64]:
        """The column at each of ``width`` pixels."""
        return np.arange(width) * len(self) // max(width, 1)


def columns_of(steps: Floats, most: int = _MOST_COLUMNS) -> Columns:
    """The columns of ascending steps; where none lies in a part of the axis, it shows the nearest one.

    Args:
        steps: ``[steps]``, at least one.
        most: The most columns.
    """
    gaps = np.diff(steps)
    low, high = steps[0] - (gaps[0] / 2 if len(gaps) else 0.5), steps[-1] + (gaps[-1] / 2 if len(gaps) else 0.5)
    count = len(steps)
    # Steps at equal distances have a column each; otherwise as many as may be, for the boundaries to lie right.
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
    """Of each row, ``[rows, k]``, the value that tells most: an infinite one, else NaN, else that furthest from 0.

    So no spike is lost where several steps share a column, nor a NaN.

    Args:
        values: ``[rows, k]``.
        recorded: Which of them were recorded; the others take no part.

    Returns:
        ``[rows]`` values, and whether the row has any.
    """
    weight = np.abs(values)
    # NaN outdoes every finite value, and an infinite one NaN.
    weight = np.where(np.isnan(weight), np.finfo(np.float64).max, weight)
    weight = np.where(recorded, weight, -1.0)
    chosen = weight.argmax(axis=-1)
    return values[np.arange(len(values)), chosen], np.asarray(recorded.any(axis=-1))

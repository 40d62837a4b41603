"""Plot of the distribution of the values of one layer over all steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_recorder.errors import ArgumentError
from lightning_recorder.plots.arrays import Floats, checked_steps
from lightning_recorder.plots.axes import Columns, Scale, columns_of, number
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.colours import VIRIDIS, Mark, cover, paint
from lightning_recorder.plots.frame import (
    BAR_ROOM,
    RIGHT,
    TOP,
    WIDTH,
    blank,
    bottom_room,
    colour_bar,
    new_canvas,
    notes_below,
    numbers_below,
    numbers_left,
)
from lightning_recorder.plots.rebin import edges_along, shares, to_histograms, value_axis

__all__ = ["histogram_over_time"]

_BINS, _BIN_PX = 145, 2  # odd, so that 0 is the center of a bin on a symmetric axis
_LEFT = 60
_LEAST_SHARE = 1e-5  # all rarer values have this colour


def histogram_over_time(steps: Any, histograms: Any, *, title: str, value: str = "value") -> Image:
    """Draw the fraction of values per bin as colours, with steps from left to right and values from bottom to top.

    The histograms may have different edges at each step. All are rebinned to 145 common bins. A bin that is cut in two
    is divided in proportion to the widths of its parts, so that the fractions of a step add up to 1. The common bins
    are equally high in the image. The axis is linear, or symlog (linear around 0, logarithmic beyond) if the bulk of
    the values would otherwise be too thin to see. If several steps share a column, it shows the mean of their
    fractions. Empty bins are white.

    Args:
        steps: The steps in ascending order, ``[steps]``.
        histograms: One :class:`~lightning_recorder.reductions.Histogram` per step, or counts of the fixed bins,
            ``[steps, 2048]``; see ``ExponentHistogram``.
        title: The title of the image.
        value: The name of the values, with a unit if they have one.

    Returns:
        The image, ``[404, 350, 3]``, or slightly higher if there are notes.

    Raises:
        ArgumentError: If the numbers of histograms and steps differ, or if the steps do not ascend.
    """
    steps = checked_steps(steps)
    found = to_histograms(histograms)
    if len(found) != len(steps):
        raise ArgumentError(f"histograms must be one for each of the {len(steps)} steps, got {len(found)}")
    axis = value_axis(found)
    if axis is None:
        return blank(title, "no finite value was recorded")
    edges = edges_along(axis, _BINS)
    columns = columns_of(steps)
    each = np.stack([shares(histogram, edges) for histogram in found], axis=1)
    cells = np.stack([_mean(each[:, run]) for run in columns], axis=1)
    return _drawn(title, value, cells[::-1], columns, axis)


def _mean(some: Floats) -> Floats:
    """Return the mean of the columns that have values."""
    known = ~np.isnan(some[0])
    return some[:, known].mean(axis=1) if known.any() else some[:, 0]


def _drawn(title: str, value: str, cells: Floats, columns: Columns, axis: Scale) -> Image:
    largest = float(np.nanmax(cells))
    colours = Scale("log", min(_LEAST_SHARE, largest / 10), largest)
    area = (_LEFT, TOP + BAR_ROOM, WIDTH - RIGHT - _LEFT, _BINS * _BIN_PX)
    across = columns.spread(area[2])
    cells = np.where(cells == 0, np.nan, np.where(np.isnan(cells), -1.0, cells))
    pixels = np.repeat(paint(cells, colours, VIRIDIS)[:, across], _BIN_PX, axis=0)
    missing = np.repeat((cells == -1.0)[:, across], _BIN_PX, axis=0)
    marks: list[Mark] = ["missing"] if missing.any() else []
    cover(pixels, {"missing": missing})
    notes = [f"each column: the mean of up to {columns.most:,} steps"] if columns.most > 1 else []
    if axis.kind == "symlog":
        notes.append(f"values: logarithmic on both sides of 0, linear below {number(axis.threshold)}")
    canvas = new_canvas(area[1] + area[3] + bottom_room(notes, marks), title)
    canvas.image(area[0], area[1], pixels)
    canvas.frame(*area)
    numbers_left(canvas, area, axis, f"{value} (symlog)" if axis.kind == "symlog" else value)
    numbers_below(canvas, area, columns.axis, "step")
    colour_bar(canvas, area, colours, VIRIDIS, "share of the values in a bin (log scale)")
    notes_below(canvas, area, notes, marks)
    return canvas.pixels()

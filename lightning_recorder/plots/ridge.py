"""Plot of the distributions of the values of all layers at one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_recorder.errors import check_integer
from lightning_recorder.plots.arrays import Floats, checked_names
from lightning_recorder.plots.axes import Scale, number
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.colours import VIRIDIS
from lightning_recorder.plots.frame import (
    RIGHT,
    TOP,
    WIDTH,
    blank,
    bottom_room,
    evenly,
    new_canvas,
    notes_below,
    numbers_below,
    row_names,
    rows_room,
)
from lightning_recorder.plots.rebin import edges_along, shares, to_histograms, value_axis

__all__ = ["ridge"]

_BINS = 121  # odd, so that 0 is the center of a bin on a symmetric axis
_MOST_LAYERS = 80
_OVERLAP = 1.6  # height of a curve in rows


def ridge(
    names: Sequence[str],
    histograms: Any,
    *,
    title: str,
    step: int | None = None,
    value: str = "value",
    max_layers: int = 60,
) -> Image:
    """Draw one curve per layer, from top to bottom, on a common axis of values.

    The height is the square root of the fraction of values in each of 121 bins of equal width in the image, so that
    rare values are visible next to a peak. All curves have the same maximum height. If there are more than
    ``max_layers`` layers, evenly spaced ones are drawn, and a note says so.

    Args:
        names: The names of the layers, in order.
        histograms: One :class:`~lightning_recorder.reductions.Histogram` per layer, or counts of the fixed bins,
            ``[layers, 2048]``.
        title: The title of the image.
        step: The step at which the histograms were recorded.
        value: The name of the values, with a unit if they have one.
        max_layers: The maximum number of curves, up to 80.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the numbers of names and histograms differ.
    """
    check_integer("max_layers", max_layers, 1)
    found = to_histograms(histograms)
    names = checked_names(names, len(found), "histograms")
    chosen = evenly(len(found), min(max_layers, _MOST_LAYERS))
    axis = value_axis([found[row] for row in chosen])
    title = title if step is None else f"{title}, step {step:,}"
    if axis is None:
        return blank(title, "no finite value was recorded")
    notes = ["height: root of the share, scaled for each layer"]
    if len(chosen) < len(found):
        notes.append(f"{len(chosen)} of {len(found):,} layers, evenly spread from the first to the last")
    if axis.kind == "symlog":
        notes.append(f"values: logarithmic on both sides of 0, linear below {number(axis.threshold)}")
        notes.append("a bell that is wider than the linear part has two peaks")
    names = [names[row] if found[row].count else f"{names[row]} (none)" for row in chosen]
    edges = edges_along(axis, _BINS)
    parts = [shares(found[row], edges) for row in chosen]
    return _drawn(title, names, parts, axis, f"{value} (symlog)" if axis.kind == "symlog" else value, notes)


def _drawn(title: str, names: list[str], parts: list[Floats], axis: Scale, value: str, notes: list[str]) -> Image:
    distance = int(np.clip(300 // len(names), 14, 34))
    left, head = rows_room(names), round(distance * (_OVERLAP - 1))
    area = (left, TOP + head, WIDTH - RIGHT - left, len(names) * distance)
    canvas = new_canvas(area[1] + area[3] + bottom_room(notes), title)
    curves = [_curve(each, row, distance, head, area[2]) for row, each in enumerate(parts)]
    inside = VIRIDIS[np.linspace(40, 215, len(curves)).round().astype(int)].tolist()
    colours = ["#{:02x}{:02x}{:02x}".format(*each) for each in inside]
    canvas.ridges(
        left,
        TOP,
        area[2],
        area[3] + head,
        [(curve, colour, "#ffffff") for curve, colour in zip(curves, colours, strict=True)],
    )
    canvas.frame(left, TOP, area[2], area[3] + head)
    # Each name stands next to the baseline of its curve.
    row_names(canvas, (left, area[1] + distance // 2 - 5, *area[2:]), names, distance)
    numbers_below(canvas, area, axis, value)
    notes_below(canvas, area, notes)
    return canvas.pixels()


def _curve(parts: Floats, row: int, distance: int, head: int, width: int) -> Floats:
    """Return the corners of a curve, ``[k, 2]``: a step function with the width of the bins."""
    parts = np.sqrt(np.nan_to_num(parts))
    heights = parts / (parts.max() or 1.0) * distance * _OVERLAP * 0.95
    ground = head + (row + 1) * distance - 0.5
    x = np.repeat(np.linspace(0, width, len(parts) + 1), 2)
    y = ground - np.concatenate(([0.0], np.repeat(heights, 2), [0.0]))
    return np.stack((x, y), axis=-1)

"""How the values of all layers are spread, at one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_recorder.errors import check_integer
from lightning_recorder.plots.arrays import Floats, checked_names
from lightning_recorder.plots.blank import blank
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.colours import VIRIDIS
from lightning_recorder.plots.frame import (
    TOP,
    WIDTH,
    bottom_room,
    evenly,
    new_canvas,
    notes_below,
    numbers_below,
    row_names,
    rows_room,
)
from lightning_recorder.plots.rebin import edges_along, shares, to_histograms, value_axis
from lightning_recorder.plots.scale import number

__all__ = ["ridge"]

_BINS = 181  # odd, so that 0 lies inside a bin where the axis is symmetric
_RIGHT = 28
_MOST_LAYERS = 80
_OVERLAP = 1.6  # how many rows high a curve is


def ridge(
    names: Sequence[str],
    histograms: Any,
    *,
    title: str,
    step: int | None = None,
    value: str = "value",
    max_layers: int = 60,
) -> Image:
    """A curve for each layer, the first one on top, on one axis of values.

    The height is the square root of the share of values in each of 181 bins of equal width in the picture, so that
    what is rare is seen beside a peak; each curve reaches the same height. Of more than ``max_layers`` layers so many
    are drawn, evenly spread, and the picture says so.

    Args:
        names: Of the layers, in order.
        histograms: For each layer a :class:`~lightning_recorder.Histogram`; or ``[layers, 2048]`` counts of the fixed
            bins.
        title: Of the picture.
        step: The step at which they were recorded.
        value: What the values are, with a unit if there is one.
        max_layers: The most curves, up to 80.

    Returns:
        ``[height, 900, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If there are not as many names as histograms.
    """
    check_integer("max_layers", max_layers, 1)
    found = to_histograms(histograms)
    names = checked_names(names, len(found), "histograms")
    chosen = evenly(len(found), min(max_layers, _MOST_LAYERS))
    shown = [found[row] for row in chosen]
    axis = value_axis(shown)
    title = title if step is None else f"{title}, step {step:,}"
    if axis is None:
        return blank(title, "no finite value was recorded")
    edges = edges_along(axis, _BINS)
    notes = ["height: square root of the share of the values in a bin; each layer reaches the same height"]
    if len(chosen) < len(found):
        notes.append(f"{len(chosen)} of {len(found):,} layers, evenly spread from the first to the last")
    if axis.kind == "symlog":
        notes.append(
            f"values: logarithmic on both sides of 0, linear below {number(axis.threshold)}; wider bells have two humps"
        )
    distance = int(np.clip(420 // len(shown), 15, 44))
    names = [name if each.count else f"{name} (none)" for name, each in ((names[r], found[r]) for r in chosen)]
    left = rows_room(names)
    head = round(distance * (_OVERLAP - 1))
    area = (left, TOP + head, WIDTH - _RIGHT - left, len(shown) * distance)
    canvas = new_canvas(sum(area[1::2]) + bottom_room(notes), title)
    curves = [_curve(shares(each, edges), row, distance, head, area[2]) for row, each in enumerate(shown)]
    inside = VIRIDIS[np.linspace(40, 215, len(curves)).round().astype(int)]
    canvas.ridges(
        left,
        TOP,
        area[2],
        area[3] + head,
        [
            (curve, "#{:02x}{:02x}{:02x}".format(*colour), "#ffffff")
            for curve, colour in zip(curves, inside, strict=True)
        ],
    )
    canvas.frame(left, TOP, area[2], area[3] + head)
    # Names stand at the ground lines of their curves.
    row_names(canvas, (left, area[1] + distance // 2 - 6, *area[2:]), names, distance)
    numbers_below(canvas, area, axis, f"{value} (symlog)" if axis.kind == "symlog" else value)
    notes_below(canvas, area[1] + area[3] + 62, notes)
    return canvas.pixels()


def _curve(parts: Floats, row: int, distance: int, head: int, width: int) -> Floats:
    """The corners of a curve, ``[k, 2]``: steps as wide as the bins."""
    parts = np.sqrt(np.nan_to_num(parts))
    heights = parts / (parts.max() or 1.0) * distance * _OVERLAP * 0.95
    ground = head + (row + 1) * distance - 0.5
    x = np.repeat(np.linspace(0, width, len(parts) + 1), 2)
    y = ground - np.concatenate(([0.0], np.repeat(heights, 2), [0.0]))
    return np.stack((x, y), axis=-1)

"""One statistic of all layers over all steps in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError
from lightning_recorder.plots.arrays import Floats, checked_names, checked_steps, to_floats
from lightning_recorder.plots.blank import blank
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.colours import cover, marks_of, paint, table_for
from lightning_recorder.plots.columns import Columns, columns_of, furthest
from lightning_recorder.plots.frame import (
    BAR_ROOM,
    RIGHT,
    TOP,
    WIDTH,
    bottom_room,
    colour_bar,
    new_canvas,
    notes_below,
    numbers_below,
    row_names,
    rows_room,
)
from lightning_recorder.plots.scale import Scale, number, scale_of

__all__ = ["heat_map"]

_MOST_ROWS = 260
_ROW_PX = (5, 24)  # the thinnest and the thickest row
_COMFORTABLE_PX = 14  # a row with its name; 12 are enough, which each of up to 116 rows has
_TALLEST_PX = 1400


def heat_map(
    steps: Any,
    names: Sequence[str],
    values: Any,
    *,
    statistic: str,
    title: str,
    recorded: NDArray[np.bool_] | None = None,
    log: bool | None = None,
) -> Image:
    """Layers from top to bottom, steps from left to right, the value of a statistic as colour.

    Positive values that span more than a factor of 50 are shown on a logarithmic scale, signed ones on a symmetric one;
    a statistic whose name ends with ``fraction`` from 0 to 1. What is not finite, was not recorded, or is 0 on a
    logarithmic scale, has a pattern, which is explained below. At most 260 rows and 97 columns are drawn: where
    several values share a cell, it shows the one that is furthest from 0, and any that is not finite before that. So a
    PNG of it has at most 300 KB, of noise; of a training of 40 layers it has about 30.

    Args:
        steps: ``[steps]``, ascending.
        names: Of the layers, in the order of the rows.
        values: ``[layers, steps]``.
        statistic: What they are, with a unit if there is one.
        title: Of the picture.
        recorded: ``[layers, steps]``, which of them were recorded; by default all, so that a NaN is one.
        log: Whether the scale of the colours is logarithmic; by default the values decide.

    Returns:
        ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If shapes do not agree or steps do not ascend.
    """
    steps = checked_steps(steps)
    values = to_floats("values", values, "[layers, steps]", 2)
    names = checked_names(names, values.shape[0], "layers")
    recorded = np.ones(values.shape, dtype=bool) if recorded is None else np.asarray(recorded, dtype=bool)
    for what, shape in (("values", values.shape), ("recorded", recorded.shape)):
        if shape != (len(names), len(steps)):
            raise ArgumentError(f"{what} must have the shape [{len(names)}, {len(steps)}], got {list(shape)}")
    if not recorded.any():
        return blank(title, "nothing was recorded")
    columns = columns_of(steps)
    names, cells, there, joined = _joined(names, values, recorded, columns)
    scale = Scale("linear", 0.0, 1.0) if _is_share(statistic, cells) else scale_of(cells[there], log=log)
    notes = _notes(joined, columns.most, scale, cells[there])
    return _drawn(title, statistic, names, cells, there, columns, scale, notes)


def _is_share(statistic: str, values: Floats) -> bool:
    finite = values[np.isfinite(values)]
    return statistic.endswith("fraction") and bool(((finite >= 0) & (finite <= 1)).all())


def _joined(
    names: list[str], values: Floats, recorded: NDArray[np.bool_], columns: Columns
) -> tuple[list[str], Floats, NDArray[np.bool_], int]:
    """The cells that are drawn, and how many layers one of them is of."""
    pairs = [furthest(values[:, run], recorded[:, run]) for run in columns]
    cells, there = (np.stack(part, axis=1) for part in zip(*pairs, strict=True))
    joined = -(-len(names) // _MOST_ROWS)
    if joined > 1:
        starts = range(0, len(names), joined)
        pairs = [furthest(cells[row : row + joined].T, there[row : row + joined].T) for row in starts]
        cells, there = (np.stack(part) for part in zip(*pairs, strict=True))
        names = names[::joined]
    return names, cells, there, joined


def _notes(layers: int, steps: int, scale: Scale, values: Floats) -> list[str]:
    notes = []
    shared = [f"{count:,} {what}" for count, what in ((layers, "layers"), (steps, "steps")) if count > 1]
    if shared:
        notes.append(f"each cell: the value furthest from 0 of up to {' × '.join(shared)}")
    if scale.kind == "symlog":
        notes.append(f"colours: logarithmic on both sides of 0, linear below {number(scale.threshold)}")
    if scale.kind == "log" and (values[values > 0] < scale.low).any():
        notes.append("colours: below the scale as at its low end")
    return notes


def _drawn(
    title: str,
    statistic: str,
    names: list[str],
    cells: Floats,
    there: NDArray[np.bool_],
    columns: Columns,
    scale: Scale,
    notes: list[str],
) -> Image:
    row_px = int(np.clip(min(_TALLEST_PX // len(names), max(260 // len(names), _COMFORTABLE_PX)), *_ROW_PX))
    left, top = rows_room(names), TOP + BAR_ROOM
    area = (left, top, WIDTH - RIGHT - left, len(names) * row_px)
    # On the pixels and not on the cells, so that the patterns stay what they are.
    across = columns.spread(area[2])
    wide = np.repeat(cells[:, across], row_px, axis=0)
    marks = marks_of(wide, scale, np.repeat(there[:, across], row_px, axis=0))
    canvas = new_canvas(top + area[3] + bottom_room(notes, marks), title)
    pixels = np.repeat(paint(cells, scale, table_for(scale))[:, across], row_px, axis=0)
    cover(pixels, marks)
    canvas.image(left, top, pixels)
    canvas.frame(*area)
    row_names(canvas, area, names, row_px)
    numbers_below(canvas, area, columns.axis, "step")
    kind = {"linear": "", "log": " (log scale)", "symlog": " (symlog)"}[scale.kind]
    colour_bar(canvas, area, scale, table_for(scale), statistic + kind)
    notes_below(canvas, area, notes, marks)
    return canvas.pixels()

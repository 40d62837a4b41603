"""Heat map of one statistic over layers and steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.insight.unusual import unusualness
from lightning_recorder.plots.axes import (
    Columns,
    Floats,
    Scale,
    checked_degrees,
    checked_names,
    checked_steps,
    columns_of,
    furthest,
    number,
    scale_of,
    to_floats,
)
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import (
    BAR_ROOM,
    RIGHT,
    TOP,
    WIDTH,
    FoundAt,
    blank,
    bottom_room,
    chosen_rows,
    color_bar,
    cover,
    fitted_names,
    marks_of,
    new_canvas,
    notes_below,
    notes_on_findings,
    numbers_below,
    outline_findings,
    paint,
    row_names,
    rows_room,
    table_for,
)

__all__ = ["heat_map"]

_MOST_ROWS = 260
_ROW_PX = (5, 24)  # the minimum and the maximum height of a row
_COMFORTABLE_PX = 14  # the preferred height of a row; a name needs 12, and up to 116 rows have at least 12
_TALLEST_PX = 1400


def heat_map(
    steps: Any,
    names: Sequence[str],
    values: Any,
    *,
    statistic: str,
    title: str,
    recorded: NDArray[np.bool_] | None = None,
    undefined: NDArray[np.bool_] | None = None,
    log: bool | None = None,
    degrees: Any = None,
    max_layers: int = _MOST_ROWS,
    findings: Sequence[FoundAt] = (),
) -> Image:
    """Draw a statistic as colors, with layers from top to bottom and steps from left to right.

    Positive values that span more than a factor of 50 have a logarithmic scale. Signed values have a symmetric scale.
    A statistic whose name ends with ``fraction`` has a scale from 0 to 1. Values that are not finite, that were not
    recorded, or that are 0 on a logarithmic scale are drawn as patterns with a legend below.

    Layers that stand out have bold names: they are unlike the neighboring layers, equal layers or their own past. At
    most 260 rows and 97 columns are drawn. If there are more layers, only the layers that stand out and an even
    selection of the others are drawn, with a note. If several steps share a cell, it shows a value that is not finite,
    if there is one, and otherwise the value furthest from 0. These limits keep a PNG file below 300 KB for pure noise;
    a typical training of 40 layers takes about 30 KB.

    Args:
        steps: The steps in ascending order, ``[steps]``.
        names: The names of the layers, in the order of the rows.
        values: The values, ``[layers, steps]``.
        statistic: The name of the statistic, with a unit if it has one.
        title: The title of the image.
        recorded: A mask of the recorded values, ``[layers, steps]``. By default all values are recorded, so a NaN
            counts as a recorded value.
        undefined: A mask of recorded values that are undefined, ``[layers, steps]``, such as the ratio of an update to
            a weight of zero. Such a value is no sign of NaN in the training, so it has a pattern of its own. By default
            no value is undefined.
        log: If True or False, force or forbid a logarithmic scale. By default the values decide.
        degrees: How unusual each layer is, ``[layers]``. :func:`overview` passes degrees from all statistics. By
            default, the layers are compared by ``values``.
        max_layers: The maximum number of rows, up to 260.
        findings: The findings to mark. Their layers are preferred and have a red frame from the first step on.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the shapes do not match or the steps do not ascend.
    """
    steps = checked_steps(steps)
    values = to_floats("values", values, "[layers, steps]", 2)
    names = checked_names(names, values.shape[0], "layers")
    recorded = np.ones(values.shape, dtype=bool) if recorded is None else np.asarray(recorded, dtype=bool)
    undefined = np.zeros(values.shape, dtype=bool) if undefined is None else np.asarray(undefined, dtype=bool)
    for what, shape in (("values", values.shape), ("recorded", recorded.shape), ("undefined", undefined.shape)):
        if shape != (len(names), len(steps)):
            raise ArgumentError(f"{what} must have the shape [{len(names)}, {len(steps)}], got {list(shape)}")
    if not recorded.any():
        return blank(title, "nothing was recorded")
    undefined &= recorded
    recorded = recorded & ~undefined
    check_integer("max_layers", max_layers, 1)
    if degrees is None:
        bad = (recorded & ~np.isfinite(values)).astype(np.float64)
        what = statistic if statistic == "zero_fraction" else "size"
        degrees = unusualness(names, {what: np.where(recorded, values, np.nan), "nan_count": bad})
    always = [each.row for each in findings if each.row is not None]
    rows, marked, chosen = chosen_rows(names, checked_degrees(degrees, len(names)), min(max_layers, _MOST_ROWS), always)
    names, values, recorded = fitted_names(rows, names), values[rows], recorded[rows]
    columns = columns_of(steps)
    cells, there = _joined(values, recorded, columns)
    is_undefined = _joined(values, undefined[rows], columns)[1] & ~there
    scale = Scale("linear", 0.0, 1.0) if _is_share(statistic, cells) else scale_of(cells[there], log=log)
    shown = [each._replace(row=rows.index(each.row)) for each in findings if each.row in rows]
    shown += [each for each in findings if each.row is None]
    notes = [*notes_on_findings(shown), *chosen, *_notes(columns.most, scale, cells[there])]
    return _drawn(title, statistic, names, cells, there, is_undefined, columns, scale, notes, marked, (shown, steps))


def _is_share(statistic: str, values: Floats) -> bool:
    finite = values[np.isfinite(values)]
    return statistic.endswith("fraction") and bool(((finite >= 0) & (finite <= 1)).all())


def _joined(values: Floats, recorded: NDArray[np.bool_], columns: Columns) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the values and the mask of the cells to draw, ``[layers, columns]``."""
    cells = np.empty((len(values), len(columns)))
    there = np.empty(cells.shape, dtype=bool)
    for group, places in columns.by_length():
        cells[:, group], there[:, group] = furthest(values[:, places], recorded[:, places])
    return cells, there


def _notes(steps: int, scale: Scale, values: Floats) -> list[str]:
    notes = ["each cell: the value furthest from 0 of its records"] if steps > 1 else []
    if scale.kind == "symlog":
        notes.append(f"colors: logarithmic on both sides of 0, linear below {number(scale.threshold)}")
    if scale.kind == "log" and (values[values > 0] < scale.low).any():
        notes.append("colors: below the scale as at its low end")
    return notes


def _drawn(
    title: str,
    statistic: str,
    names: list[str],
    cells: Floats,
    there: NDArray[np.bool_],
    undefined: NDArray[np.bool_],
    columns: Columns,
    scale: Scale,
    notes: list[str],
    marked: list[int],
    findings: tuple[Sequence[FoundAt], Floats],
) -> Image:
    row_px = int(np.clip(min(_TALLEST_PX // len(names), max(260 // len(names), _COMFORTABLE_PX)), *_ROW_PX))
    left, top = rows_room(names), TOP + BAR_ROOM
    area = (left, top, WIDTH - RIGHT - left, len(names) * row_px)
    # Make the masks for pixels instead of cells, so that the patterns are not stretched.
    across = columns.spread(area[2])
    wide = np.repeat(cells[:, across], row_px, axis=0)
    without_value = np.repeat(undefined[:, across], row_px, axis=0)
    marks = marks_of(wide, scale, np.repeat(there[:, across], row_px, axis=0) | without_value)
    marks = {mark: where for mark, each in marks.items() if (where := each & ~without_value).any()}
    marks |= {"undefined": without_value} if without_value.any() else {}
    canvas = new_canvas(top + area[3] + bottom_room(notes, marks), title)
    pixels = np.repeat(paint(cells, scale, table_for(scale))[:, across], row_px, axis=0)
    cover(pixels, marks)
    canvas.image(left, top, pixels)
    canvas.frame(*area)
    outline_findings(canvas, area, findings[0], columns, findings[1], row_px)
    row_names(canvas, area, names, row_px, marked)
    numbers_below(canvas, area, columns.axis, "step")
    kind = {"linear": "", "log": " (log scale)", "symlog": " (symlog)"}[scale.kind]
    color_bar(canvas, area, scale, table_for(scale), statistic + kind)
    notes_below(canvas, area, notes, marks)
    return canvas.pixels()

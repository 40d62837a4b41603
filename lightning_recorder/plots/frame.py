"""Colors of values, and the elements around the data in an image: title, axes, color bar, legend and notes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.finding import Finding, rows_of
from lightning_recorder.insight.unusual import choose, standing_out
from lightning_recorder.plots.axes import Columns, Floats, Scale
from lightning_recorder.plots.canvas import (
    DETAIL_PX,
    GREY,
    INK,
    TEXT_PX,
    TITLE_PX,
    Canvas,
    Image,
    every_nth,
    fitted,
    shortened,
    text_width,
    wrapped,
)

__all__ = [
    "BAR_ROOM",
    "MARGIN",
    "MARKS",
    "PURPLE_ORANGE",
    "RIGHT",
    "TOP",
    "VIRIDIS",
    "WIDTH",
    "Area",
    "FoundAt",
    "Mark",
    "Table",
    "blank",
    "bottom_room",
    "chosen_rows",
    "color_bar",
    "evenly",
    "fitted_names",
    "fitting_ticks",
    "marks_of",
    "new_canvas",
    "notes_below",
    "notes_on_findings",
    "numbers_below",
    "numbers_left",
    "outline_findings",
    "paint",
    "places_of",
    "plain",
    "row_names",
    "rows_room",
    "swatch",
    "table_for",
]

Table = NDArray[np.uint8]
"""A color table, ``[256, 3]``, from the lower to the upper end of a scale."""


def _table(colors: str) -> Table:
    """Interpolate equidistant colors to a table of 256 colors."""
    knots = np.array([[int(each[at : at + 2], 16) for at in (0, 2, 4)] for each in colors.split()], dtype=np.float64)
    places = np.linspace(0, len(knots) - 1, 256)
    mixed = [np.interp(places, np.arange(len(knots)), channel) for channel in knots.T]
    return np.stack(mixed, axis=-1).round().astype(np.uint8)


VIRIDIS = _table(
    "440154 470d60 48186a 482374 472d7b 453681 424086 3f4989 3b528b 375a8d 33638d 2f6a8e 2c728e 297a8e 26818e 23898e "
    "21908c 1f988b 1f9f88 21a685 28ae80 31b57b 3ebc74 4cc26c 5dc963 6ece58 82d34c 96d83f abdc32 c0df24 d5e21a eae51a "
    "fde725"
)
"""The color table for magnitudes. Lightness rises evenly, so the table is readable in greyscale and with any color
vision."""

PURPLE_ORANGE = _table("2d004b 542788 8073ac b2abd2 d8daeb f7f7f7 fee0b6 fdb863 e08214 b35806 7f3b08")
"""The color table for signed values. Purple and orange differ along the blue-yellow axis, which people with red-green
color blindness perceive fully. Red and blue would differ partly along the red-green axis."""

Mark = Literal["zero", "missing", "undefined", "nan", "inf"]

MARKS: Mapping[Mark, str] = {
    "zero": "0",
    "missing": "not recorded",
    "undefined": "undefined",
    "nan": "NaN",
    "inf": "infinite",
}
"""The meanings of the patterns. No pattern uses a color of the tables."""


_FLAT: Mapping[Mark, int] = {"zero": 255, "missing": 200, "inf": 0}


def table_for(scale: Scale) -> Table:
    """Return the color table for a scale: purple-orange if the scale includes negative values, else viridis."""
    return PURPLE_ORANGE if scale.low < 0 else VIRIDIS


def marks_of(values: Floats, scale: Scale, recorded: NDArray[np.bool_] | None = None) -> dict[Mark, NDArray[np.bool_]]:
    """Return masks of the values that have no color on a scale, by reason. Reasons that do not occur are left out.

    A logarithmic scale has no color for 0. By default, all values count as recorded.
    """
    missing = np.zeros(values.shape, dtype=bool) if recorded is None else ~recorded
    found: dict[Mark, NDArray[np.bool_]] = {
        "zero": (values == 0) & ~missing if scale.kind == "log" else np.zeros(values.shape, dtype=bool),
        "missing": missing,
        "nan": np.isnan(values) & ~missing,
        "inf": np.isinf(values) & ~missing,
    }
    return {mark: where for mark, where in found.items() if where.any()}


def paint(values: Floats, scale: Scale, table: Table) -> Image:
    """Return the colors of values, ``[…, 3]``. NaN is white, for a pattern to cover it."""
    places = scale.place(values)
    known = ~np.isnan(places)
    indices = (np.where(known, places, 0.0) * 255).round().astype(np.int64)
    return np.where(known[..., None], table[indices], np.uint8(255))


def pattern(mark: Mark, height: int, width: int) -> Image:
    """Return the pattern that replaces a color: white, grey, black, grey dots on white, or black stripes on white."""
    if mark in _FLAT:
        return np.full((height, width, 3), _FLAT[mark], dtype=np.uint8)
    rows, columns = np.indices((height, width))
    if mark == "undefined":
        dots = (rows % 4 == 1) & (columns % 4 == 1)
        return np.repeat(np.where(dots, 110, 255).astype(np.uint8)[..., None], 3, axis=-1)
    return np.repeat(np.where((rows - columns) % 8 < 4, 0, 255).astype(np.uint8)[..., None], 3, axis=-1)


def cover(pixels: Image, marks: Mapping[Mark, NDArray[np.bool_]]) -> None:
    """Draw the patterns over the marked pixels. Each mask is ``[height, width]``."""
    for mark, where in marks.items():
        pixels[where] = pattern(mark, *where.shape)[where]


# The width of an image card in TensorBoard, for any window size. TensorBoard scales images of other widths with
# ``image-rendering: pixelated``, which drops or repeats rows and columns of pixels and so damages the text.
WIDTH = 350
MARGIN = 4
TOP = 28  # height of the title
BAR_ROOM = 47  # height of the color bar above the data; beside the data, it would take a fifth of the width
RIGHT = 12  # space to the right of the data, for half of the last number of the axis
_BAR_PX = 9
_TICK_PX = 3
_AXIS_PX = 33  # height of the numbers and the title of the axis below the data
_NOTE_PX = 15
_MOST_ROOM = 134  # width of the names on the left; with margins this is two fifths of the image
_LABEL_PX = DETAIL_PX + 1
_BOLDER = 1.17  # bold letters are at most a sixth wider than regular ones
_TITLE_ROOM = (WIDTH - 2 * MARGIN) / _BOLDER
_ROW_GAP = 6  # distance between a name and the data

Area = tuple[int, int, int, int]
"""The position of the data: left, top, width and height in pixels."""


def new_canvas(height: int, title: str) -> Canvas:
    """Return an empty image with a title."""
    canvas = Canvas(WIDTH, height)
    canvas.text(MARGIN, 14, shortened(title, _TITLE_ROOM, px=TITLE_PX, head=0.6), px=TITLE_PX, bold=True)
    return canvas


def title_of(group: str, name: str, names: Sequence[str]) -> str:
    """Return a title with the name of a layer, shortened to fit and to stay distinct from the other names."""
    room = _TITLE_ROOM - text_width(f"{group}: ", TITLE_PX)
    return f"{group}: {fitted([name], room, px=TITLE_PX, among=names)[0]}"


def blank(title: str, why: str) -> Image:
    """Return a small image that explains why there is no plot, ``[100, 350, 3]``."""
    canvas = new_canvas(100, title)
    canvas.text(WIDTH / 2, 60, why, anchor="mm", color=GREY)
    return canvas.pixels()


def bottom_room(notes: Sequence[str], marks: Iterable[Mark] = (), *, axis: bool = True) -> int:
    """Return the height in pixels that :func:`numbers_below` and :func:`notes_below` need."""
    return (_AXIS_PX if axis else 4) + _NOTE_PX * (len(_lines(notes)) + bool(list(marks))) + 6


def numbers_below(canvas: Canvas, area: Area, axis: Scale, title: str) -> None:
    """Draw the axis below the data."""
    left, top, width, height = area
    _numbers_along(canvas, (left, top + height, width), axis)
    title = shortened(title, WIDTH - 2 * MARGIN, px=TEXT_PX)
    half = text_width(title) / 2
    canvas.text(min(left + width / 2, WIDTH - MARGIN - half), top + height + 25, title, anchor="mm")


def fitting_ticks(axis: Scale, width: int) -> list[tuple[float, str]]:
    """Return at most seven ticks (position and label) of an axis, as many as fit without touching."""
    for most in range(7, 2, -1):
        ticks = axis.ticks(most)
        ends = [(place * width, text_width(text, DETAIL_PX) / 2) for place, text in ticks]
        if all(b - a >= before + behind + 8 for (a, before), (b, behind) in pairwise(ends)):
            return ticks
    return axis.ticks(2)


def _numbers_along(canvas: Canvas, line: tuple[int, int, int], axis: Scale) -> None:
    """Draw numbers below a line, given by left, top and width."""
    left, top, width = line
    for place, text in fitting_ticks(axis, width):
        x = left + place * (width - 1)
        canvas.line([(x, top), (x, top + _TICK_PX)], GREY)
        half = text_width(text, DETAIL_PX) / 2
        canvas.text(max(half + 2, min(x, canvas.width - half - 2)), top + 10, text, px=DETAIL_PX, anchor="mm")


def numbers_left(canvas: Canvas, area: Area, axis: Scale, title: str) -> None:
    """Draw the axis to the left of the data. Values increase upwards."""
    left, top, _, height = area
    last = 1e9
    for place, text in axis.ticks(max(2, min(9, height // 30))):
        y = top + (1 - place) * height
        canvas.line([(left - _TICK_PX, y), (left - 1, y)], GREY)
        if y < last - DETAIL_PX - 2:
            canvas.text(left - _ROW_GAP, y, text, px=DETAIL_PX, anchor="rm")
            last = y
    canvas.upright_text(MARGIN + 5, top + height / 2, shortened(title, height, px=TEXT_PX))


def rows_room(names: Sequence[str]) -> int:
    """Return the width in pixels of the row names on the left."""
    widest = max((text_width(name, DETAIL_PX, bold=True) for name in _row_names(names)), default=0.0)
    return int(widest) + MARGIN + _ROW_GAP


def fitted_names(rows: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return the names of the given rows, shortened to fit on the left. They stay distinct from all other names."""
    return _row_names([names[row] for row in rows], names)


def _row_names(names: Sequence[str], among: Sequence[str] = ()) -> list[str]:
    return fitted(names, _MOST_ROOM / _BOLDER, among=among)  # the names of rows that stand out are bold


def row_names(canvas: Canvas, area: Area, names: Sequence[str], distance: float, marked: Sequence[int] = ()) -> None:
    """Draw the names to the left of their rows, as many as fit.

    ``marked`` are the rows that stand out, starting with the most unusual row. Their names are bold and are always
    drawn. If bold names are too close to each other, they are moved apart, with lines to their rows.
    """
    left, top, _, height = area
    shown = _row_names(names)
    middles = [top + (row + 0.5) * distance for row in range(len(names))]
    first = sorted(marked[: max(height // _LABEL_PX, 1)])
    places = _apart([middles[row] for row in first], top + height - _LABEL_PX / 2)
    for row, y in zip(first, places, strict=True):
        canvas.line([(left - 2, middles[row]), (left - _ROW_GAP + 1, y)], INK)
        canvas.text(left - _ROW_GAP, y, shown[row], px=DETAIL_PX, anchor="rm", bold=True)
    for row in every_nth(len(names), distance, _LABEL_PX):
        y = middles[row]
        if all(abs(y - other) >= _LABEL_PX for other in places):
            canvas.line([(left - _TICK_PX, y), (left - 1, y)], GREY)
            canvas.text(left - _ROW_GAP, y, shown[row], px=DETAIL_PX, anchor="rm")


def _apart(places: Sequence[float], last: float) -> list[float]:
    """Move ascending positions apart so that labels do not touch. No position becomes greater than ``last``."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + _LABEL_PX) if found else place)
    for row in reversed(range(len(found))):
        found[row] = min(found[row], last - (len(found) - 1 - row) * _LABEL_PX)
    return found


def chosen_rows(
    names: Sequence[str], degrees: Floats, most: int, always: Sequence[int] = ()
) -> tuple[list[int], list[int], list[str]]:
    """Choose at most ``most`` layers to draw. The layers in ``always`` are preferred.

    Returns:
        The chosen layers in order; the rows of the layers that stand out, starting with the most unusual; and notes.
    """
    raised = degrees.copy()
    raised[list(always)] = np.inf
    rows = choose(raised, most, names)
    marked = standing_out(degrees[rows])
    notes = []
    if len(rows) < len(degrees):
        most_unusual = "most unusual one" if len(marked) == 1 else f"{len(marked)} most unusual"
        first = f"the {most_unusual} with neighbors, others " if marked else ""
        hidden = len(degrees) - len(rows)
        notes.append(f"{len(rows)} of {len(degrees):,} layers: {first}evenly spread; {hidden:,} not shown")
    if marked:
        layers = "1 layer unlike its" if len(marked) == 1 else f"{len(marked)} layers unlike their"
        notes.append(f"bold: {layers} neighbors or past")
    return rows, marked, notes


def color_bar(canvas: Canvas, area: Area, scale: Scale, table: Table, label: str) -> None:
    """Draw the color bar above the data, with its numbers and a label."""
    left, top, width, _ = area
    y = top - BAR_ROOM + 16
    colors = table[np.linspace(0, 255, width).round().astype(int)]
    canvas.image(left, y, np.repeat(colors[None], _BAR_PX, axis=0))
    canvas.frame(left, y, width, _BAR_PX)
    _numbers_along(canvas, (left, y + _BAR_PX, width), scale)
    label = shortened(label, WIDTH - 2 * MARGIN)
    # Align the label with the left end of the bar, unless the label is too long.
    canvas.text(max(MARGIN, min(left, WIDTH - MARGIN - text_width(label, DETAIL_PX))), y - 9, label, px=DETAIL_PX)


def notes_below(
    canvas: Canvas, area: Area, notes: Sequence[str], marks: Iterable[Mark] = (), *, axis: bool = True
) -> None:
    """Draw the legend of the patterns, then the notes."""
    x, y = float(MARGIN), area[1] + area[3] + (_AXIS_PX if axis else 4) + _NOTE_PX // 2
    shown = list(marks)
    for mark in shown:
        x = swatch(canvas, x, y, pattern(mark, 10, 16), MARKS[mark])
    y += _NOTE_PX * bool(shown)
    for note in _lines(notes):
        canvas.text(MARGIN, y, note, px=DETAIL_PX, color="#4d4d4d")
        y += _NOTE_PX


def _lines(notes: Sequence[str]) -> list[str]:
    return [line for note in notes for line in wrapped(note, WIDTH - 2 * MARGIN)]


def swatch(canvas: Canvas, x: float, y: float, pixels: Image, meaning: str) -> float:
    """Draw a color sample with its meaning. Return the x coordinate for the next sample."""
    height, width = len(pixels), len(pixels[0])
    left, top = round(x), round(y - height / 2)
    canvas.image(left, top, pixels)
    canvas.frame(left, top, width, height)
    canvas.text(x + width + 5, y, meaning, px=DETAIL_PX, color=INK)
    return x + width + 5 + text_width(meaning, DETAIL_PX) + 12


_RED = "#e3000f"  # in neither color table


class FoundAt(NamedTuple):
    """The position of a finding in a plot."""

    row: int | None  # the row of the layer; None for a finding about the whole model
    step: int  # the first step of the finding
    rule: str


def places_of(findings: Iterable[Finding], sites: Sequence[Hashable]) -> list[FoundAt]:
    """Return the positions of the findings that have a row.

    The row of a finding is the row of its tensor, or else the row of the first output of its module.
    """
    return [FoundAt(row, each.first_step, each.rule) for each, row in rows_of(findings, sites)]


def outline_findings(
    canvas: Canvas, area: Area, found: Sequence[FoundAt], columns: Columns, steps: Floats, distance: float | None = None
) -> None:
    """Draw a red frame around each layer with a finding, from the first step of the finding on.

    A finding about the whole model is a red line. ``distance`` is the height of a row in pixels. It is None if the plot
    is about one layer; all findings are lines then.
    """
    left, top, width, height = area
    for row, step, _ in found:
        x = left + columns.left_of(steps, step, width)
        if row is None or distance is None:
            canvas.line([(x, top), (x, top + height - 1)], _RED)
        else:
            # Draw inside the row, so that neighboring rows and the frame of the data stay visible.
            canvas.frame(x + 1, int(top + row * distance) + 1, left + width - x - 2, int(distance) - 2, _RED)


def notes_on_findings(found: Sequence[FoundAt]) -> list[str]:
    """Return the legend of :func:`outline_findings`, with the earliest step of each rule."""
    first: dict[str, int] = {}
    for _, step, rule in found:
        first[rule] = min(step, first.get(rule, step))
    what = ", ".join(f"{rule} (step {step:,})" for rule, step in first.items())
    return [f"red: findings, from their first step on: {what}"] if found else []


def evenly(count: int, most: int) -> list[int]:
    """Return at most ``most`` of ``count`` indices, evenly spaced and including the first and the last."""
    places: list[int] = np.linspace(0, max(count - 1, 0), min(count, most)).round().astype(int).tolist()
    return places


def plain(color: tuple[int, int, int], height: int = 10, width: int = 16) -> Image:
    """Return a sample of one color."""
    return np.full((height, width, 3), color, dtype=np.uint8)

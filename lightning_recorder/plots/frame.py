"""What surrounds the data of a picture: title, axes, the row of colours, what patterns mean, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_recorder.plots.canvas import DETAIL_PX, GREY, INK, TEXT_PX, TITLE_PX, Canvas, Image, text_width
from lightning_recorder.plots.colours import MARKS, Mark, Table, pattern
from lightning_recorder.plots.scale import Scale
from lightning_recorder.plots.words import every_nth, fitted, shortened

__all__ = [
    "BAR_ROOM",
    "TOP",
    "WIDTH",
    "Area",
    "bottom_room",
    "colour_bar",
    "evenly",
    "new_canvas",
    "notes_below",
    "numbers_below",
    "numbers_left",
    "plain",
    "row_names",
    "rows_room",
    "swatch",
]

WIDTH = 900
TOP = 48  # room for the title
BAR_ROOM = 118  # room for the row of colours, at the right
_BAR_PX = 16
_TICK_PX = 5
_AXIS_PX = 52  # room for the numbers and the title of the axis below
_NOTE_PX = 20
_MOST_ROOM = 300  # for names, at the left

Area = tuple[int, int, int, int]
"""Where the data lies: left, top, width and height in pixels."""


def new_canvas(height: int, title: str, width: int = WIDTH) -> Canvas:
    """An empty picture with its title."""
    canvas = Canvas(width, height)
    # A bold letter is at most a sixth wider than another.
    canvas.text(16, 25, shortened(title, (width - 32) / 1.17, px=TITLE_PX, head=0.6), px=TITLE_PX, bold=True)
    return canvas


def bottom_room(notes: Sequence[str], marks: Iterable[Mark] = (), *, axis: bool = True) -> int:
    """How many pixels :func:`numbers_below` and :func:`notes_below` need."""
    return (_AXIS_PX if axis else 8) + _NOTE_PX * (len(notes) + bool(list(marks))) + 10


def numbers_below(canvas: Canvas, area: Area, axis: Scale, title: str) -> None:
    """The axis below the data."""
    left, top, width, height = area
    bottom = top + height
    end = -1e9
    for place, text in axis.ticks(9):
        x = left + place * width
        canvas.line([(x, bottom), (x, bottom + _TICK_PX)], GREY)
        half = text_width(text, DETAIL_PX) / 2
        if x - half > end + 8:
            canvas.text(x, bottom + 15, text, px=DETAIL_PX, anchor="mm")
            end = x + half
    canvas.text(left + width / 2, bottom + 37, title, anchor="mm")


def numbers_left(canvas: Canvas, area: Area, axis: Scale, title: str) -> None:
    """The axis at the left of the data, growing upwards."""
    left, top, _, height = area
    last = 1e9
    for place, text in axis.ticks(max(2, min(13, height // 34))):
        y = top + (1 - place) * height
        canvas.line([(left - _TICK_PX, y), (left - 1, y)], GREY)
        if y < last - DETAIL_PX - 2:
            canvas.text(left - 9, y, text, px=DETAIL_PX, anchor="rm")
            last = y
    canvas.upright_text(16, top + height / 2, title)


def rows_room(names: Sequence[str]) -> int:
    """How many pixels the names of rows take at the left."""
    widest = max((text_width(name, DETAIL_PX) for name in names), default=0.0)
    return int(min(widest, _MOST_ROOM)) + 26


def row_names(canvas: Canvas, area: Area, names: Sequence[str], distance: float) -> None:
    """The names of rows, at the left of their middles; as many as there is room for."""
    left, top, _, _ = area
    shown = fitted(names, left - 24)
    for row in every_nth(len(names), distance, DETAIL_PX + 1):
        y = top + (row + 0.5) * distance
        canvas.line([(left - _TICK_PX, y), (left - 1, y)], GREY)
        canvas.text(left - 9, y, shown[row], px=DETAIL_PX, anchor="rm")


def colour_bar(canvas: Canvas, area: Area, scale: Scale, table: Table, label: str) -> None:
    """The row of colours at the right of the data, with its numbers and what they are of."""
    left, top, width, height = area
    length = min(height, 420)
    colours = table[np.linspace(255, 0, length).round().astype(int)]
    x = left + width + 22
    canvas.image(x, top, np.repeat(colours[:, None], _BAR_PX, axis=1))
    canvas.frame(x, top, _BAR_PX, length)
    last = 1e9
    for place, text in scale.ticks(max(2, min(9, length // 30))):
        y = top + (1 - place) * (length - 1)
        canvas.line([(x + _BAR_PX, y), (x + _BAR_PX + 4, y)], GREY)
        if y < last - DETAIL_PX - 2:
            canvas.text(x + _BAR_PX + 7, y, text, px=DETAIL_PX)
            last = y
    canvas.upright_text(canvas.width - 14, top + length / 2, shortened(label, max(length, 150), px=TEXT_PX))


def notes_below(canvas: Canvas, y: float, notes: Sequence[str], marks: Iterable[Mark] = ()) -> None:
    """What the patterns mean, and what else there is to say of a picture."""
    x = 16.0
    shown = list(marks)
    for mark in shown:
        x = swatch(canvas, x, y, pattern(mark, 14, 22), MARKS[mark])
    y += _NOTE_PX * bool(shown)
    for note in notes:
        canvas.text(16, y, shortened(note, canvas.width - 32), px=DETAIL_PX, colour="#4d4d4d")
        y += _NOTE_PX


def swatch(canvas: Canvas, x: float, y: float, pixels: Image, meaning: str) -> float:
    """A sample of a colour with its meaning; gives where the next one may begin."""
    height, width = len(pixels), len(pixels[0])
    left, top = round(x), round(y - height / 2)
    canvas.image(left, top, pixels)
    canvas.frame(left, top, width, height)
    canvas.text(x + width + 7, y, meaning, px=DETAIL_PX, colour=INK)
    return x + width + 7 + text_width(meaning, DETAIL_PX) + 24


def evenly(count: int, most: int) -> list[int]:
    """At most so many of ``count`` places, evenly spread, the first and the last among them."""
    places: list[int] = np.linspace(0, max(count - 1, 0), min(count, most)).round().astype(int).tolist()
    return places


def plain(colour: tuple[int, int, int], height: int = 14, width: int = 22) -> Image:
    """A sample of one colour."""
    return np.full((height, width, 3), colour, dtype=np.uint8)

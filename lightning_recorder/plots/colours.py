"""Colour tables for values, and patterns for values without a colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.plots.arrays import Floats
from lightning_recorder.plots.axes import Scale
from lightning_recorder.plots.canvas import Image

__all__ = ["MARKS", "PURPLE_ORANGE", "VIRIDIS", "Mark", "Table", "marks_of", "paint", "table_for"]

Table = NDArray[np.uint8]
"""A colour table, ``[256, 3]``, from the lower to the upper end of a scale."""


def _table(colours: str) -> Table:
    """Interpolate equidistant colours to a table of 256."""
    knots = np.array([[int(each[at : at + 2], 16) for at in (0, 2, 4)] for each in colours.split()], dtype=np.float64)
    places = np.linspace(0, len(knots) - 1, 256)
    mixed = [np.interp(places, np.arange(len(knots)), channel) for channel in knots.T]
    return np.stack(mixed, axis=-1).round().astype(np.uint8)


VIRIDIS = _table(
    "440154 470d60 48186a 482374 472d7b 453681 424086 3f4989 3b528b 375a8d 33638d 2f6a8e 2c728e 297a8e 26818e 23898e "
    "21908c 1f988b 1f9f88 21a685 28ae80 31b57b 3ebc74 4cc26c 5dc963 6ece58 82d34c 96d83f abdc32 c0df24 d5e21a eae51a "
    "fde725"
)
"""For magnitudes. Lightness rises evenly, so the table reads the same in greyscale and with any colour vision."""

PURPLE_ORANGE = _table("2d004b 542788 8073ac b2abd2 d8daeb f7f7f7 fee0b6 fdb863 e08214 b35806 7f3b08")
"""For signed values. Purple and orange differ along the blue-yellow axis, which people with red-green colour blindness
perceive fully; the ends of a red-blue table differ partly along the red-green axis."""

Mark = Literal["zero", "missing", "nan", "inf"]

MARKS: Mapping[Mark, str] = {"zero": "0", "missing": "not recorded", "nan": "NaN", "inf": "infinite"}
"""The meanings of the patterns; none of the patterns uses a colour of the tables."""


_FLAT: Mapping[Mark, int] = {"zero": 255, "missing": 200, "inf": 0}


def table_for(scale: Scale) -> Table:
    """Return the colour table for a scale: purple-orange if the scale includes negative values, else viridis."""
    return PURPLE_ORANGE if scale.low < 0 else VIRIDIS


def marks_of(values: Floats, scale: Scale, recorded: NDArray[np.bool_] | None = None) -> dict[Mark, NDArray[np.bool_]]:
    """Return masks of the values that have no colour on a scale, by the reason; reasons that do not occur are left out.

    Args:
        values: The values, of any shape.
        scale: The scale. A logarithmic scale has no colour for 0.
        recorded: A mask of the recorded values; by default all are recorded.
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
    """Return the colours of values, ``[…, 3]``; NaN is white, to be covered by a pattern."""
    places = scale.place(values)
    known = ~np.isnan(places)
    indices = (np.where(known, places, 0.0) * 255).round().astype(np.int64)
    return np.where(known[..., None], table[indices], np.uint8(255))


def pattern(mark: Mark, height: int, width: int) -> Image:
    """Return the pattern that replaces a colour: white, grey, black stripes on white, or black."""
    if mark != "nan":
        return np.full((height, width, 3), _FLAT[mark], dtype=np.uint8)
    rows, columns = np.indices((height, width))
    return np.repeat(np.where((rows - columns) % 8 < 4, 0, 255).astype(np.uint8)[..., None], 3, axis=-1)


def cover(pixels: Image, marks: Mapping[Mark, NDArray[np.bool_]]) -> None:
    """Draw the patterns over the marked pixels; each mask is ``[height, width]``."""
    for mark, where in marks.items():
        pixels[where] = pattern(mark, *where.shape)[where]

"""Tests of color tables and patterns, and of axes, names and notes at the displayed size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.plots import heat_map
from lightning_recorder.plots.axes import Scale
from lightning_recorder.plots.canvas import DETAIL_PX, TEXT_PX, TITLE_PX, Image, text_width
from lightning_recorder.plots.frame import (
    MARKS,
    PURPLE_ORANGE,
    VIRIDIS,
    WIDTH,
    Table,
    bottom_room,
    fitting_ticks,
    marks_of,
    paint,
    pattern,
    rows_room,
    table_for,
)
from tests.plots.pixels import data_in, names_of

# The matplotlib tables of these names, at every fifteenth of 256 entries.
KNOWN = {
    "viridis": "440154 481769 472a7a 433d84 3d4e8a 355e8d 2e6d8e 297b8e 23898e "
    "1f978b 21a585 2eb37c 46c06f 65cb5e 89d548 b0dd2f d8e219 fde725",
    "PuOr_r": "2d004b 44176f 5c348e 7661a4 9287b9 afa8d0 c6c4df dcddec eeeef3 "
    "f9f0e4 fde3be fecd8f fbb55e ea9530 d57811 bb5f08 9e4c07 7f3b08",
}


@pytest.mark.parametrize(("table", "name"), [(VIRIDIS, "viridis"), (PURPLE_ORANGE, "PuOr_r")])
def test_tables_are_those_that_are_known(table: Table, name: str) -> None:
    """Each color differs by at most 2 of 255 levels from the reference table, which is invisible."""
    known = np.array([list(bytes.fromhex(color)) for color in KNOWN[name].split()])
    assert np.abs(table[::15] - known).max() <= 2


def test_signed_scales_have_the_table_with_a_middle() -> None:
    """Scales with negative values use the purple-orange table, all others viridis."""
    assert table_for(Scale("linear", -1.0, 1.0)) is PURPLE_ORANGE
    assert table_for(Scale("log", 0.1, 1.0)) is VIRIDIS


def test_values_are_painted_by_their_places() -> None:
    """Values at or beyond the ends of the scale have the end colors, and NaN is white."""
    colors = paint(np.array([0.0, 5.0, -1.0, 99.0, np.nan]), Scale("linear", 0.0, 5.0), VIRIDIS)
    assert (colors == np.stack([VIRIDIS[0], VIRIDIS[-1], VIRIDIS[0], VIRIDIS[-1], np.full(3, 255)])).all()


def test_each_value_has_at_most_one_mark() -> None:
    """Each value has at most one mark: 0 on a logarithmic scale only, and a missing value no other mark."""
    values = np.array([0.0, np.nan, np.inf, 1.0, np.nan])
    recorded = np.array([True, True, True, True, False])
    found = marks_of(values, Scale("log", 0.1, 1.0), recorded)
    assert {mark: np.flatnonzero(where).tolist() for mark, where in found.items()} == {
        "zero": [0],
        "missing": [4],
        "nan": [1],
        "inf": [2],
    }
    assert "zero" not in marks_of(values, Scale("linear", 0.0, 1.0))


@pytest.mark.parametrize("table", [VIRIDIS, PURPLE_ORANGE], ids=["viridis", "purple and orange"])
def test_patterns_are_no_colors(table: Table) -> None:
    """No color of a pattern occurs in a table, so a pattern cannot be mistaken for a value."""
    known = {tuple(color) for color in table.tolist()}
    for mark in MARKS:
        assert not known & {tuple(color) for color in pattern(mark, 9, 9).reshape(-1, 3).tolist()}


GREY = 0x8C


def named_rows(image: Image) -> list[int]:
    """Return the pixel rows with the tick of a name, left of the data."""
    grey = (image == GREY).all(axis=-1)
    data = data_in(image)
    left = WIDTH - 12 - data.shape[1]
    # Ticks lie next to the frame of the data; the color bar has no ticks at its sides.
    found: list[int] = np.flatnonzero(grey[:, left - 3 : left].all(axis=-1)).tolist()
    return [row for row in found if not grey[row, left : left + data.shape[1]].all()]


def picture(rows: int) -> Image:
    values = np.random.default_rng(0).uniform(0.5, 1.0, (rows, 3))
    return heat_map(range(3), names_of(rows), values, statistic="rms", title="t")


def test_letters_can_be_read_on_a_card() -> None:
    """On the 350 pixels of a TensorBoard card, fonts have 11 to 13 pixels per em."""
    assert [px * 350 / WIDTH for px in (DETAIL_PX, TEXT_PX, TITLE_PX)] == [11, 12, 13]


@pytest.mark.parametrize(("rows", "named", "distance"), [(1, 1, 0), (40, 40, 14), (116, 116, 12), (200, 100, 14)])
def test_every_row_has_its_name_while_there_is_room(rows: int, named: int, distance: int) -> None:
    """Up to 116 rows have one name each, at least 12 pixels apart; of 200 rows every second one has a name."""
    found = named_rows(picture(rows))
    assert len(found) == named
    assert {below - above for above, below in pairwise(found)} <= {distance}


def test_names_leave_room_for_the_data() -> None:
    """Names with their margins take at most 144 of the 350 pixels, however long they are."""
    assert 110 <= rows_room([f"{letter}{'x' * 99}" for letter in "abc"]) <= 144
    assert data_in(picture(3)).shape[1] >= 350 - 144 - 12


@given(st.floats(-1e30, 1e30), st.floats(1e-30, 1e30), st.integers(150, 320))
def test_numbers_of_an_axis_never_touch(low: float, length: float, width: int) -> None:
    """An axis has at most seven numbers, at least eight pixels apart."""
    axis = Scale("linear", low, max(low + length, np.nextafter(low, np.inf)))
    ticks = fitting_ticks(axis, width)
    assert len(ticks) <= 7
    for (place, text), (after, behind) in pairwise(ticks):
        gap = (after - place) * width - text_width(text, DETAIL_PX) / 2 - text_width(behind, DETAIL_PX) / 2
        assert gap >= 8 - 1e-6


def test_an_axis_has_as_many_numbers_as_there_is_room_for() -> None:
    """An axis from 0 to 1 has six numbers on 300 pixels and three on 70 pixels."""
    axis = Scale("linear", 0.0, 1.0)
    assert [text for _, text in fitting_ticks(axis, 300)] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert [text for _, text in fitting_ticks(axis, 70)] == ["0", "0.5", "1"]


def test_long_notes_have_more_lines() -> None:
    """Each line of notes takes 15 pixels, and so does the legend of patterns."""
    none = bottom_room([])
    assert bottom_room(["short"]) - none == 15
    assert bottom_room(["twenty letters here " * 5]) - none == 30
    assert bottom_room([], ["nan", "inf"]) - none == 15

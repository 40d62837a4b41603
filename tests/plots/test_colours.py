"""Tests of colour tables and patterns."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_recorder.plots.axes import Scale
from lightning_recorder.plots.colours import MARKS, PURPLE_ORANGE, VIRIDIS, Table, marks_of, paint, pattern, table_for

# The matplotlib tables of these names, at every fifteenth of 256 entries.
KNOWN = {
    "viridis": "440154 481769 472a7a 433d84 3d4e8a 355e8d 2e6d8e 297b8e 23898e "
    "1f978b 21a585 2eb37c 46c06f 65cb5e 89d548 b0dd2f d8e219 fde725",
    "PuOr_r": "2d004b 44176f 5c348e 7661a4 9287b9 afa8d0 c6c4df dcddec eeeef3 "
    "f9f0e4 fde3be fecd8f fbb55e ea9530 d57811 bb5f08 9e4c07 7f3b08",
}


@pytest.mark.parametrize(("table", "name"), [(VIRIDIS, "viridis"), (PURPLE_ORANGE, "PuOr_r")])
def test_tables_are_those_that_are_known(table: Table, name: str) -> None:
    """Each colour differs by at most 2 of 255 levels from the reference table, which is invisible."""
    known = np.array([list(bytes.fromhex(colour)) for colour in KNOWN[name].split()])
    assert np.abs(table[::15] - known).max() <= 2


def test_signed_scales_have_the_table_with_a_middle() -> None:
    """Scales with negative values use the purple-orange table, all others viridis."""
    assert table_for(Scale("linear", -1.0, 1.0)) is PURPLE_ORANGE
    assert table_for(Scale("log", 0.1, 1.0)) is VIRIDIS


def test_values_are_painted_by_their_places() -> None:
    """Values at or beyond the ends of the scale have the end colours, and NaN is white."""
    colours = paint(np.array([0.0, 5.0, -1.0, 99.0, np.nan]), Scale("linear", 0.0, 5.0), VIRIDIS)
    assert (colours == np.stack([VIRIDIS[0], VIRIDIS[-1], VIRIDIS[0], VIRIDIS[-1], np.full(3, 255)])).all()


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
def test_patterns_are_no_colours(table: Table) -> None:
    """No colour of a pattern occurs in a table, so a pattern cannot be mistaken for a value."""
    known = {tuple(colour) for colour in table.tolist()}
    for mark in MARKS:
        assert not known & {tuple(colour) for colour in pattern(mark, 9, 9).reshape(-1, 3).tolist()}

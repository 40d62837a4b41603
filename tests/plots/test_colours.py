"""Colours: the tables, and what is no colour of theirs."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest

from lightning_recorder.plots.colours import MARKS, PURPLE_ORANGE, VIRIDIS, Table, marks_of, paint, pattern, table_for
from lightning_recorder.plots.scale import Scale


@pytest.mark.parametrize(("table", "name"), [(VIRIDIS, "viridis"), (PURPLE_ORANGE, "PuOr_r")])
def test_tables_are_those_that_are_known(table: Table, name: str) -> None:
    """They are matplotlib's to two levels in 255: nobody sees the difference, and it need not be imported."""
    known = mpl.colormaps[name](np.linspace(0, 1, 256))[:, :3] * 255
    assert np.abs(table - known).max() <= 2


def test_signed_scales_have_the_table_with_a_middle() -> None:
    """What has negative values is purple and orange, all else viridis."""
    assert table_for(Scale("linear", -1.0, 1.0)) is PURPLE_ORANGE
    assert table_for(Scale("log", 0.1, 1.0)) is VIRIDIS


def test_values_are_painted_by_their_places() -> None:
    """The ends of the scale have the ends of the table, also what lies beyond, and NaN is white."""
    colours = paint(np.array([0.0, 5.0, -1.0, 99.0, np.nan]), Scale("linear", 0.0, 5.0), VIRIDIS)
    assert (colours == np.stack([VIRIDIS[0], VIRIDIS[-1], VIRIDIS[0], VIRIDIS[-1], np.full(3, 255)])).all()


def test_each_value_has_at_most_one_mark() -> None:
    """0 is marked on a logarithmic scale alone, and what was not recorded is nothing else."""
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
    """No grey of a pattern is in a table, so a mark is never taken for a value."""
    known = {tuple(colour) for colour in table.tolist()}
    for mark in MARKS:
        assert not known & {tuple(colour) for colour in pattern(mark, 9, 9).reshape(-1, 3).tolist()}

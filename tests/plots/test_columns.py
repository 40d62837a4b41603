"""Tests of the assignment of steps to columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.plots.columns import columns_of, furthest


def test_equal_distances_give_each_step_a_column() -> None:
    """Equidistant steps have one column each, bounded halfway between the steps."""
    columns = columns_of(np.array([0.0, 10.0, 20.0]))
    assert [(run.start, run.stop) for run in columns] == [(0, 1), (1, 2), (2, 3)]
    assert (columns.axis.low, columns.axis.high) == (-5.0, 25.0)
    assert columns.most == 1


def test_a_single_step_has_one_column() -> None:
    """The axis of a single step extends half a step to both sides."""
    columns = columns_of(np.array([7.0]))
    assert [(run.start, run.stop) for run in columns] == [(0, 1)]
    assert (columns.axis.low, columns.axis.high) == (6.5, 7.5)


def test_a_gap_is_filled_with_the_nearest_step() -> None:
    """Columns between distant steps show the nearest step."""
    columns = columns_of(np.array([0.0, 1.0, 9.0]), most=14)
    # From -0.5 to 13 in 14 columns of width 27/28; the midpoint of 1 and 9 is 5.
    assert [run.start for run in columns] == [0, 1, 1, 1, 1, 1] + [2] * 8


@given(st.sets(st.integers(0, 10**7), min_size=1, max_size=900), st.integers(2, 300))
def test_no_step_is_lost(steps: set[int], most: int) -> None:
    """Every step has a column, and the number of columns does not exceed the maximum."""
    ordered = np.array(sorted(steps), dtype=np.float64)
    columns = columns_of(ordered, most)
    shown = {row for run in columns for row in range(run.start, run.stop)}
    assert shown == set(range(len(ordered)))
    assert len(columns) <= max(most, 1)
    assert all(run.stop > run.start for run in columns)


def test_columns_have_equal_widths_in_pixels() -> None:
    """Four columns divide the width into equal quarters."""
    assert columns_of(np.arange(4.0)).spread(8).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("values", "recorded", "chosen", "there"),
    [
        ([1.0, -3.0, 2.0], [True, True, True], -3.0, True),
        ([1.0, -3.0, 2.0], [True, False, True], 2.0, True),
        ([1.0, np.nan, 1e308], [True, True, True], np.nan, True),
        ([1.0, np.nan, -np.inf], [True, True, True], -np.inf, True),
        ([0.0, np.nan], [True, False], 0.0, True),
        ([5.0, 6.0], [False, False], None, False),
    ],
)
def test_the_value_that_tells_most_is_shown(
    values: list[float], recorded: list[bool], chosen: float | None, there: bool
) -> None:
    """An infinity precedes NaN, which precedes the value furthest from 0; missing values are ignored."""
    found, is_there = furthest(np.array([values]), np.array([recorded]))
    assert is_there.tolist() == [there]
    if chosen is not None:
        np.testing.assert_equal(found.tolist(), [chosen])

"""Tests of scales (positions of values, choice of scale, tick labels) and of the columns of recorded steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.plots.axes import Scale, columns_of, number, scale_of, value_scale

SCALES = [
    Scale("linear", -2.0, 6.0),
    Scale("linear", -1.7e308, 1.7e308),
    Scale("log", 1e-6, 1e4),
    Scale("symlog", -1e3, 1e3, 1e-2),
    Scale("symlog", 0.0, 1e300, 1e288),
]


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_a_place_leads_back_to_its_value(scale: Scale) -> None:
    """``values`` is the inverse of ``place``."""
    places = np.linspace(0, 1, 101)
    assert scale.place(scale.values(places)) == pytest.approx(places, abs=1e-9)
    assert scale.values([0.0, 1.0]) == pytest.approx([scale.low, scale.high])


@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_what_lies_beyond_goes_to_the_nearer_end(scale: Scale) -> None:
    """Infinities lie at the ends of the scale, and NaN stays NaN."""
    places = scale.place([-np.inf, np.inf, np.nan])
    assert places[:2].tolist() == [0.0, 1.0]
    assert np.isnan(places[2])


def test_symlog_is_linear_near_zero_and_logarithmic_beyond() -> None:
    """Positions on a symlog scale equal an independent computation of sign(v) log(1 + |v| / threshold)."""
    scale = Scale("symlog", -100.0, 100.0, 0.1)
    values = np.array([-100.0, -3.0, -0.01, 0.0, 0.5, 7.0, 100.0])
    expected = np.sign(values) * np.log(1 + np.abs(values) / 0.1) / np.log(1 + 1000)
    assert scale.place(values) == pytest.approx((expected + 1) / 2)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 2.0, 40.0], Scale("linear", 0.0, 40.0)),
        ([10.0, 11.0, 12.0], Scale("linear", 10.0, 12.0)),
        ([1e-3, 1.0, 0.0], Scale("log", 1e-3, 1.0)),
        ([1e-30, 1.0], Scale("log", 1e-12, 1.0)),
        ([-1.0, 3.0], Scale("linear", -3.0, 3.0)),
        ([np.nan, np.inf], Scale("linear", 0.0, 1.0)),
        ([0.0, 0.0], Scale("linear", 0.0, 1.0)),
        ([], Scale("linear", 0.0, 1.0)),
    ],
)
def test_the_values_decide_on_the_scale(values: list[float], expected: Scale) -> None:
    """The scale is logarithmic beyond a factor of 50, spans at most 12 decades, and is symmetric for signed values."""
    assert scale_of(np.array(values)) == expected


def test_a_constant_has_a_scale_around_it() -> None:
    """Equal values lie in the middle of a linear scale."""
    assert scale_of(np.full(3, 4.0)).place(4.0) == pytest.approx(0.5)


def test_signed_values_over_decades_are_symlog() -> None:
    """The symlog threshold is the power of ten below the 0.1 quantile of the nonzero magnitudes."""
    values = np.array([-1000.0, *[0.02] * 9, 0.0])
    assert scale_of(values) == Scale("symlog", -1000.0, 1000.0, 0.01)


def test_the_caller_can_decide() -> None:
    """``log`` overrides the choice made from the values."""
    assert scale_of(np.array([1.0, 2.0]), log=True) == Scale("log", 1.0, 2.0)
    assert scale_of(np.array([1e-9, 1.0]), log=False) == Scale("linear", 0.0, 1.0)


def test_an_axis_is_symlog_where_a_histogram_would_be_too_thin() -> None:
    """The axis is symlog beyond a ratio of 50, with a linear part as wide as the narrow histogram."""
    assert value_scale(-5.0, 5.0, 0.21) == Scale("linear", -5.0, 5.0)
    assert value_scale(-5.0, 5.0, 0.19) == Scale("symlog", -5.0, 5.0, 0.1)


@pytest.mark.parametrize(
    ("scale", "most", "texts"),
    [
        (Scale("linear", 0.0, 1.0), 6, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (Scale("linear", -0.5, 9950.0), 9, ["0", "2000", "4000", "6000", "8000"]),
        (Scale("log", 1e-6, 1e-1), 9, ["1e-6", "1e-5", "1e-4", "0.001", "0.01", "0.1"]),
        (Scale("log", 1e-6, 1e-1), 3, ["1e-5", "0.001", "0.1"]),
        (Scale("log", 2.0, 9.0), 5, ["2", "4", "6", "8"]),
        (Scale("symlog", -1.0, 1.0, 1e-2), 9, ["-1", "-0.1", "0", "0.1", "1"]),
    ],
    ids=str,
)
def test_ticks_are_round_numbers(scale: Scale, most: int, texts: list[str]) -> None:
    """Ticks are multiples of 1, 2 or 5, or powers of ten, at their positions."""
    ticks = scale.ticks(most)
    assert [text for _, text in ticks] == texts
    assert [place for place, _ in ticks] == pytest.approx(scale.place([float(text) for text in texts]).tolist())


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=5),
    st.integers(2, 12),
)
def test_any_values_have_a_scale_with_few_ticks(values: list[float], most: int) -> None:
    """Any finite values have ordered positions from 0 to 1, and the number of ticks is bounded."""
    scale = scale_of(np.array(values, dtype=np.float64))
    assert scale.low < scale.high
    finite = np.sort(np.array([value for value in values if np.isfinite(value)], dtype=np.float64))
    places = scale.place(finite)
    assert ((places >= 0) & (places <= 1) & (np.diff(places, prepend=0.0) >= 0)).all()
    ticks = scale.ticks(most)
    assert len(ticks) <= most
    assert all(0 <= place <= 1 for place, _ in ticks)


@given(st.floats(-1e308, 1e308))
def test_numbers_are_short(value: float) -> None:
    """A number has at most ten characters and is correct to three digits."""
    assert len(number(value)) <= 10
    assert float(number(value)) == pytest.approx(value, rel=6e-3)


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


@pytest.mark.parametrize(
    ("steps", "texts"),
    [([0.0], ["0"]), ([123.0], ["123"]), ([0.0, 1.0], ["0", "1"]), ([0.0, 0.5], ["-0.2", "0", "0.2", "0.4", "0.6"])],
)
def test_ticks_of_steps_are_whole(steps: list[float], texts: list[str]) -> None:
    """Whole steps have whole numbers at their axis, also if there are few; others have not."""
    assert [text for _, text in columns_of(np.array(steps)).axis.ticks(7)] == texts


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

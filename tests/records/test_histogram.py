"""Tests of histograms with explicit edges."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.records.histogram import between_edges
from lightning_recorder.reductions import ExponentHistogram, Histogram
from tests.reductions.reference import extrema_of, values_of

NAN = math.nan
TINY = 2.0**-126  # the smallest normal float32
NARROW = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
each_narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)


def plain(edges: list[float], counts: list[int], low: float = -math.inf, high: float = math.inf) -> Histogram:
    """Return a histogram whose summary numbers do not matter."""
    return Histogram(np.array(edges, dtype=float), np.array(counts, dtype=np.int64), low, high, 7.0, 11.0)


def histogram_of(tensor: Tensor) -> Histogram:
    """Return the histogram of a float32 tensor with the fixed edges."""
    reduction = ExponentHistogram()
    reduction.update(tensor)
    values = values_of([tensor])
    return Histogram(*between_edges(reduction.compute()["histogram"].numpy()), *extrema_of(values), 0.0, 0.0)


# Counts


def test_the_count_is_that_of_all_bins() -> None:
    """The count of a histogram is the sum over its bins, as an int."""
    histogram = plain([0, 1, 2], [3, 4])
    assert histogram.count == 7
    assert type(histogram.count) is int


def test_counts_and_edges_as_numpy_gives_them() -> None:
    """Counts and edges are in the format and order of numpy.histogram."""
    values = np.array([0.5, 1.5, 1.6, 3.9])
    histogram = plain([0, 1, 2, 3, 4], [1, 2, 0, 1])
    for found, expected in zip(histogram.np_histogram, np.histogram(values, bins=4, range=(0, 4)), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert histogram.np_histogram[0].dtype == np.int64


# Quantiles


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, 0.5), (0.125, 0.75), (0.25, 1.0), (0.5, 5.0), (0.75, 6.0), (1.0, 6.5)],
)
def test_quantiles_by_hand(share: float, expected: float) -> None:
    """A quantile is interpolated between the edges of its bin, clipped to the smallest and largest value."""
    # Two values in [0, 1), clipped at 0.5; none in [1, 4); four in [4, 6); two in [6, 8), clipped at 6.5.
    histogram = plain([0, 1, 4, 6, 8], [2, 0, 4, 2], 0.5, 6.5)
    assert histogram.quantile(share) == expected


def test_quantiles_of_one_value_are_that_value() -> None:
    """If all values are equal, each quantile is that value, in any bin."""
    histogram = plain([1.0, 1.25], [5], 1.1, 1.1)
    assert [histogram.quantile(share) for share in (0.0, 0.3, 1.0)] == [1.1, 1.1, 1.1]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_without_values_a_quantile_is_nan(share: float) -> None:
    """The quantiles of an empty histogram are NaN."""
    assert math.isnan(plain([0, 0], [0], NAN, NAN).quantile(share))
    assert math.isnan(histogram_of(torch.tensor([NAN])).quantile(share))


@pytest.mark.parametrize("share", [-0.01, 1.01, NAN, 50])
def test_a_share_beyond_one_is_refused(share: float) -> None:
    """A share that is not between 0 and 1, such as a percentage, is rejected."""
    with pytest.raises(ArgumentError, match=r"^a quantile is a fraction between 0 and 1, got "):
        plain([0, 1], [1]).quantile(share)


shares = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 1))


def valid_quantiles(values: NDArray[np.float64], share: float) -> tuple[float, float]:
    """Return the range for a quantile of sorted values: two neighbors, or one value twice."""
    rank = Fraction(share) * len(values)
    low = max(math.ceil(rank), 1) - 1
    high = min(math.floor(rank), len(values) - 1)
    return float(values[low]), float(values[max(low, high)])


@settings(max_examples=200)
@given(
    st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=50),
    st.lists(st.floats(-99, 99, width=16), max_size=8, unique=True),
    shares,
)
def test_a_quantile_is_in_the_bin_of_the_sorted_value(data: list[float], inner: list[float], share: float) -> None:
    """For any edges, the error of a quantile is less than the width of its bin."""
    values = np.sort(np.array(data))
    edges = [-101.0, *sorted(inner), 101.0]
    histogram = plain(edges, np.histogram(values, edges)[0].tolist(), float(values[0]), float(values[-1]))
    found = histogram.quantile(share)
    low, high = valid_quantiles(values, share)
    assert low == np.quantile(values, share, method="inverted_cdf") or share * len(values) % 1 < 1e-9
    width = next(right - left for left, right in pairwise(edges) if left <= low <= right and left <= found <= right)
    assert values[0] <= found <= values[-1]
    assert low - width < found < high + width


@settings(max_examples=100)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), shares)
def test_with_the_fixed_edges_a_quantile_is_off_by_a_quarter(data: list[float], share: float) -> None:
    """With the fixed edges, the error of a quantile is at most 25 % of the value, or 2**-125 around zero."""
    values = np.sort(np.array(data))
    found = histogram_of(torch.tensor(data)).quantile(share)
    low, high = valid_quantiles(values, share)
    off = max(low - found, found - high, 0.0)
    assert off < max(max(abs(low), abs(high)) / 4, 2 * TINY)


# Narrower dtypes


def test_underflow_by_hand() -> None:
    """A third of 1e-8, 4e-8 and 1 is below 2**-25, half of the smallest float16; zeros do not count."""
    assert histogram_of(torch.tensor([1e-8, 4e-8, 1.0])).underflow_fraction(torch.float16) == 1 / 3
    assert histogram_of(torch.tensor([-1e-8, 0.0, -0.0, 1e-8])).underflow_fraction(torch.float16) == 0.5
    assert histogram_of(torch.tensor([1e-8, 9e-4, 1.0])).underflow_fraction(torch.float8_e4m3fn) == 2 / 3


def test_overflow_by_hand() -> None:
    """Two thirds of 1, -1e5 and 1e6 exceed 65504, the largest float16; none exceeds the largest bfloat16."""
    histogram = histogram_of(torch.tensor([1.0, -1e5, 1e6]))
    assert histogram.overflow_fraction(torch.float16) == 2 / 3
    assert histogram.overflow_fraction(torch.bfloat16) == 0.0


@each_narrow
def test_without_values_the_fractions_are_nan(dtype: torch.dtype) -> None:
    """The fractions of an empty histogram are NaN."""
    histogram = plain([0, 0], [0], NAN, NAN)
    assert math.isnan(histogram.underflow_fraction(dtype))
    assert math.isnan(histogram.overflow_fraction(dtype))


@each_narrow
def test_zeros_alone_neither_vanish_nor_overflow(dtype: torch.dtype) -> None:
    """Zeros never underflow or overflow."""
    histogram = histogram_of(torch.zeros(3))
    assert histogram.underflow_fraction(dtype) == 0.0
    assert histogram.overflow_fraction(dtype) == 0.0


@st.composite
def around_limits(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Draw float32 values of all magnitudes, many of them near the limits of a dtype."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    factors = st.floats(0.1875, 4.25, width=32)
    limits = st.sampled_from([smallest, -smallest, info.max, -info.max])
    near = st.builds(lambda limit, factor: limit * factor, limits, factors)
    any_size = st.builds(lambda power, factor: 2.0**power * factor, st.integers(-126, 126), st.floats(-1.99, 1.99))
    values = draw(st.lists(st.one_of(near, any_size, st.just(0.0)), min_size=1, max_size=12))
    return torch.tensor(values, dtype=torch.float64).clamp(-3.4e38, 3.4e38).float()


@each_narrow
@settings(max_examples=80)
@given(st.data())
def test_underflow_is_below_half_of_the_smallest_number(dtype: torch.dtype, data: st.DataObject) -> None:
    """The fraction counts exactly the values below half of the smallest number, except those around zero."""
    tensor = data.draw(around_limits(dtype))
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    expected = sum(TINY <= abs(value) < smallest for value in values_of([tensor]))
    assert histogram_of(tensor).underflow_fraction(dtype) == expected / len(tensor)


@each_narrow
@settings(max_examples=80)
@given(st.data())
def test_underflow_is_what_a_cast_makes_zero(dtype: torch.dtype, data: st.DataObject) -> None:
    """The fraction agrees with a cast to the dtype, except in the bin that contains the rounding limit."""
    tensor = data.draw(around_limits(dtype))
    zeroed = (tensor.to(dtype).float() == 0) & (tensor.abs() >= TINY)
    # A cast rounds to nearest: values up to half of the smallest number become zero.
    half = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
    undecided = (tensor.abs() >= half) & (tensor.abs() < 1.25 * half)
    found = histogram_of(tensor).underflow_fraction(dtype) * len(tensor)
    assert int((zeroed & ~undecided).sum()) <= round(found) <= int((zeroed | undecided).sum())


@each_narrow
@settings(max_examples=80)
@given(st.data())
def test_overflow_is_what_a_cast_cannot_hold(dtype: torch.dtype, data: st.DataObject) -> None:
    """The fraction agrees with the values that a cast makes infinite or clips, except in the last bin of the dtype."""
    tensor = data.draw(around_limits(dtype))
    largest = torch.finfo(dtype).max
    cast = tensor.to(dtype).float()
    # float8_e4m3fn has no infinity. Depending on the torch version, a cast gives NaN or the largest number.
    lost = ~cast.isfinite() | ((tensor.abs() > largest) & (cast.abs() == largest))
    exponent = math.floor(math.log2(largest))
    # Both types end with the quarter that starts at 1.75. Otherwise their last bin would start elsewhere.
    undecided = (tensor.abs() >= 1.75 * 2.0**exponent) & (tensor.abs() < 2.0 ** (exponent + 1))
    found = histogram_of(tensor).overflow_fraction(dtype) * len(tensor)
    assert int((lost & ~undecided).sum()) <= round(found) <= int((lost | undecided).sum())


@each_narrow
def test_the_largest_number_of_a_type_is_not_too_large_for_it(dtype: torch.dtype) -> None:
    """Values that a dtype can represent, including its largest and smallest ones, neither overflow nor underflow."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    histogram = histogram_of(torch.tensor([info.max, -info.max, smallest, -smallest]))
    assert histogram.overflow_fraction(dtype) == 0.0
    assert histogram.underflow_fraction(dtype) == 0.0


# Coarsening


@pytest.mark.parametrize(
    ("limit", "edges", "counts"),
    [
        (9, [0, 1, 2, 3, 4, 8], [5, 1, 2, 0, 9]),
        (5, [0, 1, 2, 3, 4, 8], [5, 1, 2, 0, 9]),
        # Values times width at the inner edges: 6 * 2, 3 * 2, 2 * 2 and 9 * 5.
        (4, [0, 1, 2, 4, 8], [5, 1, 2, 9]),
        (3, [0, 1, 4, 8], [5, 3, 9]),
        (2, [0, 4, 8], [8, 9]),
        (1, [0, 8], [17]),
        (0, [0, 8], [17]),
    ],
)
def test_the_edges_with_the_least_loss_go_first(limit: int, edges: list[float], counts: list[int]) -> None:
    """Edges between narrow bins with few values are removed first."""
    coarse = plain([0, 1, 2, 3, 4, 8], [5, 1, 2, 0, 9], 0.5, 7.5).coarsened(limit)
    assert (coarse.edges.tolist(), coarse.counts.tolist()) == (edges, counts)
    assert (coarse.min, coarse.max, coarse.sum, coarse.sum_squares, coarse.fraction) == (0.5, 7.5, 7.0, 11.0, 1.0)


def test_thin_bins_go_before_wide_ones() -> None:
    """Many of the thin bins around zero of a bell curve are merged, and the tails keep their edges."""
    fine = plain([-4, -2, -1, -0.5, -0.25, 0.25, 0.5, 1, 2, 4], [4, 8, 10, 8, 10, 8, 10, 8, 4])
    assert fine.coarsened(5).edges.tolist() == [-4, -2, -1, 1, 2, 4]


bins = st.lists(st.tuples(st.floats(0.01, 1e3), st.integers(0, 100)), min_size=1, max_size=40)


def drawn(parts: list[tuple[float, int]]) -> Histogram:
    """Draw a histogram with bins of the given widths and counts, around zero."""
    edges = np.cumsum([0.0, *(width for width, _ in parts)]) - 500
    return plain(edges.tolist(), [count for _, count in parts], 1.0, 2.0)


@settings(max_examples=100)
@given(bins, st.integers(-1, 50))
def test_coarsening_keeps_every_value_between_its_edges(parts: list[tuple[float, int]], limit: int) -> None:
    """The result has at most the requested number of bins, edges from the fine histogram, and all counts."""
    fine = drawn(parts)
    coarse = fine.coarsened(limit)
    assert len(coarse.counts) == min(max(limit, 1), len(fine.counts))
    assert coarse.count == fine.count
    places = [fine.edges.tolist().index(edge) for edge in coarse.edges.tolist()]
    assert (places[0], places[-1]) == (0, len(fine.counts))
    assert coarse.counts.tolist() == [int(fine.counts[left:right].sum()) for left, right in pairwise(places)]
    assert (coarse.min, coarse.max, coarse.sum, coarse.sum_squares) == (fine.min, fine.max, fine.sum, fine.sum_squares)


@settings(max_examples=100)
@given(bins, st.integers(1, 50))
def test_the_edges_that_stay_lose_more(parts: list[tuple[float, int]], limit: int) -> None:
    """No removed edge has a larger loss than a remaining one."""
    fine = drawn(parts)
    edges, counts = fine.edges.tolist(), fine.counts.tolist()
    losses = {
        edges[place]: (counts[place - 1] + counts[place]) * (edges[place + 1] - edges[place - 1])
        for place in range(1, len(counts))
    }
    kept = set(fine.coarsened(limit).edges.tolist())
    gone = [loss for edge, loss in losses.items() if edge not in kept]
    stayed = [loss for edge, loss in losses.items() if edge in kept]
    assert max(gone, default=-1.0) <= min(stayed, default=math.inf)


@settings(max_examples=50)
@given(bins, st.integers(1, 50))
def test_coarsening_is_repeatable(parts: list[tuple[float, int]], limit: int) -> None:
    """Coarsening is deterministic, even with many equal losses, and does not change the original histogram."""
    fine, same = drawn(parts), drawn(parts)
    assert fine.coarsened(limit).edges.tolist() == same.coarsened(limit).edges.tolist()
    assert (fine.edges.tolist(), fine.counts.tolist()) == (same.edges.tolist(), same.counts.tolist())
    coarse = fine.coarsened(limit)
    assert coarse.coarsened(limit).edges.tolist() == coarse.edges.tolist()


def test_of_equal_edges_the_first_go_first() -> None:
    """If all losses are equal, the first edges are removed."""
    assert plain(list(range(7)), [1] * 6).coarsened(3).edges.tolist() == [0, 4, 5, 6]


def test_a_sample_stays_a_sample() -> None:
    """The fraction of counted values does not change."""
    fine = Histogram(np.array([0.0, 1.0, 2.0]), np.array([3, 4]), 0.0, 2.0, 7.0, 11.0, fraction=0.25)
    assert fine.coarsened(1).fraction == 0.25

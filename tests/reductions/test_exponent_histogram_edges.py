"""Tests of the functions that read histograms with the fixed edges."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.records.histogram import between_edges
from lightning_recorder.reductions import ExponentHistogram
from lightning_recorder.reductions.exponent_histogram import quantiles_of
from tests.reductions.reference import bin_of, bins_of, to_float32, values_of
from tests.reductions.strategies import FLOATS, tensors
from tests.reductions.test_base import NoReading

INF, NAN = math.inf, math.nan
TINY = 2.0**-126  # the smallest normal float32


def counts_of(*values: float) -> Tensor:
    """Return the reference counts of values."""
    return torch.from_numpy(bins_of(values)).double()


def quantiles(values: list[float], *shares: float) -> list[float]:
    """Return the quantiles of values."""
    found: list[float] = quantiles_of(counts_of(*values), shares).tolist()
    return found


# Edges


@pytest.mark.parametrize(
    ("values", "edges", "counts"),
    [
        ([1.0, 1.1, 1.25], [1.0, 1.25, 1.5], [2, 1]),
        ([1.0, 3.0], [1.0, 1.25, 3.0, 3.5], [1, 0, 1]),
        ([-1.0, 1.0], [-1.25, -1.0, 1.0, 1.25], [1, 0, 1]),
        ([-1.0, -1.3], [-1.5, -1.25, -1.0], [1, 1]),
        ([0.0, -0.0, 1e-40, -1e-40], [-TINY, TINY], [4]),
        ([TINY, -TINY, 0.0], [-1.25 * TINY, -TINY, TINY, 1.25 * TINY], [1, 1, 1]),
        ([TINY, -TINY], [-1.25 * TINY, -TINY, TINY, 1.25 * TINY], [1, 0, 1]),
        ([3.4e38, -3.4e38], [-(2.0**128), -1.75 * 2.0**127, 1.75 * 2.0**127, 2.0**128], [1, 0, 1]),
        ([INF, -INF, 1.0], [1.0, 1.25], [1]),
        ([], [0.0, 0.0], [0]),
        ([INF], [0.0, 0.0], [0]),
    ],
)
def test_edges_by_hand(values: list[float], edges: list[float], counts: list[int]) -> None:
    """Edges are those of the occupied bins; a gap between two of them is one bin, and so are the zeros."""
    found = between_edges(bins_of(values))
    assert [each.tolist() for each in found] == [edges, counts]
    assert [each.dtype for each in found] == [np.float64, np.int64]


def test_counts_of_both_types_are_taken() -> None:
    """Float64 counts, the type of a state, give the same edges as integer counts."""
    whole = bins_of([1.0, -2.0, 0.0])
    for one, other in zip(between_edges(whole), between_edges(whole.astype(float)), strict=True):
        assert one.tolist() == other.tolist()


def test_a_large_count_stays_exact() -> None:
    """A count of 2**53 in one bin is exact."""
    counts = np.zeros(2048)
    counts[508] = 2.0**53
    assert between_edges(counts)[1].tolist() == [2**53]


def inside(value: float, left: float, right: float) -> bool:
    """Return True if a bin contains a value; positive bins include their left edge, negative bins their right edge."""
    return left < value < right or (value == left and left > 0) or (value == right and right < 0)


@settings(max_examples=100)
@given(tensors(FLOATS))
def test_each_value_lies_in_its_bin(tensor: Tensor) -> None:
    """Edges ascend, each finite value is in one bin, both end bins are occupied and no two neighbors are empty."""
    finite = [to_float32(value) for value in values_of([tensor]) if math.isfinite(value)]
    edges, counts = between_edges(bins_of(finite))
    if finite:
        pairs = list(pairwise(edges.tolist()))
        assert all(left < right for left, right in pairs)
        assert counts.tolist() == [sum(inside(value, left, right) for value in finite) for left, right in pairs]
        assert counts[[0, -1]].min() >= 1
        assert all(left or right for left, right in pairwise(counts.tolist()))


# Quantiles


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 0.5, 1.125),
        ([1.0, 1.0, 1.0, 1.0], 1.0, 1.25),
        ([-1.0, -1.0], 0.5, -1.125),
        ([-1.0, -1.0], 1.0, -1.0),
        ([1.0, 2.0], 0.5, 1.25),
        ([1.0, 2.0], 0.75, 2.25),
        ([-3.0, 0.0, 0.0, 1.0], 0.5, 0.0),
        ([-0.0], 1.0, 0.0),
        ([INF, -INF, 1.0, 1.0], 1.0, 1.25),
        ([3.4e38], 1.0, 2.0**128),
        ([-3.4e38], 1.0, -1.75 * 2.0**127),
    ],
)
def test_quantiles_by_hand(values: list[float], share: float, expected: float) -> None:
    """A quantile is interpolated in its bin; it is zero for zeros, and values that are not finite are ignored."""
    assert quantiles(values, share) == [expected]


@pytest.mark.parametrize("values", [[1.0], [-1.0, 5.0], [-3.0, 0.0]])
def test_the_quantile_of_no_share_is_the_lower_end(values: list[float]) -> None:
    """The quantile of share 0 is the lower edge of the first occupied bin, within a millionth of its width."""
    (found,) = quantiles(values, 0.0)
    low, width = {1.0: (1.0, 0.25), -1.0: (-1.25, 0.25), -3.0: (-3.5, 0.5)}[values[0]]
    assert low <= found <= low + 1e-6 * width


def test_without_a_finite_value_all_quantiles_are_nan() -> None:
    """Without a finite value all quantiles are NaN."""
    for values in ([], [INF, -INF]):
        np.testing.assert_array_equal(quantiles(values, 0.0, 0.5, 1.0), [NAN] * 3)


def ends_of(value: float) -> tuple[float, float]:
    """Return the lower and upper edge of the bin of a value; bins that contain zero count as zero."""
    number = bin_of(to_float32(value)) % 1024
    if not number:
        return 0.0, 0.0
    low, high = (
        each * 2.0**-128 if each < 4 else math.ldexp(1 + each % 4 / 4, each // 4 - 127) for each in (number, number + 1)
    )
    return (low, high) if value > 0 else (-high, -low)


@settings(max_examples=200)
@given(tensors(FLOATS), st.lists(st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)), min_size=1, max_size=4))
def test_a_quantile_is_in_the_bin_of_the_sorted_value(tensor: Tensor, shares: list[float]) -> None:
    """For every type a quantile is in the bin of the corresponding sorted value."""
    values = sorted(to_float32(value) for value in values_of([tensor]) if math.isfinite(value))
    for share, found in zip(shares, quantiles(values, *shares), strict=True):
        if not values:
            assert math.isnan(found)
            continue
        low, high = ends_of(values[max(math.ceil(share * len(values)), 1) - 1])
        assert low <= found <= high


@settings(max_examples=60)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=40))
def test_quantiles_ascend(values: list[float]) -> None:
    """Quantiles are monotonic in the share."""
    found = quantiles(values, *np.linspace(0, 1, 21).tolist())
    assert found == sorted(found)


def test_batched_rows_have_the_quantiles_of_each() -> None:
    """For counts with leading dimensions each row has the same quantiles as alone."""
    rows = [[1.0, 2.0, -3.0], [], [0.0], [NAN, INF, 7.0]]
    shares = (0.0, 0.3, 1.0)
    block = torch.stack([counts_of(*values) for values in rows]).reshape(2, 1, 2, 2048)
    found = quantiles_of(block, shares)
    assert (found.shape, found.dtype) == ((2, 1, 2, 3), torch.float64)
    np.testing.assert_array_equal(found.reshape(4, 3), [quantiles(values, *shares) for values in rows])


def test_many_values_keep_their_ranks() -> None:
    """The median of 2**40 ones and as many twos is the upper edge of the ones, and one more value moves it."""
    counts = torch.zeros(2048, dtype=torch.float64)
    counts[508] = counts[512] = 2.0**40
    assert quantiles_of(counts, [0.5, 0.25]).tolist() == [1.25, 1.125]
    counts[512] += 2
    assert float(quantiles_of(counts, [0.5])) == pytest.approx(2.0, abs=1e-11)


def test_the_counts_stay_as_they_are() -> None:
    """Reading quantiles and edges does not change the counts."""
    counts = counts_of(1.0, -2.0)
    before = counts.tolist()
    quantiles_of(counts, [0.5])
    between_edges(counts.numpy())
    assert counts.tolist() == before


def test_nothing_waits_for_the_device() -> None:
    """Quantiles are computed on meta tensors, and no number is read elsewhere."""
    found = quantiles_of(torch.zeros(3, 2048, dtype=torch.float64, device="meta"), [0.5, 1.0])
    assert (found.shape, found.dtype, found.device.type) == ((3, 2), torch.float64, "meta")
    with NoReading():  # type: ignore[no-untyped-call]  # the constructor of torch is untyped
        quantiles_of(counts_of(), [0.0, 0.5])


def test_the_quantiles_of_a_histogram_are_these() -> None:
    """A histogram with quantiles computes them from its counts and names them by their shares."""
    histogram = ExponentHistogram(quantiles=[0.05, 0.5, 1])
    histogram.update(torch.tensor([1.0, -4.0, NAN, 0.1]))
    found = histogram.compute()
    names = ["quantile_0.05", "quantile_0.5", "quantile_1"]
    assert list(found) == ["histogram", *names]
    assert [float(found[name]) for name in names] == quantiles([1.0, -4.0, to_float32(0.1)], 0.05, 0.5, 1.0)

"""Tests of the histogram with the bins of the floating-point format."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.records.histogram import between_edges
from lightning_recorder.reductions import ExponentHistogram, Histogram, Values
from lightning_recorder.reductions.values import count_bins, sample_places
from tests.reductions.reference import assert_bins, bin_of, to_float32, values_of
from tests.reductions.strategies import FLOATS, streams, tensors

TINY = 2.0**-126  # the smallest normal float32


def bins(*stream: Tensor) -> NDArray[np.float64]:
    """Return the state after a stream."""
    histogram = ExponentHistogram()
    for tensor in stream:
        histogram.update(tensor)
    state: NDArray[np.float64] = histogram.compute()["histogram"].numpy()
    return state


def plot(*stream: Tensor) -> tuple[list[float], list[int]]:
    """Return edges and counts after a stream."""
    edges, counts = between_edges(bins(*stream))
    return edges.tolist(), counts.tolist()


# Bins


@pytest.mark.parametrize("low", [0, 1, 0x155555, 0x1FFFFF], ids=hex)
def test_a_bin_is_the_upper_eleven_bits(low: int) -> None:
    """The bin of every float32 is the number in its upper eleven bits, whatever the lower bits are."""
    patterns = (np.arange(2048, dtype=np.uint32) << 21) | np.uint32(low)
    for start in range(0, 2048, 512):  # several small updates, each compared with one-hot counts
        part = torch.from_numpy(patterns[start : start + 512].view(np.float32))
        expected = np.zeros(2048)
        expected[start : start + 512] = 1
        np.testing.assert_array_equal(bins(part), expected)


def test_the_bin_of_some_values_by_hand() -> None:
    """One starts bin 508, each quarter of its octave is the next bin, two starts bin 512, and the sign adds 1024."""
    values = [1.0, 1.2499999, 1.25, 1.5, 1.75, 1.9999999, 2.0, -1.0, 0.0, -0.0, math.inf, -math.inf]
    places = [508, 508, 509, 510, 511, 511, 512, 1532, 0, 1024, 1020, 2044]
    assert [int(bins(torch.tensor(value)).argmax()) for value in values] == places
    assert [bin_of(to_float32(value)) for value in values] == places


@pytest.mark.parametrize(
    ("value", "stands_for"),
    [(1e39, 3.4028234e38), (-1e308, -3.4028234e38), (1e-60, 0.0), (-1e-60, -0.0), (1 - 2.0**-53, 1.0), (0.1, 0.1)],
)
def test_a_float64_is_counted_where_its_float32_lies(value: float, stands_for: float) -> None:
    """A float64 is rounded to float32; too large values go to the end bin, too small ones to their signed zero."""
    double = bins(torch.tensor([value], dtype=torch.float64))
    np.testing.assert_array_equal(double, bins(torch.tensor([stands_for], dtype=torch.float32)))


@settings(max_examples=100)
@given(streams)
def test_any_stream_agrees_with_a_count_value_by_value(stream: list[Tensor]) -> None:
    """For every type, shape and split each bin counts the values by sign, exponent and mantissa."""
    assert_bins(torch.from_numpy(bins(*stream)), values_of(stream))


def test_counts_are_exact_beyond_float32() -> None:
    """A bin counts beyond 2**24, the limit of float32."""
    histogram = ExponentHistogram()
    histogram.state[508] = 2.0**24
    histogram.update(torch.ones(1))
    assert histogram.state[508] == 2**24 + 1


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 10_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_counting_into_copies_of_the_bins_is_counting(dtype: torch.dtype, numel: int) -> None:
    """Counting into several copies of the bins, as on a GPU, gives the same counts and leaves other words unchanged."""
    values = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 100
    ours, theirs = torch.ones(2, 2050, dtype=torch.float64)
    count_bins(ours, values, copies=64)
    count_bins(theirs, values, copies=1)
    assert torch.equal(ours, theirs)


# Edges


@pytest.mark.parametrize(
    ("stream", "edges", "counts"),
    [
        ([torch.tensor([1.0, 1.1, 1.25])], [1.0, 1.25, 1.5], [2, 1]),
        ([torch.tensor([1.0, 3.0])], [1.0, 1.25, 3.0, 3.5], [1, 0, 1]),
        ([torch.tensor([-1.0, 1.0])], [-1.25, -1.0, 1.0, 1.25], [1, 0, 1]),
        ([torch.tensor([-1.0]), torch.tensor([-1.3])], [-1.5, -1.25, -1.0], [1, 1]),
        ([torch.tensor([0.0, -0.0, 1e-40])], [-TINY, TINY], [3]),
        ([torch.tensor([TINY, -TINY, 0.0])], [-1.25 * TINY, -TINY, TINY, 1.25 * TINY], [1, 1, 1]),
        ([torch.tensor([3.4e38])], [1.75 * 2.0**127, 2.0**128], [1]),
        ([torch.tensor([1e39, -1e39], dtype=torch.float64)], None, [1, 0, 1]),
        ([torch.tensor([math.inf, math.nan, 1.0])], [1.0, 1.25], [1]),
        ([], [0.0, 0.0], [0]),
        ([torch.tensor([math.nan])], [0.0, 0.0], [0]),
    ],
)
def test_edges_by_hand(stream: list[Tensor], edges: list[float] | None, counts: list[int]) -> None:
    """Edges are those of the occupied bins; a gap between two of them is one bin, and so are the zeros."""
    if edges is None:
        edges = [-(2.0**128), -1.75 * 2.0**127, 1.75 * 2.0**127, 2.0**128]
    assert plot(*stream) == (edges, counts)


def inside(value: float, left: float, right: float) -> bool:
    """Return True if a bin contains a value; positive bins include their left edge, negative bins their right edge."""
    return left < value < right or (value == left and left > 0) or (value == right and right < 0)


@settings(max_examples=200)
@given(st.lists(tensors(FLOATS), max_size=3), st.sampled_from([1, 2, 5, 64, 4096]))
def test_each_value_lies_in_its_bin(stream: list[Tensor], limit: int) -> None:
    """Edges ascend, and each bin counts the float32 between its edges, even after coarsening."""
    finite = [to_float32(value) for value in values_of(stream) if math.isfinite(value)]
    edges, counts = between_edges(bins(*stream))
    fine = Histogram(edges, counts, 0.0, 0.0, 0.0, 0.0)
    for histogram in (fine, fine.coarsened(limit)):
        pairs = list(pairwise(histogram.edges.tolist()))
        assert histogram.count == len(finite)
        if finite:
            assert all(left < right for left, right in pairs)
            # Two neighbors that were merged across zero include both outer edges.
            found = [sum(left <= value <= right for value in finite) for left, right in pairs]
            if histogram is fine:
                found = [sum(inside(value, left, right) for value in finite) for left, right in pairs]
                assert found == histogram.counts.tolist()
            assert all(most >= count for most, count in zip(found, histogram.counts.tolist(), strict=True))


@settings(max_examples=100)
@given(st.lists(tensors(FLOATS), min_size=1, max_size=3))
def test_no_edge_is_wasted(stream: list[Tensor]) -> None:
    """The first and the last bin are occupied, and no two neighbors are both empty."""
    _, counts = plot(*stream)
    if sum(counts):
        assert counts[0] > 0
        assert counts[-1] > 0
        assert all(left or right for left, right in pairwise(counts))


def test_all_bins_are_fine_enough() -> None:
    """The width of a bin of normal numbers is between a seventh and a quarter of its lower edge."""
    state = np.ones(2048)
    edges, counts = between_edges(state)
    assert len(counts) == 2 * (1020 - 4) + 1
    assert int(counts.sum()) == 2040
    positive = edges[edges > 0]
    np.testing.assert_array_equal(edges[edges < 0], -positive[::-1])
    widths = positive[1:] / positive[:-1] - 1
    np.testing.assert_allclose(widths.reshape(-1, 4), [[1 / 4, 1 / 5, 1 / 6, 1 / 7]] * 254, rtol=1e-12)


# Samples and quantiles


def test_the_result_has_the_fraction_of_the_sample() -> None:
    """With a sample one value of each part is counted, and the counted fraction is a statistic."""
    sampled = ExponentHistogram(sample=2)
    sampled.update(torch.tensor([1.0, 1.0, 4.0, 4.0, 4.0]))  # parts: the first two and the last three
    summary = sampled.compute()
    assert [int(summary["histogram"][place]) for place in (508, 512, 516, 520)] == [1, 0, 1, 0]
    assert float(summary["histogram_fraction"]) == 0.4
    sampled.update(torch.tensor([2.0]))
    assert float(sampled.compute()["histogram_fraction"]) == 0.5
    assert "histogram_fraction" not in ExponentHistogram().compute()
    assert float(ExponentHistogram(sample=2).compute()["histogram_fraction"]) == 1.0


@settings(max_examples=50)
@given(streams, st.integers(1, 9))
def test_a_sample_is_that_of_each_tensor(stream: list[Tensor], sample: int) -> None:
    """For every type and shape the same one value per equal part is counted each time; all if there are few."""
    histogram, kept = ExponentHistogram(sample=sample), []
    for tensor in stream:
        histogram.update(tensor)
        values = values_of([tensor])
        if len(values) > sample:
            places = sample_places(len(values), sample).tolist()
            parts = [[i * len(values) // sample, (i + 1) * len(values) // sample] for i in range(sample)]
            assert all(low <= place < high for place, (low, high) in zip(places, parts, strict=True))
            values = [values[place] for place in places]
        kept += values
    assert_bins(histogram.compute()["histogram"], kept)


@pytest.mark.parametrize("shape", [(4096, 256), (64, 16, 8, 8), (100, 300), (70, 30, 50)])
def test_a_sample_meets_all_channels(shape: tuple[int, ...]) -> None:
    """For any sizes of the dimensions, a sample has about the same number of values at each index."""
    for dim, size in enumerate(shape):
        index = torch.arange(size).reshape([-1 if place == dim else 1 for place in range(len(shape))]).expand(shape)
        for sample in (4096, index.numel() // 16):
            counts = torch.bincount(Values(index).sampled(sample).long(), minlength=size)
            expected = counts.sum() / size
            # within five standard deviations of a random sample
            assert float((counts - expected).abs().max()) <= 5 * float(expected.sqrt())


def test_quantiles_by_hand() -> None:
    """A quantile is interpolated in its bin: the median of four ones is in the middle of the bin from 1 to 1.25."""
    histogram = ExponentHistogram(quantiles=[0.5, 1.0, 0])
    histogram.update(torch.ones(4))
    found = {name: float(value) for name, value in histogram.compute().items() if name != "histogram"}
    assert found == {"quantile_0.5": 1.125, "quantile_1": 1.25, "quantile_0": pytest.approx(1.0, abs=1e-6)}
    assert histogram.statistics == ("histogram", "quantile_0.5", "quantile_1", "quantile_0")


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        ({"sample": 0}, "sample must be an integer of at least 1, got 0"),
        ({"quantiles": [0.5, 1.5]}, "quantiles takes fractions between 0 and 1, got 1.5"),
        ({"quantiles": [math.nan]}, "quantiles takes fractions between 0 and 1, got nan"),
        ({"quantiles": 0.5}, "quantiles takes a list of fractions"),
        ({"quantiles": ["a"]}, "quantiles takes fractions between 0 and 1, got 'a'"),
        ({"quantiles": [0.5, 0.5]}, "quantiles has 0.5 more than once"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], warned: str) -> None:
    """Empty samples and shares outside 0 to 1 are rejected with an error that names the allowed values."""
    with pytest.raises(ArgumentError, match=warned):
        ExponentHistogram(**arguments)


def test_the_count_is_that_of_all_bins() -> None:
    """The count of a histogram is the sum over its bins, as an int."""
    histogram = Histogram(np.array([0.0, 1.0, 2.0]), np.array([3, 4]), 0.5, 3.5, 7.0, 11.0)
    assert histogram.count == 7
    assert type(histogram.count) is int

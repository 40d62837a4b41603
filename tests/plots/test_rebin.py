"""Tests of the rebinning of histograms."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder import ArgumentError
from lightning_recorder.plots.axes import Scale
from lightning_recorder.plots.rebin import edges_along, histogram_of, rebin, shares, to_histograms, value_axis
from lightning_recorder.reductions import Histogram, Statistics


def histogram(edges: list[float], counts: list[int]) -> Histogram:
    return Histogram(np.array(edges), np.array(counts), edges[0], edges[-1], 0.0, 0.0)


def measured(values: torch.Tensor) -> Histogram:
    """Return the histogram of values as recorded, with its exact range."""
    statistics = Statistics()
    statistics.update(values)
    found = statistics.compute()
    return histogram_of(found["histogram"].numpy(), float(found["min"]), float(found["max"]))


def slow(edges: list[float], counts: list[int], others: list[float]) -> list[Fraction]:
    """Rebin with exact fractions over all pairs of bins, as a slow reference."""
    found = [Fraction(0)] * (len(others) - 1)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        for place, (start, end) in enumerate(pairwise(others)):
            # The outer bins include everything beyond them.
            start = min(start, low) if place == 0 else start
            end = max(end, high) if place == len(found) - 1 else end
            common = min(Fraction(high), Fraction(end)) - max(Fraction(low), Fraction(start))
            if common > 0:
                found[place] += count * common / (Fraction(high) - Fraction(low))
    return found


def ascending(least: int) -> st.SearchStrategy[list[float]]:
    numbers = st.integers(-1000, 1000).map(lambda number: number / 8)
    return st.sets(numbers, min_size=least, max_size=12).map(sorted)


@given(st.data())
def test_counts_are_those_of_a_slow_reference(data: st.DataObject) -> None:
    """Rebinned counts equal a slow reference, and their sum is exactly the count."""
    edges, others = data.draw(ascending(2)), data.draw(ascending(2))
    counts = data.draw(st.lists(st.integers(0, 10**9), min_size=len(edges) - 1, max_size=len(edges) - 1))
    found = rebin(histogram(edges, counts), np.array(others))
    expected = slow(edges, counts, others)
    assert found.tolist() == pytest.approx([float(each) for each in expected], abs=1e-3, rel=1e-9)
    assert sum(map(Fraction, found.tolist())) == sum(counts)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_no_value_is_lost_or_made(values: list[float]) -> None:
    """For any values, the rebinned counts on the chosen axis sum exactly to the number of values."""
    found = measured(torch.tensor(values))
    axis = value_axis([found])
    assert axis is not None
    inside = rebin(found, edges_along(axis, 145))
    assert (inside >= 0).all()
    assert inside.sum() == len(values)


def test_finer_edges_keep_every_bin() -> None:
    """If the new edges include the old ones, the counts between old edges are unchanged."""
    found = rebin(histogram([0.0, 1.0, 4.0], [5, 7]), np.array([0.0, 0.5, 1.0, 2.0, 4.0]))
    assert found[:2].sum() == 5
    assert found[2:].sum() == 7


def test_equal_values_lie_in_one_bin() -> None:
    """A constant, whose bin has zero width, is counted entirely in the bin that contains it."""
    found = rebin(measured(torch.full((9,), 2.5)), np.array([0.0, 2.0, 3.0, 4.0]))
    assert found.tolist() == [0.0, 9.0, 0.0]


def test_zeros_lie_in_the_middle_bin_of_a_symmetric_axis() -> None:
    """If half of the values are 0, the middle bin of a symmetric linear axis contains at least that half."""
    values = torch.cat((torch.zeros(50), torch.linspace(-1, 1, 50)))
    found = measured(values)
    axis = value_axis([found])
    assert axis == Scale("linear", -1.0, 1.0)
    parts = shares(found, edges_along(axis, 145))
    assert parts.argmax() == 72
    assert parts[72] >= 0.5


def test_counts_of_the_fixed_bins_are_histograms() -> None:
    """Counts ``[steps, 2048]`` from either library become histograms with the edges of their bins."""
    statistics = Statistics()
    statistics.update(torch.tensor([1.0, 1.1, -3.0]))
    bins = statistics.compute()["histogram"]
    for counts in (bins[None], bins[None].numpy(), bins[None].to(torch.int64)):
        (found,) = to_histograms(counts)
        assert found.edges.tolist() == [-3.5, -3.0, 1.0, 1.25]
        assert found.counts.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(2048), np.zeros((2, 100)), [Histogram(np.zeros(3), np.zeros(3, dtype=int), 0, 0, 0, 0)], ["text"]],
    ids=["one dimension", "few bins", "as many edges as counts", "text"],
)
def test_what_is_no_histogram_is_refused(wrong: object) -> None:
    """An argument that is not a histogram raises an error with the expected shapes."""
    with pytest.raises(ArgumentError, match=r"\[steps, 2048\]|\[bins \+ 1\]"):
        to_histograms(wrong)


def test_an_axis_holds_all_values() -> None:
    """The axis spans the smallest to the largest value, and is None if there are no values."""
    assert value_axis([histogram([1.0, 2.0], [3]), histogram([5.0, 6.0], [3])]) == Scale("linear", 1.0, 6.0)
    assert value_axis([histogram([0.0, 1.0], [0])]) is None


def test_an_axis_over_magnitudes_is_symlog() -> None:
    """For spreads from 1 down to 1e-4, the axis is linear over the narrowest histogram and logarithmic beyond."""
    axis = value_axis([histogram([-(10.0**-power), 10.0**-power], [100]) for power in range(5)])
    assert axis == Scale("symlog", -1.0, 1.0, 1e-4)

"""Tests of the rebinning of histograms, the curves of a ridge plot, and the plot of histograms over time."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_recorder import ArgumentError
from lightning_recorder.plots import histogram_over_time, ridge
from lightning_recorder.plots.axes import Scale
from lightning_recorder.plots.frame import VIRIDIS
from lightning_recorder.plots.histograms import _curve, histogram_of, to_histograms
from lightning_recorder.plots.rebinning import bins_of, bins_of_counts, edges_along, rebin, shares, value_axis
from lightning_recorder.reductions import Histogram, Statistics
from tests.plots.pixels import data_in, names_of, place_of


def histogram(edges: list[float], counts: list[int]) -> Histogram:
    return Histogram(np.array(edges), np.array(counts), edges[0], edges[-1], 0.0, 0.0)


def measured_counts(values: torch.Tensor) -> tuple[NDArray[np.int64], float, float]:
    """Return the counts of the fixed bins of values as recorded, with their exact range."""
    statistics = Statistics()
    statistics.update(values)
    found = statistics.compute()
    return found["histogram"].numpy(), float(found["min"]), float(found["max"])


def measured(values: torch.Tensor) -> Histogram:
    """Return the histogram of values as recorded, with its exact range."""
    return histogram_of(*measured_counts(values))


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
    (found,) = rebin(bins_of([histogram(edges, counts)]), np.array(others))
    expected = slow(edges, counts, others)
    assert found.tolist() == pytest.approx([float(each) for each in expected], abs=1e-3, rel=1e-9)
    assert sum(map(Fraction, found.tolist())) == sum(counts)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_no_value_is_lost_or_made(values: list[float]) -> None:
    """For any values, the rebinned counts on the chosen axis sum exactly to the number of values."""
    found = bins_of([measured(torch.tensor(values))])
    axis = value_axis(found)
    assert axis is not None
    (inside,) = rebin(found, edges_along(axis, 145))
    assert (inside >= 0).all()
    assert inside.sum() == len(values)


@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20), min_size=1, max_size=5)
)
def test_all_at_once_are_as_one_at_a_time(tensors: list[list[float]]) -> None:
    """Histograms of fixed bins as one array have bit for bit the axis and the shares of each one by itself."""
    each = [measured_counts(torch.tensor(values)) for values in tensors]
    counts, low, high = (np.array(part) for part in zip(*each, strict=True))
    together, apart = bins_of_counts(counts, low, high), [histogram_of(*one) for one in each]
    axis = value_axis(together)
    assert axis == value_axis(bins_of(apart))
    if axis is not None:
        edges = edges_along(axis, 145)
        found = [shares(bins_of([one]), edges)[0] for one in apart]
        assert np.array_equal(shares(together, edges), found, equal_nan=True)


def test_finer_edges_keep_every_bin() -> None:
    """If the new edges include the old ones, the counts between old edges are unchanged."""
    (found,) = rebin(bins_of([histogram([0.0, 1.0, 4.0], [5, 7])]), np.array([0.0, 0.5, 1.0, 2.0, 4.0]))
    assert found[:2].sum() == 5
    assert found[2:].sum() == 7


def test_equal_values_lie_in_one_bin() -> None:
    """A constant, whose bin has zero width, is counted entirely in the bin that contains it."""
    (found,) = rebin(bins_of([measured(torch.full((9,), 2.5))]), np.array([0.0, 2.0, 3.0, 4.0]))
    assert found.tolist() == [0.0, 9.0, 0.0]


def test_zeros_lie_in_the_middle_bin_of_a_symmetric_axis() -> None:
    """If half of the values are 0, the middle bin of a symmetric linear axis contains at least that half."""
    values = torch.cat((torch.zeros(50), torch.linspace(-1, 1, 50)))
    found = bins_of([measured(values)])
    axis = value_axis(found)
    assert axis == Scale("linear", -1.0, 1.0)
    (parts,) = shares(found, edges_along(axis, 145))
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
    assert value_axis(bins_of([histogram([1.0, 2.0], [3]), histogram([5.0, 6.0], [3])])) == Scale("linear", 1.0, 6.0)
    assert value_axis(bins_of([histogram([0.0, 1.0], [0])])) is None


def test_an_axis_over_magnitudes_is_symlog() -> None:
    """For spreads from 1 down to 1e-4, the axis is linear over the narrowest histogram and logarithmic beyond."""
    axis = value_axis(bins_of([histogram([-(10.0**-power), 10.0**-power], [100]) for power in range(5)]))
    assert axis == Scale("symlog", -1.0, 1.0, 1e-4)


def ridge_histogram(low: float, high: float, bins: int = 2) -> Histogram:
    return Histogram(np.linspace(low, high, bins + 1), np.ones(bins, dtype=np.int64), low, high, 0.0, 0.0)


def test_a_curve_is_as_high_as_the_root_of_its_share() -> None:
    """The height of a curve is the square root of its fraction, relative to the highest one."""
    curve = _curve(np.array([0.2, 0.8]), 1, 40, 10, 100)
    full = 40 * 1.6 * 0.95
    ground = 10 + 2 * 40 - 0.5
    expected: list[list[float]] = [[0, 0], [0, full / 2], [50, full / 2], [50, full], [100, full], [100, 0]]
    assert (ground - curve[:, 1]).tolist() == pytest.approx([height for _, height in expected])
    assert curve[:, 0].tolist() == [x for x, _ in expected]


def test_curves_stand_where_their_values_are() -> None:
    """Three layers with adjacent ranges of values each fill their third of the width."""
    image = ridge(["a", "b", "c"], [ridge_histogram(row, row + 1) for row in range(3)], title="t", step=5)
    data = data_in(image)
    width, distance = data.shape[1], 34
    for row, color in enumerate(VIRIDIS[[40, 128, 215]]):
        # Just above the baseline of the layer, and at half its height.
        ground = data.shape[0] - 1 - (2 - row) * distance
        for y in (ground - 8, ground - 40):
            filled = (data[y] == color).all(axis=-1)
            first, last = np.flatnonzero(filled)[[0, -1]]
            assert (first, last) == pytest.approx((row * width / 3, (row + 1) * width / 3), abs=6)
            assert filled[first:last].all()


def test_of_many_layers_some_are_drawn() -> None:
    """If there are 200 layers, 60 are drawn, with one additional line of notes."""
    many = ridge(names_of(200), [ridge_histogram(0, 1)] * 200, title="t")
    sixty = ridge(names_of(60), [ridge_histogram(0, 1)] * 60, title="t")
    assert many.shape[0] == sixty.shape[0] + 15


def test_a_ridge_plot_without_a_value_is_a_line() -> None:
    """Without layers or values, the image contains only a message."""
    assert ridge([], [], title="t").shape == (100, 350, 3)
    assert ridge(["a"], np.zeros((1, 2048)), title="t").shape == (100, 350, 3)


def test_there_are_as_many_names_as_histograms() -> None:
    """Different numbers of names and histograms raise an error."""
    with pytest.raises(ArgumentError, match="one for each of the 1 histograms"):
        ridge(["a", "b"], np.zeros((1, 2048)), title="t")


def histogram_at(edges: list[float], counts: list[int]) -> Histogram:
    return Histogram(np.array(edges), np.array(counts), edges[0], edges[-1], 0.0, 0.0)


def test_each_bin_has_the_color_of_its_share() -> None:
    """Each bin has the color of its fraction on a logarithmic scale."""
    edges = np.linspace(0.0, 145.0, 146).tolist()
    counts = [[1] * 144 + [856], [10] * 100 + [0] * 45]
    found = [histogram_at(edges, each) for each in counts]
    data = data_in(histogram_over_time([3, 4], found, title="t"))
    assert data.shape[0] == 145 * 2
    for column, each in zip((10, -10), counts, strict=True):
        share = np.array(each) / sum(each)
        for value in (0, 50, 99, 120, 144):
            color = data[data.shape[0] - 1 - 2 * value, column]
            if share[value] == 0:
                assert (color == 255).all()
                continue
            # The scale runs from 1e-5 to the largest fraction.
            place = np.log(share[value] / 1e-5) / np.log(0.856 / 1e-5)
            assert place_of(color, VIRIDIS) == pytest.approx(place, abs=1 / 255)


def test_histograms_with_other_edges_share_an_axis() -> None:
    """Histograms with different edges are drawn on a common axis."""
    found = [histogram_at([0.0, 0.5, 1.0], [1, 1]), histogram_at([1.0, 1.25, 2.0], [2, 6])]
    data = data_in(histogram_over_time([0, 1], found, title="t"))
    filled = (data != 255).any(axis=-1)
    middle = data.shape[0] // 2
    assert filled[middle + 3 :, 10].all()
    assert not filled[: middle - 3, 10].any()
    assert filled[: middle - 3, -10].all()
    assert not filled[middle + 3 :, -10].any()


def test_a_step_without_values_is_grey() -> None:
    """A step without values has the grey of missing records."""
    some, none = histogram_at([0.0, 1.0], [5]), Histogram(np.zeros(2), np.zeros(1, dtype=int), np.nan, np.nan, 0.0, 0.0)
    data = data_in(histogram_over_time([0, 1, 2], [some, none, some], title="t"))
    width = data.shape[1]
    assert (data[:, width // 3 + 3 : 2 * width // 3 - 3] == 200).all()
    assert (data[:, : width // 3 - 3] != 200).any(axis=-1).all()


@pytest.mark.parametrize("is_merged", [False, True], ids=["counts", "bins"])
def test_a_step_with_only_nan_is_not_missing(is_merged: bool) -> None:
    """Steps with only NaN or infinities have the patterns of these, and steps without any value are grey."""
    values = [[1.0, 2.0, math.nan], [math.nan, math.inf], [-math.inf], [], [3.0]]
    measured = np.stack([measured_counts(torch.tensor(each))[0] for each in values])
    ends = np.full((2, len(values)), math.nan)
    found = bins_of_counts(measured, *ends) if is_merged else measured
    data = data_in(histogram_over_time(range(5), found, title="t"))
    edges = np.linspace(0, data.shape[1], 6).astype(int)
    nan, infinite, missing = (data[:, edges[column] + 3 : edges[column + 1] - 3] for column in (1, 2, 3))
    assert np.unique(nan).tolist() == [0, 255]
    assert [np.unique(each).tolist() for each in (infinite, missing)] == [[0], [200]]
    assert len(np.unique(data[:, 10])) > 2


def test_steps_that_share_a_column_are_averaged() -> None:
    """Steps that share a column are averaged."""
    low, high = histogram_at([0.0, 1.0, 2.0], [4, 0]), histogram_at([0.0, 1.0, 2.0], [0, 4])
    data = data_in(histogram_over_time(range(388), [low, high] * 194, title="t"))
    # All bins are equally full, except the middle one, which contains the edge at 1.
    (colors,) = ({data[row].tobytes() for row in (5, data.shape[0] - 5)},)
    assert len(colors) == 1


def test_a_plot_over_time_without_a_value_is_a_line() -> None:
    """Without values, the image contains only a message."""
    assert histogram_over_time([0, 1], np.zeros((2, 2048)), title="t").shape == (100, 350, 3)
    assert histogram_over_time([], [], title="t").shape == (100, 350, 3)


def test_there_are_as_many_histograms_as_steps() -> None:
    """Different numbers of histograms and steps raise an error that gives both."""
    with pytest.raises(ArgumentError, match="one for each of the 3 steps, got 2"):
        histogram_over_time([0, 1, 2], np.zeros((2, 2048)), title="t")

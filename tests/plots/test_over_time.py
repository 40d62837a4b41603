"""Tests of the colours in the plot of histograms over time."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_recorder import ArgumentError
from lightning_recorder.plots import histogram_over_time
from lightning_recorder.plots.colours import VIRIDIS
from lightning_recorder.reductions import Histogram
from tests.plots.pixels import data_in, place_of


def histogram(edges: list[float], counts: list[int]) -> Histogram:
    return Histogram(np.array(edges), np.array(counts), edges[0], edges[-1], 0.0, 0.0)


def test_each_bin_has_the_colour_of_its_share() -> None:
    """Each bin has the colour of its fraction on a logarithmic scale."""
    edges = np.linspace(0.0, 145.0, 146).tolist()
    counts = [[1] * 144 + [856], [10] * 100 + [0] * 45]
    found = [histogram(edges, each) for each in counts]
    data = data_in(histogram_over_time([3, 4], found, title="t"))
    assert data.shape[0] == 145 * 2
    for column, each in zip((10, -10), counts, strict=True):
        share = np.array(each) / sum(each)
        for value in (0, 50, 99, 120, 144):
            colour = data[data.shape[0] - 1 - 2 * value, column]
            if share[value] == 0:
                assert (colour == 255).all()
                continue
            # The scale runs from 1e-5 to the largest fraction.
            place = np.log(share[value] / 1e-5) / np.log(0.856 / 1e-5)
            assert place_of(colour, VIRIDIS) == pytest.approx(place, abs=1 / 255)


def test_histograms_with_other_edges_share_an_axis() -> None:
    """Histograms with different edges are drawn on a common axis."""
    found = [histogram([0.0, 0.5, 1.0], [1, 1]), histogram([1.0, 1.25, 2.0], [2, 6])]
    data = data_in(histogram_over_time([0, 1], found, title="t"))
    filled = (data != 255).any(axis=-1)
    middle = data.shape[0] // 2
    assert filled[middle + 3 :, 10].all()
    assert not filled[: middle - 3, 10].any()
    assert filled[: middle - 3, -10].all()
    assert not filled[middle + 3 :, -10].any()


def test_a_step_without_values_is_grey() -> None:
    """A step without values has the grey of missing records."""
    some, none = histogram([0.0, 1.0], [5]), Histogram(np.zeros(2), np.zeros(1, dtype=int), np.nan, np.nan, 0.0, 0.0)
    data = data_in(histogram_over_time([0, 1, 2], [some, none, some], title="t"))
    width = data.shape[1]
    assert (data[:, width // 3 + 3 : 2 * width // 3 - 3] == 200).all()
    assert (data[:, : width // 3 - 3] != 200).any(axis=-1).all()


def test_steps_that_share_a_column_are_averaged() -> None:
    """Steps that share a column are averaged."""
    low, high = histogram([0.0, 1.0, 2.0], [4, 0]), histogram([0.0, 1.0, 2.0], [0, 4])
    data = data_in(histogram_over_time(range(388), [low, high] * 194, title="t"))
    # All bins are equally full, except the middle one, which contains the edge at 1.
    (colours,) = ({data[row].tobytes() for row in (5, data.shape[0] - 5)},)
    assert len(colours) == 1


def test_without_a_value_the_picture_is_a_line() -> None:
    """Without values, the image contains only a message."""
    assert histogram_over_time([0, 1], np.zeros((2, 2048)), title="t").shape == (100, 350, 3)
    assert histogram_over_time([], [], title="t").shape == (100, 350, 3)


def test_there_are_as_many_histograms_as_steps() -> None:
    """Different numbers of histograms and steps raise an error that gives both."""
    with pytest.raises(ArgumentError, match="one for each of the 3 steps, got 2"):
        histogram_over_time([0, 1, 2], np.zeros((2, 2048)), title="t")

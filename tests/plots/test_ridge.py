"""Tests of the position and height of the curves in a ridge plot."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_recorder import ArgumentError
from lightning_recorder.plots import ridge
from lightning_recorder.plots.colours import VIRIDIS
from lightning_recorder.plots.ridge import _curve
from lightning_recorder.reductions import Histogram
from tests.plots.pixels import data_in, names_of


def histogram(low: float, high: float, bins: int = 2) -> Histogram:
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
    image = ridge(["a", "b", "c"], [histogram(row, row + 1) for row in range(3)], title="t", step=5)
    data = data_in(image)
    width, distance = data.shape[1], 34
    for row, colour in enumerate(VIRIDIS[[40, 128, 215]]):
        # Just above the baseline of the layer, and at half its height.
        ground = data.shape[0] - 1 - (2 - row) * distance
        for y in (ground - 8, ground - 40):
            filled = (data[y] == colour).all(axis=-1)
            first, last = np.flatnonzero(filled)[[0, -1]]
            assert (first, last) == pytest.approx((row * width / 3, (row + 1) * width / 3), abs=6)
            assert filled[first:last].all()


def test_of_many_layers_some_are_drawn() -> None:
    """If there are 200 layers, 60 are drawn, with one additional line of notes."""
    many = ridge(names_of(200), [histogram(0, 1)] * 200, title="t")
    sixty = ridge(names_of(60), [histogram(0, 1)] * 60, title="t")
    assert many.shape[0] == sixty.shape[0] + 15


def test_without_a_value_the_picture_is_a_line() -> None:
    """Without layers or values, the image contains only a message."""
    assert ridge([], [], title="t").shape == (100, 350, 3)
    assert ridge(["a"], np.zeros((1, 2048)), title="t").shape == (100, 350, 3)


def test_there_are_as_many_names_as_histograms() -> None:
    """Different numbers of names and histograms raise an error."""
    with pytest.raises(ArgumentError, match="one for each of the 1 histograms"):
        ridge(["a", "b"], np.zeros((1, 2048)), title="t")

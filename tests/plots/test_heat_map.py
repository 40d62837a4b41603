"""Tests of the colors of heat map cells."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_recorder import ArgumentError
from lightning_recorder.plots import heat_map
from lightning_recorder.plots.axes import furthest
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import PURPLE_ORANGE, VIRIDIS, pattern
from tests.plots.pixels import data_in, names_of, place_of


def cells(image: Image, rows: int, columns: int) -> Image:
    """Return the colors at the centres of the cells, ``[rows, columns, 3]``."""
    data = data_in(image)
    height, width = data.shape[:2]
    y = ((np.arange(rows) + 0.5) * height / rows).astype(int)
    x = ((np.arange(columns) + 0.5) * width / columns).astype(int)
    colors: Image = data[y][:, x]
    return colors


@pytest.mark.parametrize("library", [np.array, torch.tensor, list], ids=["numpy", "torch", "list"])
def test_each_cell_has_the_color_of_its_value(library: Callable[[object], object]) -> None:
    """Each cell has the color of its value on a linear scale from 0, rows downwards and steps to the right."""
    values = [[0.0, 1.0, 2.0, 3.0], [4.0, 3.5, 0.5, 2.5]]
    image = heat_map([0, 10, 20, 30], ["first", "second"], library(values), statistic="std", title="t")
    shown = cells(image, 2, 4)
    places = [[place_of(shown[row, step], VIRIDIS) for step in range(4)] for row in range(2)]
    assert np.array(places) == pytest.approx(np.array(values) / 4, abs=1 / 255)


def test_decades_are_shown_on_a_logarithmic_scale() -> None:
    """Powers of ten from 1e-6 to 1 are equidistant in the color table."""
    image = heat_map(range(7), ["a"], 10.0 ** np.arange(-6, 1)[None], statistic="rms", title="t")
    places = [place_of(color, VIRIDIS) for color in cells(image, 1, 7)[0]]
    assert places == pytest.approx((np.arange(7) / 6).tolist(), abs=1 / 255)


def test_signed_values_have_opposite_colors_around_zero() -> None:
    """Values above 0 are orange and values below are purple, symmetric around the middle of the table."""
    image = heat_map(range(3), ["a"], [[-2.0, 0.0, 1.0]], statistic="mean", title="t")
    places = [place_of(color, PURPLE_ORANGE) for color in cells(image, 1, 3)[0]]
    assert places == pytest.approx([0.0, 0.5, 0.75], abs=1 / 255)


def test_a_fraction_is_shown_from_0_to_1() -> None:
    """Fractions have a scale from 0 to 1, so that images are comparable."""
    image = heat_map(range(2), ["a"], [[0.25, 0.5]], statistic="zero_fraction", title="t")
    places = [place_of(color, VIRIDIS) for color in cells(image, 1, 2)[0]]
    assert places == pytest.approx([0.25, 0.5], abs=1 / 255)


def test_what_has_no_color_has_a_pattern() -> None:
    """Zeros on a logarithmic scale are white, missing values grey, infinities black and NaN striped."""
    values = np.array([[1e-3, 1.0, 0.0, np.inf, -np.inf, np.nan, np.nan]])
    recorded = np.array([[True] * 6 + [False]])
    # -inf alone must not select a symmetric scale.
    data = data_in(heat_map(range(7), ["a"], values, statistic="rms", title="t", recorded=recorded))
    shown = [data[:, where] for where in np.array_split(np.arange(data.shape[1]), 7)]
    for part, grey in ((2, 255), (3, 0), (4, 0), (6, 200)):
        assert (shown[part][:, 5:-5] == grey).all()
    first = 5 * data.shape[1] // 7 + 5
    stripes = pattern("nan", *data.shape[:2])[:, first : first + 40]
    assert (data[:, first : first + 40] == stripes).all()


def test_a_spike_among_many_steps_is_seen() -> None:
    """A single spike and a single infinity in 10,000 steps are visible in their columns."""
    values = np.ones((2, 10_000))
    values[1, 5_432] = -np.inf
    values[0, 1_234] = 40.0
    data = data_in(heat_map(range(10_000), ["a", "b"], values, statistic="std", title="t"))
    upper, lower = data[5], data[-5]
    brightest = np.flatnonzero((upper == VIRIDIS[-1]).all(axis=-1))
    assert brightest.mean() / data.shape[1] == pytest.approx(0.1234, abs=0.006)
    black = np.flatnonzero((lower == 0).all(axis=-1))
    assert black.mean() / data.shape[1] == pytest.approx(0.5432, abs=0.006)


def test_a_row_among_many_layers_is_seen() -> None:
    """If 260 of 1,000 layers are drawn, the one that is unlike the others is among them, at its place in the order."""
    values = np.ones((1_000, 2))
    values[402] = 40.0
    data = data_in(heat_map(range(2), names_of(1_000), values, statistic="std", title="t"))
    assert len(data) == 260 * 5
    brightest = np.flatnonzero((data[:, 10] == VIRIDIS[-1]).all(axis=-1))
    assert len(brightest) == 5
    assert brightest[0] / len(data) == pytest.approx(0.402, abs=1 / 260)


def test_no_record_has_a_message() -> None:
    """Without steps, layers or recorded values, the image contains only a message."""
    none = np.zeros((1, 2), dtype=bool)
    for image in (
        heat_map([], ["a"], np.zeros((1, 0)), statistic="rms", title="t"),
        heat_map([1], [], np.zeros((0, 1)), statistic="rms", title="t"),
        heat_map([1, 2], ["a"], [[1.0, 2.0]], statistic="rms", title="t", recorded=none),
    ):
        assert image.shape == (100, 350, 3)


@pytest.mark.parametrize(
    ("steps", "names", "values", "message"),
    [
        ([0, 1], ["a"], [1.0, 2.0], r"\[layers, steps\], got \[2\]"),
        ([0], ["a"], [[1.0, 2.0]], r"\[1, 1\], got \[1, 2\]"),
        ([0, 1], ["a", "b"], [[1.0, 2.0]], "one for each of the 1 layers"),
        ([1, 0], ["a"], [[1.0, 2.0]], "ascend"),
        ([0, np.nan], ["a"], [[1.0, 2.0]], "finite"),
        ([0, 1], ["a"], [["x", "y"]], r"numbers \[layers, steps\]"),
        ([0, 1], ["a"], torch.ones(1, 2, device="meta"), r"numbers \[layers, steps\]"),
    ],
)
def test_wrong_shapes_are_refused(steps: object, names: list[str], values: object, message: str) -> None:
    """A wrong shape raises an error that gives the expected shape."""
    with pytest.raises(ArgumentError, match=message):
        heat_map(steps, names, values, statistic="rms", title="t")


def test_of_what_was_recorded_there_must_be_as_much() -> None:
    """``recorded`` must have the shape of the values."""
    with pytest.raises(ArgumentError, match=r"recorded must have the shape \[1, 2\], got \[2\]"):
        heat_map([0, 1], ["a"], [[1.0, 2.0]], statistic="rms", title="t", recorded=np.ones(2, dtype=bool))


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
def test_the_most_conspicuous_value_is_shown(
    values: list[float], recorded: list[bool], chosen: float | None, there: bool
) -> None:
    """An infinity precedes NaN, which precedes the value furthest from 0; missing values are ignored."""
    found, is_there = furthest(np.array([values]), np.array([recorded]))
    assert is_there.tolist() == [there]
    if chosen is not None:
        np.testing.assert_equal(found.tolist(), [chosen])

"""Tests of the bar lengths of the gradient flow plot."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_recorder import ArgumentError
from lightning_recorder.plots import gradient_flow
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import pattern
from tests.plots.pixels import data_in, names_of

MEAN, LARGEST = [0, 114, 178], [245, 196, 118]


def ends(image: Image, rows: int) -> list[tuple[float, float]]:
    """Return the ends of the bars of each row, as fractions of the width."""
    data = data_in(image)
    height = data.shape[0] // rows
    found = []
    for row in range(rows):
        part = data[row * height : (row + 1) * height]
        lengths = [(part == color).all(axis=-1).any(axis=0).nonzero()[0] for color in (MEAN, LARGEST)]
        mean, largest = (float(each.max(initial=-1) + 1) / data.shape[1] for each in lengths)
        found.append((mean, largest))
    return found


def test_bars_end_at_their_values() -> None:
    """Bars end at their values on a logarithmic axis of whole decades, with layers from top to bottom."""
    means, maxima = [1.5e-5, 1e-4, 1e-3], [1e-3, 1e-2, 0.9]
    shown = ends(gradient_flow(["a", "b", "c"], means, maxima, title="t", step=3), 3)
    expected = (np.log10(np.array([means, maxima]).T) + 5) / 5
    assert np.array(shown) == pytest.approx(expected, abs=1 / 320)


def test_a_layer_without_gradient_has_a_square() -> None:
    """A layer with zero gradients has a hollow square at the left end instead of bars."""
    image = gradient_flow(["a", "b"], [0.0, 0.1], [0.0, 0.5], title="t")
    data = data_in(image)
    first = data[: data.shape[0] // 2]
    blue = (first == MEAN).all(axis=-1)
    rows, columns = np.nonzero(blue)
    assert (columns.min(), columns.max()) == (4, 15)
    assert (rows.max() - rows.min(), int(blue.sum())) == (11, 12 * 12 - 8 * 8)


def test_what_is_not_finite_goes_over_the_width() -> None:
    """NaN is a striped bar and infinity a black bar, both across the full width."""
    image = gradient_flow(["a", "b", "c"], [1.0, np.nan, 1.0], [np.inf, 2.0, 2.0], title="t")
    data = data_in(image)
    assert (data[4] == 0).all()
    middle = data[24 + 8 : 48 - 8]
    assert (middle == pattern("nan", 8, data.shape[1])).all()


def test_of_many_layers_some_are_drawn() -> None:
    """If there are 1,000 layers, 260 have bars of five pixels, including the last one."""
    means = np.full(1_000, 0.1)
    means[-1] = 0.5
    shown = ends(gradient_flow(names_of(1_000), means, means, title="t"), 260)
    assert [round(mean, 2) for mean, _ in (shown[0], shown[-2], shown[-1])] == [0.5, 0.5, 0.85]


def test_no_layer_is_a_line() -> None:
    """Without layers, the image contains only a message."""
    assert gradient_flow([], [], [], title="t").shape == (100, 350, 3)


def test_wrong_shapes_are_refused() -> None:
    """A wrong shape raises an error that gives the expected shape."""
    with pytest.raises(ArgumentError, match=r"maxima must have the shape \[2\], got \[1\]"):
        gradient_flow(["a", "b"], [1.0, 2.0], [1.0], title="t")
    with pytest.raises(ArgumentError, match=r"means must have the shape \[layers\], got \[1, 1\]"):
        gradient_flow(["a"], [[1.0]], [1.0], title="t")
    with pytest.raises(ArgumentError, match="one for each of the 1 layers"):
        gradient_flow(["a", "b"], [1.0], [1.0], title="t")

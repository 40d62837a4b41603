"""Tests of the colors in feature maps, attention maps and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_recorder import ArgumentError
from lightning_recorder.plots import attention_maps, feature_maps, kernels
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import PURPLE_ORANGE, VIRIDIS
from lightning_recorder.plots.grids import _pooled
from tests.plots.pixels import data_in, place_of

FRAME = 0xCF


def panel(image: Image, rows: int, columns: int) -> Image:
    """Return the colors of the first panel, one per value."""
    data = data_in(image, FRAME)
    height, width = data.shape[:2]
    assert (height % rows, width % columns) == (0, 0)
    return data[height // rows // 2 :: height // rows, width // columns // 2 :: width // columns]


def places(image: Image, rows: int, columns: int, table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shown = panel(image, rows, columns)
    return np.array([[place_of(shown[row, column], table) for column in range(columns)] for row in range(rows)])


def test_a_feature_map_has_the_colors_of_its_values() -> None:
    """Positive values have a scale from 0 that all channels share."""
    values = np.array([[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [[10.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    image = feature_maps(values, title="t")
    assert places(image, 2, 3, VIRIDIS) == pytest.approx(values[0] / 10, abs=1 / 255)


def test_each_channel_may_have_its_own_scale() -> None:
    """Without a shared scale, each channel uses the full range of colors."""
    values = np.array([[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [[-10.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    image = feature_maps(values, title="t", shared=False)
    assert places(image, 2, 3, PURPLE_ORANGE) == pytest.approx((values[0] / 5 + 1) / 2, abs=1 / 255)


def test_the_first_sample_is_shown() -> None:
    """Only the first sample of a batch is drawn, with a note that says so."""
    batch = torch.rand(3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    one, many = feature_maps(batch[0], title="t"), feature_maps(batch.to(torch.float64), title="t")
    assert (one[:380] == many[:380]).all()
    assert many.shape[0] == one.shape[0] + 15


def test_a_map_fills_its_place() -> None:
    """Six of 64 maps stand side by side, each 52 pixels wide, with two or three pixels for each of 20 values."""
    values = np.tile(np.arange(20.0), (64, 20, 1))
    data = data_in(feature_maps(values, title="t"), FRAME)
    assert data.shape == (52, 52, 3)
    _, widths = np.unique([place_of(color, VIRIDIS) for color in data[10]], return_counts=True)
    assert (len(widths), set(widths.tolist())) == (20, {2, 3})


def test_attention_has_queries_down_and_keys_across() -> None:
    """Queries run downwards and keys to the right, and each head has its own scale."""
    weights = np.zeros((2, 3, 4))
    weights[0, 2, 0], weights[0, 0, 3], weights[1] = 0.5, 0.25, 1.0
    shown = places(attention_maps(weights, title="t"), 3, 4, VIRIDIS)
    assert shown == pytest.approx(weights[0] * 2, abs=1 / 255)


def test_kernels_of_three_inputs_are_in_color() -> None:
    """Kernels with three inputs are drawn as red, green and blue, from their smallest to their largest weight."""
    weight = np.linspace(-1.0, 1.0, 2 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    shown = panel(kernels(weight, title="t"), 2, 2)
    low, high = weight[0].min(), weight[0].max()
    expected = np.moveaxis((weight[0] - low) / (high - low) * 255, 0, -1)
    assert np.abs(shown - expected).max() <= 0.5


def test_other_kernels_show_their_first_input() -> None:
    """Other kernels show the weights of their first input, orange above 0 and purple below."""
    weight = np.zeros((2, 5, 3, 3))
    weight[0, 0] = np.linspace(-1, 1, 9).reshape(3, 3)
    weight[:, 1:] = 99.0
    shown = places(kernels(weight, title="t"), 3, 3, PURPLE_ORANGE)
    assert shown == pytest.approx((weight[0, 0] + 1) / 2, abs=1 / 255)


@pytest.mark.parametrize(("inputs", "shape"), [(9, None), (9, (3, 3)), (9, (1, 3, 3))])
def test_rows_of_a_linear_layer_are_pictures(inputs: int, shape: tuple[int, ...] | None) -> None:
    """Nine inputs of a linear layer form three rows of three pixels, in the order of torch.flatten."""
    weight = np.linspace(-1, 1, 2 * inputs).reshape(2, inputs)
    shown = places(kernels(weight, title="t", shape=shape), 3, 3, PURPLE_ORANGE)
    assert shown == pytest.approx((weight[0].reshape(3, 3) + 1) / 2, abs=1 / 255)


def test_large_maps_are_averaged() -> None:
    """Each block of a large map shows its mean, and blocks at the lower and right edges may be smaller."""
    values = np.arange(35.0).reshape(1, 5, 7)
    found, block = _pooled(values, (3, 4), 100)
    assert block == (2, 2)
    expected = [[values[0, y : y + 2, x : x + 2].mean() for x in range(0, 7, 2)] for y in range(0, 5, 2)]
    assert found[0] == pytest.approx(np.array(expected))


def test_large_maps_are_averaged_until_they_are_small_enough() -> None:
    """The number of values in a panel is bounded, whatever the shape."""
    for height, width in ((100, 100), (1, 5_000), (5_000, 1), (3, 3)):
        found, _ = _pooled(np.ones((1, height, width)), (200, 200), 50)
        assert found[0].size <= 50
        assert found == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("draw", "values", "message"),
    [
        (feature_maps, np.ones((3, 3)), r"\[channels, height, width\] or \[batch, .*\], got \[3, 3\]"),
        (attention_maps, np.ones(3), r"\[heads, queries, keys\] or \[batch, .*\], got \[3\]"),
        (kernels, np.ones((2, 3, 4)), r"\[out, in, height, width\] .*, got \[2, 3, 4\]"),
        (kernels, np.ones((2, 7)), r"\[out, 7\], which is not a square picture; give its shape"),
        (feature_maps, torch.ones(1, 2, 2, dtype=torch.complex64), r"numbers \[channels"),
    ],
)
def test_wrong_shapes_are_refused(draw: Callable[..., Image], values: object, message: str) -> None:
    """A wrong shape raises an error that gives the expected shape."""
    with pytest.raises(ArgumentError, match=message):
        draw(values, title="t")


def test_a_shape_must_be_that_of_the_inputs() -> None:
    """``shape`` must match the number of inputs, and a convolution does not accept it."""
    with pytest.raises(ArgumentError, match="of 6 inputs"):
        kernels(np.ones((2, 6)), title="t", shape=(2, 2))
    with pytest.raises(ArgumentError, match="a convolution has its own"):
        kernels(np.ones((2, 1, 3, 3)), title="t", shape=(3, 3))


def test_the_number_of_panels_is_at_least_one() -> None:
    """A number of panels below 1 raises an error that names the argument."""
    with pytest.raises(ArgumentError, match="max_maps"):
        feature_maps(np.ones((1, 2, 2)), title="t", max_maps=0)


def test_an_empty_array_has_a_message() -> None:
    """Without channels, samples or pixels, the image contains only a message."""
    for shape in ((0, 4, 4), (0, 3, 4, 4), (2, 0, 4)):
        assert feature_maps(np.ones(shape), title="t").shape == (100, 350, 3)
    assert kernels(np.ones((0, 3, 2, 2)), title="t").shape == (100, 350, 3)
    assert kernels(np.ones((2, 0, 2, 2)), title="t").shape == (100, 350, 3)

"""Tests of limits on image size, file size and input values, for all plots."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_recorder import plots
from lightning_recorder.plots import (
    attention_maps,
    feature_maps,
    gradient_flow,
    heat_map,
    histogram_over_time,
    kernels,
    ridge,
)
from lightning_recorder.plots.canvas import Image
from lightning_recorder.reductions import Histogram
from tests.plots.pixels import MAX_PNG_BYTES, png_bytes

FLOATS = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.0, 1e30, -1e30, 1e-30, 1.7976931348623157e308, -1.7976931348623157e308, 5e-324]),
)
NAMES = st.one_of(st.text(max_size=60), st.sampled_from(["$x_1$", "$\\frac{", "<b>", "&", "\ud800", "层" * 90, ""]))


def check(image: Image) -> None:
    height, width, channels = image.shape
    assert image.dtype == np.uint8
    assert (width, channels) == (350, 3)
    assert 100 <= height <= 1600


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], NDArray[np.float64]]:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    values = draw(st.lists(FLOATS, min_size=rows * columns, max_size=rows * columns))
    names = draw(st.lists(NAMES, min_size=rows, max_size=rows))
    return names, np.array(values, dtype=np.float64).reshape(rows, columns)


@settings(max_examples=60, deadline=None)
@given(tables(), NAMES, st.integers(0, 10**15), st.none() | st.booleans())
def test_a_heat_map_bears_any_values(
    table: tuple[list[str], NDArray[np.float64]], name: str, first: int, log: bool | None
) -> None:
    """A heat map accepts any values, names, steps and scale."""
    names, values = table
    steps = [first + 3**step for step in range(values.shape[1])]
    check(heat_map(steps, names, values, statistic=name, title=name, log=log))


@settings(max_examples=60, deadline=None)
@given(tables(), NAMES)
def test_a_flow_bears_any_values(table: tuple[list[str], NDArray[np.float64]], name: str) -> None:
    """A gradient flow plot accepts any values and names."""
    names, values = table
    first = values[:, 0] if values.shape[1] else np.zeros(len(names))
    check(gradient_flow(names, first, first[::-1], title=name, statistic=name))


@st.composite
def histograms(draw: st.DrawFn) -> Histogram:
    edges = np.sort(np.array(draw(st.lists(FLOATS, min_size=2, max_size=6)), dtype=np.float64))
    counts = draw(st.lists(st.integers(0, 2**40), min_size=len(edges) - 1, max_size=len(edges) - 1))
    low, high = draw(FLOATS), draw(FLOATS)
    return Histogram(edges, np.array(counts, dtype=np.int64), min(low, high), max(low, high), 0.0, 0.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(histograms(), max_size=4), NAMES)
def test_histograms_may_have_any_edges(found: list[Histogram], name: str) -> None:
    """Histograms may have infinite, NaN or equal edges, and edges that contradict their range."""
    check(histogram_over_time(range(len(found)), found, title=name, value=name))
    check(ridge([name] * len(found), found, title=name, value=name))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.lists(FLOATS, min_size=1, max_size=9), st.booleans())
def test_maps_bear_any_values(count: int, rows: int, columns: int, some: list[float], shared: bool) -> None:
    """Feature maps, attention maps and kernels accept any values and shapes."""
    values = np.resize(np.array(some, dtype=np.float64), (count, rows, columns))
    check(feature_maps(values, title="t", shared=shared))
    check(attention_maps(values, title="t", shared=shared))
    check(kernels(np.stack([values] * count, axis=1), title="t", shared=shared))


def noise(*shape: int) -> NDArray[np.float64]:
    generator = np.random.default_rng(0)
    return np.asarray(10.0 ** generator.uniform(-6, 6, shape) * generator.choice([-1.0, 1.0], shape))


def letters(count: int) -> list[str]:
    """Return random names of 40 characters, longer than the space in a row."""
    codes = np.random.default_rng(1).integers(65, 123, (count, 40))
    return ["".join(map(chr, row)) for row in codes]


def holed(*shape: int) -> NDArray[np.float64]:
    """Return noise with a third of the values NaN, infinite or 0."""
    values, kind = np.abs(noise(*shape)), np.random.default_rng(2).random(shape)
    values[kind < 0.15] = np.nan
    values[(kind > 0.15) & (kind < 0.2)] = np.inf
    values[(kind > 0.2) & (kind < 0.33)] = 0.0
    return values


def full_bins(count: int) -> NDArray[np.int64]:
    generator = np.random.default_rng(3)
    return generator.integers(0, 2, (count, 2048)) * generator.integers(1, 10**6, (count, 2048))


def hard_heat_map(rows: int, steps: int) -> Image:
    return heat_map(range(steps), letters(rows), noise(rows, steps), statistic="mean", title="t" * 200)


def holed_heat_map(rows: int) -> Image:
    recorded = noise(rows, 300) < 1e3
    return heat_map(range(300), letters(rows), holed(rows, 300), statistic="rms", title="t", recorded=recorded)


def hard_maps(count: int) -> Image:
    return feature_maps(noise(count, 90, 70), title="t", max_maps=999)


SIZES = ((6, 10_000), (60, 300), (93, 300), (116, 300), (200, 10_000), (260, 300), (2_000, 300))

HARD: dict[str, Callable[[], Image]] = {
    **{f"heat map of {rows} × {steps}": partial(hard_heat_map, rows, steps) for rows, steps in SIZES},
    **{f"heat map of {rows} with holes": partial(holed_heat_map, rows) for rows in (66, 116, 200, 260)},
    **{f"{count} feature maps": partial(hard_maps, count) for count in (1, 5, 16, 64, 300)},
    "histograms over time": lambda: histogram_over_time(range(900), full_bins(900), title="t"),
    "ridge": lambda: ridge(letters(300), full_bins(300), title="t", max_layers=300),
    "flow of 116": lambda: gradient_flow(letters(116), noise(116), noise(116), title="t"),
    "flow of 1000": lambda: gradient_flow(letters(1_000), noise(1_000), noise(1_000), title="t"),
    "feature maps with holes": lambda: feature_maps(holed(64, 40, 40), title="t"),
    "long feature maps": lambda: feature_maps(noise(64, 1, 5_000), title="t"),
    "high feature maps": lambda: feature_maps(noise(64, 5_000, 1), title="t", max_maps=256),
    "attention maps": lambda: attention_maps(noise(16, 300, 300), title="t"),
    "kernels in color": lambda: kernels(noise(256, 3, 40, 40), title="t", max_kernels=256),
    "kernels of a linear layer": lambda: kernels(noise(100, 784), title="t", max_kernels=100),
}


@pytest.mark.parametrize("draw", HARD.values(), ids=HARD)
def test_the_hardest_pictures_are_bounded(draw: Callable[[], Image]) -> None:
    """Images of noise with random names are at most 1,600 pixels high and take at most 300,000 bytes as PNG."""
    image = draw()
    check(image)
    assert png_bytes(image) <= MAX_PNG_BYTES


def test_every_plot_is_bounded() -> None:
    """Each public function that returns a picture draws one of the hardest pictures."""
    functions = [each for each in vars(plots).values() if inspect.isfunction(each)]
    public = {each.__name__ for each in functions if inspect.signature(each).return_annotation == "Image"}
    drawn = {name for draw in HARD.values() for name in getattr(draw, "func", draw).__code__.co_names if name in public}
    assert drawn == public >= {"heat_map", "kernels"}

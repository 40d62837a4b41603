"""Plot of the gradient magnitude at each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_recorder.errors import ArgumentError
from lightning_recorder.insight.unusual import unusualness
from lightning_recorder.plots.axes import Floats, Scale, checked_degrees, checked_names, to_floats
from lightning_recorder.plots.canvas import Canvas, Image, shortened
from lightning_recorder.plots.frame import (
    MARGIN,
    RIGHT,
    TOP,
    WIDTH,
    Mark,
    blank,
    bottom_room,
    chosen_rows,
    fitted_names,
    fitting_ticks,
    new_canvas,
    notes_below,
    numbers_below,
    pattern,
    plain,
    row_names,
    rows_room,
    swatch,
)

__all__ = ["gradient_flow"]

# A blue of the Okabe-Ito palette and a light orange. They differ in hue for any color vision, and in lightness.
_MEAN, _LARGEST = (0, 114, 178), (245, 196, 118)
_LEGEND_PX = 34  # placed above the bars, so that readers see it first
_MOST_ROWS = 260
_TALLEST_PX = 1400


def gradient_flow(
    names: Sequence[str],
    means: Any,
    maxima: Any,
    *,
    title: str,
    step: int | None = None,
    statistic: str = "mean |gradient|",
    largest: str = "max |gradient|",
    degrees: Any = None,
) -> Image:
    """Draw two bars per layer on a logarithmic axis, from top to bottom in execution order.

    A layer whose gradients are all 0 has a hollow square at the left end. A bar whose value is not finite spans the
    full width. It is striped for NaN and black for infinity. Layers that stand out have bold names: they are unlike the
    neighboring layers, equal layers or their own past. If there are more than 260 layers, only the layers that stand
    out and an even selection of the others are drawn, with a note.

    Args:
        names: The names of the layers in execution order.
        means: The mean magnitude or another average, such as the rms, ``[layers]``. Negative values are replaced by
            their magnitude.
        maxima: The largest magnitude, ``[layers]``.
        title: The title of the image.
        step: The step at which the values were recorded.
        statistic: The name of the statistic in ``means``, with a unit if it has one.
        largest: The name of the statistic in ``maxima``.
        degrees: How unusual each layer is, ``[layers]``. :func:`overview` passes degrees from all statistics. By
            default, the layers are compared by ``means`` and ``maxima``.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the shapes do not match.
    """
    means = np.abs(to_floats("means", means, "[layers]", 1))
    maxima = np.abs(to_floats("maxima", maxima, "[layers]", 1))
    if means.shape != maxima.shape:
        raise ArgumentError(f"maxima must have the shape [{len(means)}], got {list(maxima.shape)}")
    names = checked_names(names, len(means), "layers")
    title = title if step is None else f"{title}, step {step:,}"
    if not names:
        return blank(title, "nothing was recorded")
    if degrees is None:
        sizes = {"average": means[:, None], "largest": maxima[:, None]}
        bad = (~(np.isfinite(means) & np.isfinite(maxima))).astype(np.float64)[:, None]
        degrees = unusualness(names, {**sizes, "nan_count": bad})
    rows, marked, notes = chosen_rows(names, checked_degrees(degrees, len(names)), _MOST_ROWS)
    means, maxima = means[rows], maxima[rows]
    return _drawn(title, fitted_names(rows, names), means, maxima, (statistic, largest), notes, marked)


def _drawn(
    title: str,
    names: list[str],
    means: Floats,
    maxima: Floats,
    words: tuple[str, str],
    notes: list[str],
    marked: list[int],
) -> Image:
    axis = _axis(np.concatenate((means, maxima)))
    row_px = int(np.clip(min(_TALLEST_PX // len(names), max(260 // len(names), 14)), 5, 24))
    left, top = rows_room(names), TOP + _LEGEND_PX
    area = (left, top, WIDTH - RIGHT - left, len(names) * row_px)
    both = np.stack((means, maxima))
    kinds: dict[Mark, bool] = {"nan": bool(np.isnan(both).any()), "inf": bool(np.isinf(both).any())}
    marks = [mark for mark, is_there in kinds.items() if is_there]
    canvas = new_canvas(top + area[3] + bottom_room(notes, marks), title)
    canvas.image(left, top, _bars(means, maxima, axis, row_px, area[2]))
    canvas.frame(*area)
    row_names(canvas, area, names, row_px, marked)
    numbers_below(canvas, area, axis, "magnitude (log scale)")
    _legend(canvas, words)
    notes_below(canvas, area, notes, marks)
    return canvas.pixels()


def _legend(canvas: Canvas, words: tuple[str, str]) -> None:
    mean, largest = (shortened(word, WIDTH / 2 - 40) for word in words)
    x = swatch(canvas, MARGIN, TOP + 6, plain(_MEAN), mean)
    swatch(canvas, x, TOP + 6, plain(_LARGEST), largest)
    swatch(canvas, MARGIN, TOP + 22, _square(10), "0: no gradient arrives")


def _axis(magnitudes: Floats) -> Scale:
    """Return an axis around all magnitudes, at most 12 decades long. Both ends are powers of ten."""
    positive = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
    if not positive.size:
        return Scale("log", 0.1, 1.0)
    high = float(np.clip(np.ceil(np.log10(positive.max()) + 1e-9), -290, 308))
    low = float(np.clip(np.floor(np.log10(positive.min()) - 1e-9), high - 12, high - 1))
    return Scale("log", 10.0**low, 10.0**high)


def _square(size: int) -> Image:
    """Return a hollow square on white."""
    pixels = np.full((size, size, 3), 255, dtype=np.uint8)
    pixels[[0, 1, -2, -1]] = pixels[:, [0, 1, -2, -1]] = _MEAN
    return pixels


def _bars(means: Floats, maxima: Floats, axis: Scale, row_px: int, width: int) -> Image:
    """Draw the bars. The wide bar of the maximum is behind the narrow bar of the mean."""
    pixels = np.full((len(means) * row_px, width, 3), 255, dtype=np.uint8)
    for place, _ in fitting_ticks(axis, width):
        pixels[:, min(int(place * width), width - 1)] = 225
    gap, thin = max(row_px // 8, 1), max(row_px // 3, 1)
    for row, (mean, largest) in enumerate(zip(means, maxima, strict=True)):
        top, bottom = row * row_px, (row + 1) * row_px
        _bar(pixels[top + gap : bottom - gap], largest, axis, _LARGEST)
        _bar(pixels[top + thin : bottom - thin], mean, axis, _MEAN)
        if mean == 0 and largest == 0:
            size = max(min(row_px - 2, 12), 3)
            start = top + (row_px - size) // 2
            pixels[start : start + size, 4 : 4 + size] = _square(size)
    return pixels


def _bar(pixels: Image, value: float, axis: Scale, color: tuple[int, int, int]) -> None:
    if not np.isfinite(value):
        pixels[:] = pattern("nan" if np.isnan(value) else "inf", *pixels.shape[:2])
    elif value > 0:
        # Draw at least two pixels, to distinguish the smallest values from 0.
        pixels[:, : max(round(float(axis.place(value)) * pixels.shape[1]), 2)] = color

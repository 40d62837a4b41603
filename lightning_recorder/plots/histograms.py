"""Plots of histograms of all layers at one step, and of one layer over all steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.bins import BINS
from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.insight.unusual import unusualness
from lightning_recorder.plots.axes import (
    Columns,
    Floats,
    Scale,
    checked_degrees,
    checked_names,
    checked_steps,
    columns_of,
    number,
    to_floats,
)
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import (
    BAR_ROOM,
    RIGHT,
    TOP,
    VIRIDIS,
    WIDTH,
    FoundAt,
    Mark,
    blank,
    bottom_room,
    chosen_rows,
    color_bar,
    cover,
    fitted_names,
    new_canvas,
    notes_below,
    notes_on_findings,
    numbers_below,
    numbers_left,
    outline_findings,
    paint,
    row_names,
    rows_room,
)
from lightning_recorder.plots.rebinning import Bins, bins_of, bins_of_counts, edges_along, limits_of, shares, value_axis
from lightning_recorder.records.histogram import Histogram, between_edges

__all__ = ["histogram_of", "histogram_over_time", "ridge", "to_histograms"]


def to_histograms(histograms: Any) -> list[Histogram]:
    """Return checked histograms, or build them from counts of the fixed bins.

    Args:
        histograms: A sequence of :class:`~lightning_recorder.reductions.Histogram`, or counts, ``[n, 2048]``.

    Raises:
        ArgumentError: If the argument is neither.
    """
    if not hasattr(histograms, "shape"):
        histograms = list(histograms)
        if all(isinstance(each, Histogram) for each in histograms):
            return [_checked(each) for each in histograms]
    return [histogram_of(row) for row in _checked_counts(histograms)]


def _checked_counts(histograms: Any) -> Floats:
    counts = to_floats("histograms", histograms, f"[steps, {BINS}], or a sequence of Histogram", 2)
    if counts.shape[1] != BINS:
        raise ArgumentError(f"histograms must have the shape [steps, {BINS}], got {list(counts.shape)}")
    return np.nan_to_num(counts, nan=0.0, posinf=0.0, neginf=0.0).clip(0, 2.0**52)


def histogram_of(counts: Floats | NDArray[np.int64], low: float = math.nan, high: float = math.nan) -> Histogram:
    """Build a histogram from counts of the fixed bins, ``[2048]``. ``low`` and ``high`` are NaN if unknown."""
    edges, inside = between_edges(counts)
    return Histogram(edges, inside, low, high, math.nan, math.nan)


def _checked(histogram: Histogram) -> Histogram:
    if histogram.edges.ndim != 1 or histogram.edges.shape != (len(histogram.counts) + 1,):
        shapes = f"{list(histogram.edges.shape)} and {list(histogram.counts.shape)}"
        raise ArgumentError(f"a histogram has edges [bins + 1] and counts [bins], got {shapes}")
    return histogram


_RIDGE_BINS = 121  # odd, so that 0 is the center of a bin on a symmetric axis
_MOST_LAYERS = 80
_OVERLAP = 1.6  # maximum height of a curve, as a multiple of the distance between rows


def ridge(
    names: Sequence[str],
    histograms: Any,
    *,
    title: str,
    step: int | None = None,
    value: str = "value",
    max_layers: int = 60,
    degrees: Any = None,
) -> Image:
    """Draw one curve per layer, from top to bottom, on a common axis of values.

    The axis has 121 bins of equal width in the image. The height of a curve is the square root of the fraction of
    values in the bin, so that rare values are visible next to a peak. All curves have the same maximum height. Layers
    that stand out have bold names: they are unlike the neighboring layers, equal layers or their own past. If there are
    more than ``max_layers`` layers, only the layers that stand out and an even selection of the others are drawn, with
    a note.

    Args:
        names: The names of the layers, in order.
        histograms: One :class:`~lightning_recorder.reductions.Histogram` per layer, or counts of the fixed bins,
            ``[layers, 2048]``.
        title: The title of the image.
        step: The step at which the histograms were recorded.
        value: The name of the values, with a unit if they have one.
        max_layers: The maximum number of curves, up to 80.
        degrees: How unusual each layer is, ``[layers]``. :func:`overview` passes degrees from all statistics. By
            default, the layers are compared by the magnitude of their values.

    Returns:
        The image, ``[height, 350, 3]``, at most 1,600 pixels high.

    Raises:
        ArgumentError: If the numbers of names and histograms differ.
    """
    check_integer("max_layers", max_layers, 1)
    found = to_histograms(histograms)
    names = checked_names(names, len(found), "histograms")
    degrees = unusualness(names, _sizes(found)) if degrees is None else checked_degrees(degrees, len(found))
    chosen, marked, why = chosen_rows(names, degrees, min(max_layers, _MOST_LAYERS))
    drawn = bins_of([found[row] for row in chosen])
    axis = value_axis(drawn)
    title = title if step is None else f"{title}, step {step:,}"
    if axis is None:
        return blank(title, "no finite value was recorded")
    notes = [*why, "height: root of the share, scaled for each layer"]
    if axis.kind == "symlog":
        notes.append(f"values: logarithmic on both sides of 0, linear below {number(axis.threshold)}")
        notes.append("a bell that is wider than the linear part has two peaks")
    shown = zip(fitted_names(chosen, names), chosen, strict=True)
    names = [name if found[row].count else f"{name} (none)" for name, row in shown]
    edges = edges_along(axis, _RIDGE_BINS)
    parts = shares(drawn, edges)
    value = f"{value} (symlog)" if axis.kind == "symlog" else value
    return _draw_ridge(title, names, parts, axis, value, notes, marked)


def _sizes(histograms: Sequence[Histogram]) -> dict[str, Floats]:
    """Return the rms and the largest magnitude of each histogram, ``[layers, 1]`` each; NaN for an empty one."""
    sizes = {"rms": [math.nan] * len(histograms), "largest": [math.nan] * len(histograms)}
    for row, each in enumerate(histograms):
        if each.count:
            limits, counts = limits_of(each), each.counts.astype(np.float64)
            middles = np.abs(limits[:-1] / 2 + limits[1:] / 2)
            largest = float(middles[counts > 0].max())
            sizes["largest"][row] = largest
            # Compute in units of the largest magnitude, because its square may overflow float64.
            sizes["rms"][row] = largest and largest * math.sqrt(
                (counts * (middles / largest) ** 2).sum() / counts.sum()
            )
    return {name: np.array(column)[:, None] for name, column in sizes.items()}


def _draw_ridge(
    title: str, names: list[str], parts: Floats, axis: Scale, value: str, notes: list[str], marked: list[int]
) -> Image:
    distance = int(np.clip(300 // len(names), 14, 34))
    left, head = rows_room(names), round(distance * (_OVERLAP - 1))
    area = (left, TOP + head, WIDTH - RIGHT - left, len(names) * distance)
    canvas = new_canvas(area[1] + area[3] + bottom_room(notes), title)
    curves = [_curve(each, row, distance, head, area[2]) for row, each in enumerate(parts)]
    inside = VIRIDIS[np.linspace(40, 215, len(curves)).round().astype(int)].tolist()
    colors = ["#{:02x}{:02x}{:02x}".format(*each) for each in inside]
    filled = [(curve, color, "#ffffff") for curve, color in zip(curves, colors, strict=True)]
    canvas.ridges(left, TOP, area[2], area[3] + head, filled)
    canvas.frame(left, TOP, area[2], area[3] + head)
    # Draw each name next to the baseline of its curve.
    row_names(canvas, (left, area[1] + distance // 2 - 5, *area[2:]), names, distance, marked)
    numbers_below(canvas, area, axis, value)
    notes_below(canvas, area, notes)
    return canvas.pixels()


def _curve(parts: Floats, row: int, distance: int, head: int, width: int) -> Floats:
    """Return the corners of a curve, ``[k, 2]``. The curve is a step function with one step per bin."""
    parts = np.sqrt(np.nan_to_num(parts))
    heights = parts / (parts.max() or 1.0) * distance * _OVERLAP * 0.95
    ground = head + (row + 1) * distance - 0.5
    x = np.repeat(np.linspace(0, width, len(parts) + 1), 2)
    y = ground - np.concatenate(([0.0], np.repeat(heights, 2), [0.0]))
    return np.stack((x, y), axis=-1)


_BINS, _BIN_PX = 145, 2  # odd, so that 0 is the center of a bin on a symmetric axis
_LEFT = 60
_LEAST_SHARE = 1e-5  # smaller fractions have the same color as this one


def histogram_over_time(
    steps: Any, histograms: Any, *, title: str, value: str = "value", findings: Sequence[FoundAt] = ()
) -> Image:
    """Draw the fraction of values per bin as colors, with steps from left to right and values from bottom to top.

    The histograms may have different edges at each step. All are rebinned to 145 common bins. A bin that is cut in two
    is divided in proportion to the widths of its parts, so that the fractions of a step add up to 1. The common bins
    have equal height in the image. The axis is linear. If the bulk of the values would then be too thin to see, the
    axis is symlog: linear around 0, logarithmic beyond. If several steps share a column, it shows the mean of their
    fractions. Empty bins are white. Steps without a finite value have a pattern. If the counts of the fixed bins have
    NaN or infinities, the pattern shows which. Otherwise the pattern means that the step was not recorded.

    Args:
        steps: The steps in ascending order, ``[steps]``.
        histograms: One :class:`~lightning_recorder.reductions.Histogram` per step, or counts of the fixed bins,
            ``[steps, 2048]``, or :class:`Bins`, which takes the least time. See ``ExponentHistogram`` for the fixed
            bins.
        title: The title of the image.
        value: The name of the values, with a unit if they have one.
        findings: The findings about the layer. Their first steps are marked with red lines.

    Returns:
        The image, ``[404, 350, 3]``, or slightly higher if there are notes.

    Raises:
        ArgumentError: If the numbers of histograms and steps differ, or if the steps do not ascend.
    """
    steps = checked_steps(steps)
    if hasattr(histograms, "shape"):
        counts = _checked_counts(histograms)
        histograms = bins_of_counts(counts, *np.full((2, len(counts)), math.nan))
    found = histograms if isinstance(histograms, Bins) else bins_of(to_histograms(histograms))
    if len(found.counts) != len(steps):
        raise ArgumentError(f"histograms must be one for each of the {len(steps)} steps, got {len(found.counts)}")
    axis = value_axis(found)
    if axis is None:
        return blank(title, "no finite value was recorded")
    edges = edges_along(axis, _BINS)
    columns = columns_of(steps)
    each = shares(found, edges).T
    cells = np.empty((_BINS, len(columns)))
    for group, places in columns.by_length():
        cells[:, group] = _mean(each[:, places])
    masks = _masks(np.isnan(cells[0]), found, columns)
    return _draw_over_time(title, value, cells[::-1], columns, axis, masks, (findings, steps))


def _masks(empty: NDArray[np.bool_], found: Bins, columns: Columns) -> dict[Mark, NDArray[np.bool_]]:
    """Return masks of the columns without a finite value, by reason. Reasons that do not occur are left out."""
    masks: dict[Mark, NDArray[np.bool_]] = {}
    reasons: Mapping[Mark, NDArray[np.bool_] | None] = {"nan": found.have_nan, "inf": found.have_infinite}
    for mark, bad in reasons.items():
        if bad is not None:
            masks[mark] = empty & np.array([bad[column].any() for column in columns])
            empty = empty & ~masks[mark]
    masks["missing"] = empty
    return {mark: mask for mark, mask in masks.items() if mask.any()}


def _mean(some: Floats) -> Floats:
    """Return the mean over the recorded steps, ``[..., steps]`` to ``[...]``; NaN if no step was recorded."""
    known = ~np.isnan(some)
    with np.errstate(invalid="ignore"):
        found: Floats = np.where(known, some, 0.0).sum(axis=-1) / known.sum(axis=-1)
    return found


def _draw_over_time(
    title: str,
    value: str,
    cells: Floats,
    columns: Columns,
    axis: Scale,
    masks: Mapping[Mark, NDArray[np.bool_]],
    findings: tuple[Sequence[FoundAt], Floats],
) -> Image:
    largest = float(np.nanmax(cells))
    colors = Scale("log", min(_LEAST_SHARE, largest / 10), largest)
    area = (_LEFT, TOP + BAR_ROOM, WIDTH - RIGHT - _LEFT, _BINS * _BIN_PX)
    across = columns.spread(area[2])
    cells = np.where(cells == 0, np.nan, cells)
    pixels = np.repeat(paint(cells, colors, VIRIDIS)[:, across], _BIN_PX, axis=0)
    cover(pixels, {mark: np.tile(mask[across], (len(pixels), 1)) for mark, mask in masks.items()})
    notes = notes_on_findings(findings[0])
    notes += [f"each column: the mean of up to {columns.most:,} steps"] if columns.most > 1 else []
    if axis.kind == "symlog":
        notes.append(f"values: logarithmic on both sides of 0, linear below {number(axis.threshold)}")
    canvas = new_canvas(area[1] + area[3] + bottom_room(notes, masks), title)
    canvas.image(area[0], area[1], pixels)
    canvas.frame(*area)
    outline_findings(canvas, area, findings[0], columns, findings[1])
    numbers_left(canvas, area, axis, f"{value} (symlog)" if axis.kind == "symlog" else value)
    numbers_below(canvas, area, columns.axis, "step")
    color_bar(canvas, area, colors, VIRIDIS, "share of the values in a bin (log scale)")
    notes_below(canvas, area, notes, masks)
    return canvas.pixels()

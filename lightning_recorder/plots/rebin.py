"""Rebinning of histograms to other edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.bins import BINS
from lightning_recorder.errors import ArgumentError
from lightning_recorder.plots.arrays import Floats, to_floats
from lightning_recorder.plots.axes import Scale, value_scale
from lightning_recorder.reductions.histogram import Histogram, between_edges

__all__ = ["edges_along", "histogram_of", "rebin", "shares", "to_histograms", "value_axis"]

_LARGEST = 1.7e308
_SMALLEST = 1e-250  # dividing a count by a smaller width would overflow


def to_histograms(histograms: Any) -> list[Histogram]:
    """Return histograms unchanged, or build them from counts of the fixed bins.

    Args:
        histograms: A sequence of :class:`~lightning_recorder.reductions.Histogram`, or counts, ``[n, 2048]``.

    Raises:
        ArgumentError: If the argument is neither.
    """
    if not hasattr(histograms, "shape"):
        histograms = list(histograms)
        if all(isinstance(each, Histogram) for each in histograms):
            return [_checked(each) for each in histograms]
    counts = to_floats("histograms", histograms, f"[steps, {BINS}], or a sequence of Histogram", 2)
    if counts.shape[1] != BINS:
        raise ArgumentError(f"histograms must have the shape [steps, {BINS}], got {list(counts.shape)}")
    return [histogram_of(row) for row in np.nan_to_num(counts, nan=0.0, posinf=0.0, neginf=0.0).clip(0, 2.0**52)]


def histogram_of(counts: Floats | NDArray[np.int64], low: float = math.nan, high: float = math.nan) -> Histogram:
    """Build a histogram from counts of the fixed bins.

    Args:
        counts: The counts, ``[2048]``.
        low: The smallest value; NaN if it is unknown.
        high: The largest value; NaN if it is unknown.
    """
    edges, inside = between_edges(counts)
    return Histogram(edges, inside, low, high, math.nan, math.nan)


def _checked(histogram: Histogram) -> Histogram:
    if histogram.edges.ndim != 1 or histogram.edges.shape != (len(histogram.counts) + 1,):
        shapes = f"{list(histogram.edges.shape)} and {list(histogram.counts.shape)}"
        raise ArgumentError(f"a histogram has edges [bins + 1] and counts [bins], got {shapes}")
    return histogram


def _limits(histogram: Histogram) -> Floats:
    """Return the edges, all finite, and clipped to the smallest and the largest value if these are known."""
    low = histogram.min if math.isfinite(histogram.min) else -_LARGEST
    high = histogram.max if math.isfinite(histogram.max) else _LARGEST
    limits = np.clip(np.nan_to_num(histogram.edges, nan=0.0), max(low, -_LARGEST), min(high, _LARGEST))
    return np.where(np.abs(limits) < _SMALLEST, 0.0, limits)


def rebin(histogram: Histogram, edges: Floats) -> Floats:
    """Return the counts between other edges, ``[k]`` float64; their sum is exactly the number of values.

    The position of a value within its bin is unknown, so a bin that contains an edge is divided in proportion to the
    widths of its parts. A bin of zero width goes entirely to the new bin that contains it. Values beyond the outer
    edges are counted in the first or the last bin.

    Args:
        histogram: The original histogram.
        edges: The new edges in ascending order, ``[k + 1]``.

    Example:
        >>> two = Histogram(np.array([0.0, 1.0, 3.0]), np.array([5, 2]), 0.0, 3.0, 0.0, 0.0)
        >>> rebin(two, np.array([0.0, 2.0, 4.0])).tolist()
        [6.0, 1.0]
    """
    limits, counts = _limits(histogram), histogram.counts.astype(np.float64)
    flat = limits[1:] <= limits[:-1]
    found = np.zeros(len(edges) - 1)
    where = np.clip(np.searchsorted(edges, limits[:-1][flat], side="right") - 1, 0, len(found) - 1)
    np.add.at(found, where, counts[flat])
    # The number of values below each edge, rounded to a multiple of a power of two, so that all later sums are exact.
    below = np.concatenate(([0.0], np.cumsum(np.where(flat, 0.0, counts))))
    total = below[-1]
    kept = np.concatenate(([True], ~flat))
    # Computed in halves, because the difference of two float64 may overflow.
    reached = np.interp(edges[1:-1] / 2, limits[kept] / 2, below[kept], left=0.0, right=total)
    part = 2.0 ** (51 - math.ceil(math.log2(max(total, 1.0))))
    reached = np.concatenate(([0.0], np.rint(reached * part) / part, [total]))
    return found + np.diff(reached)


def value_axis(histograms: Sequence[Histogram]) -> Scale | None:
    """Return an axis that contains all values of the histograms; ``None`` if there are no values.

    The axis is linear, unless 90 % of the values of a narrow histogram would take less than a fiftieth of it.
    """
    filled = [each for each in histograms if each.count]
    if not filled:
        return None
    ends = [_limits(each)[[0, -1]] for each in filled]
    low, high = min(float(first) for first, _ in ends), max(float(last) for _, last in ends)
    spreads = [spread for spread in map(_spread, filled) if 0 < spread < math.inf]
    if low < 0 < high and -low > high / 3 and high > -low / 3:
        low, high = -max(-low, high), max(-low, high)
    return value_scale(low, high, float(np.quantile(spreads, 0.1)) if spreads else 0.0)


def _spread(histogram: Histogram) -> float:
    """Return the width of the range that contains 90 % of the nonzero values."""
    limits, counts = _limits(histogram), histogram.counts.astype(np.float64)
    # If most values are 0, the others determine the spread.
    around_zero = (limits[:-1] <= 0) & (limits[1:] >= 0) & (limits[1:] - limits[:-1] < 1e-30)
    below = np.cumsum(np.where(around_zero, 0.0, counts))
    if not below[-1]:
        return 0.0
    first, last = np.searchsorted(below, np.array([0.05, 0.95]) * below[-1])
    with np.errstate(over="ignore"):
        return float(limits[last + 1] - limits[first])


def edges_along(axis: Scale, bins: int) -> Floats:
    """Return edges of bins with equal widths on an axis; on a symmetric axis with an odd number, 0 is a bin centre."""
    edges = axis.values(np.linspace(0.0, 1.0, bins + 1))
    edges[0], edges[-1] = axis.low, axis.high
    return np.maximum.accumulate(edges)


def shares(histogram: Histogram, edges: Floats) -> Floats:
    """Return the fraction of the values between adjacent edges; NaN if the histogram is empty."""
    total = histogram.count
    return rebin(histogram, edges) / total if total else np.full(len(edges) - 1, math.nan)

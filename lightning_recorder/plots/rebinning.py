"""Histograms with different edges: their common axis, and their counts between common edges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.bins import BINS, FINITE_BINS
from lightning_recorder.plots.axes import Floats, Scale, value_scale
from lightning_recorder.records.histogram import EDGES, Histogram, in_order

__all__ = ["Bins", "bins_of", "bins_of_counts", "edges_along", "limits_of", "rebin", "shares", "value_axis"]

_LARGEST = 1.7e308
_SMALLEST = 1e-250  # smaller limits become 0, since dividing a count by a smaller width would overflow


def limits_of(histogram: Histogram) -> Floats:
    """Return the edges of a histogram as finite numbers, clipped to its smallest and largest values if known."""
    low = histogram.min if math.isfinite(histogram.min) else -_LARGEST
    high = histogram.max if math.isfinite(histogram.max) else _LARGEST
    edges = histogram.edges
    if not np.isfinite(edges).all():
        edges = np.nan_to_num(edges, nan=0.0)
    limits = np.minimum(np.maximum(edges, max(low, -_LARGEST)), min(high, _LARGEST))
    limits[np.abs(limits) < _SMALLEST] = 0.0
    return limits


class Bins(NamedTuple):
    """Several histograms as arrays, for vectorized computations.

    Histograms with fewer bins are padded with empty bins of zero width.
    """

    limits: Floats
    """The edges of the bins in ascending order, all finite, ``[n, k + 1]``."""
    counts: Floats
    """The counts, ``[n, k]`` float64."""
    have_nan: NDArray[np.bool_] | None = None
    """A mask of the histograms whose values include NaN, ``[n]``; ``None`` if it is unknown."""
    have_infinite: NDArray[np.bool_] | None = None
    """A mask of the histograms whose values include infinities, ``[n]``; ``None`` if it is unknown."""

    @property
    def totals(self) -> Floats:
        """The number of values of each histogram, ``[n]``."""
        found: Floats = self.counts.sum(axis=1)
        return found


def bins_of(histograms: Sequence[Histogram]) -> Bins:
    """Return histograms with any edges as arrays."""
    width = max((len(each.counts) for each in histograms), default=0)
    limits, counts = np.zeros((len(histograms), width + 1)), np.zeros((len(histograms), width))
    for row, each in enumerate(histograms):
        used = len(each.counts)
        limits[row, : used + 1] = limits_of(each)
        limits[row, used + 1 :] = limits[row, used]
        counts[row, :used] = each.counts
    return Bins(limits, counts)


def bins_of_counts(counts: Floats | NDArray[np.int64], low: Floats, high: Floats) -> Bins:
    """Return counts of the fixed bins, ``[n, 2048]``, as :class:`Bins`.

    The edges of each histogram are clipped to the range from ``low`` to ``high``, ``[n]`` each. NaN is an unknown end.
    """
    bins = in_order(counts)
    # The last octave of each sign begins with the bin of infinity. The other bins of the octave are NaN.
    last = counts.reshape(len(counts), 2, BINS // 2)[..., FINITE_BINS:] != 0
    bad = last[..., 1:].any(axis=(1, 2)), last[..., 0].any(axis=1)
    occupied = bins != 0
    used = np.flatnonzero(occupied.any(axis=0))
    if not len(used):
        return Bins(np.zeros((len(counts), 2)), np.zeros((len(counts), 1)), *bad)
    span = slice(used[0], used[-1] + 1)
    bins, occupied, edges = bins[:, span], occupied[:, span], EDGES[used[0] : used[-1] + 2]
    # Bins outside the range of a histogram get zero width.
    first, end = occupied.argmax(axis=1), occupied.shape[1] - occupied[:, ::-1].argmax(axis=1)
    low = np.fmax(np.where(np.isfinite(low), low, math.nan), edges[first])
    high = np.fmin(np.where(np.isfinite(high), high, math.nan), edges[end])
    limits = np.minimum(np.maximum(edges, low[:, None]), high[:, None])
    limits[np.abs(limits) < _SMALLEST] = 0.0
    return Bins(limits, bins.astype(np.float64), *bad)


def rebin(found: Bins, edges: Floats) -> Floats:
    """Return the counts between new edges, ``[n, k]`` float64. The sum of each row is exactly the number of values.

    The position of a value within its bin is unknown. So a bin that contains a new edge is divided in proportion to the
    widths of its parts. A bin of zero width is counted entirely in the new bin that contains it. Values beyond the
    outer edges are counted in the first or the last bin.

    ``edges`` are the new edges in ascending order, ``[k + 1]``.

    Example:
        >>> two = bins_of([Histogram(np.array([0.0, 1.0, 3.0]), np.array([5, 2]), 0.0, 3.0, 0.0, 0.0)])
        >>> rebin(two, np.array([0.0, 2.0, 4.0])).tolist()
        [[6.0, 1.0]]
    """
    limits, counts = found.limits, found.counts
    flat = limits[:, 1:] <= limits[:, :-1]
    inside = np.zeros((len(counts), len(edges) - 1))
    rows, bins = np.nonzero(flat & (counts > 0))
    where = np.clip(np.searchsorted(edges, limits[rows, bins], side="right") - 1, 0, inside.shape[1] - 1)
    np.add.at(inside, (rows, where), counts[rows, bins])
    # Count the values below each edge. The loop rounds these counts to multiples of a power of two, so that all sums
    # are exact.
    below = np.zeros(limits.shape)
    np.cumsum(np.where(flat, 0.0, counts), axis=1, out=below[:, 1:])
    totals = below[:, -1].tolist()
    # Compute with halved values, because the difference of two float64 may overflow.
    halves, places = limits / 2, edges[1:-1] / 2
    reached = np.zeros((len(counts), len(edges)))
    for row, total in enumerate(totals):
        part = 2.0 ** (51 - math.ceil(math.log2(max(total, 1.0))))
        reached[row, 1:-1] = np.rint(np.interp(places, halves[row], below[row], left=0.0, right=total) * part) / part
    reached[:, -1] = totals
    return inside + np.diff(reached)


def value_axis(found: Bins) -> Scale | None:
    """Return an axis that contains all values of the histograms; ``None`` if there are no values.

    The axis is symlog if 90 % of the values of a narrow histogram would take less than a fiftieth of a linear axis.
    Otherwise the axis is linear.
    """
    filled = found.totals > 0
    if not filled.any():
        return None
    found = Bins(found.limits[filled], found.counts[filled])
    low, high = float(found.limits[:, 0].min()), float(found.limits[:, -1].max())
    spreads = _spreads(found)
    spreads = spreads[(spreads > 0) & (spreads < math.inf)]
    if low < 0 < high and -low > high / 3 and high > -low / 3:
        low, high = -max(-low, high), max(-low, high)
    return value_scale(low, high, float(np.quantile(spreads, 0.1)) if len(spreads) else 0.0)


def _spreads(found: Bins) -> Floats:
    """Return the width of the range that contains 90 % of the nonzero values of each histogram, ``[n]``."""
    limits, counts = found.limits, found.counts
    with np.errstate(over="ignore"):
        # Leave out zeros: if most values are 0, the other values determine the spread.
        around_zero = (limits[:, :-1] <= 0) & (limits[:, 1:] >= 0) & (np.diff(limits) < 1e-30)
        below = np.cumsum(np.where(around_zero, 0.0, counts), axis=1)
        total = below[:, -1]
        first, last = ((below < share * total[:, None]).sum(axis=1) for share in (0.05, 0.95))
        rows = np.arange(len(counts))
        return np.where(total > 0, limits[rows, last + 1] - limits[rows, first], 0.0)


def edges_along(axis: Scale, bins: int) -> Floats:
    """Return edges of bins with equal widths on an axis.

    On a symmetric axis with an odd number of bins, 0 is the center of a bin.
    """
    edges = axis.values(np.linspace(0.0, 1.0, bins + 1))
    edges[0], edges[-1] = axis.low, axis.high
    return np.maximum.accumulate(edges)


def shares(found: Bins, edges: Floats) -> Floats:
    """Return the fractions of the values between adjacent edges, ``[n, k]``; NaN if a histogram is empty."""
    totals = found.totals[:, None]
    return rebin(found, edges) / np.where(totals > 0, totals, math.nan)

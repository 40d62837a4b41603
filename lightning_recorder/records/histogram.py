"""A histogram with edges and summary numbers, and the edges of the fixed bins."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.bins import BIN_SHIFT, BINS, BINS_PER_OCTAVE, FINITE_BINS
from lightning_recorder.errors import ArgumentError

if TYPE_CHECKING:
    import torch

__all__ = ["EDGES", "MAGNITUDES", "Histogram", "between_edges", "in_order"]

_HALF = BINS // 2

MAGNITUDES: NDArray[np.float64] = (
    (np.arange(FINITE_BINS + 1, dtype=np.uint32) << BIN_SHIFT).view(np.float32).astype(np.float64)
)
"""The lower edges of the bins of one sign. Each bin has all float32 values with the same upper eleven bits."""
MAGNITUDES[-1] = 2.0**128
# Zeros and all subnormal values share one bin around zero.
EDGES: NDArray[np.float64] = np.concatenate((-MAGNITUDES[BINS_PER_OCTAVE:][::-1], MAGNITUDES[BINS_PER_OCTAVE:]))
"""The edges of the bins of finite values in ascending order, with one bin around zero, ``[2034]``."""


def in_order(counts: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Sort the counts of a histogram, ``[..., 2048]``, into the bins between :data:`EDGES`, ``[..., k]`` int64.

    Zeros and subnormal values (below 1.2e-38) share one bin: the first octave of both signs.
    """
    counts = counts.astype(np.int64, copy=False)
    positive, negative = (counts[..., half : half + FINITE_BINS] for half in (0, _HALF))
    center = sum(half[..., :BINS_PER_OCTAVE].sum(axis=-1, keepdims=True) for half in (positive, negative))
    return np.concatenate((negative[..., : BINS_PER_OCTAVE - 1 : -1], center, positive[..., BINS_PER_OCTAVE:]), axis=-1)


def between_edges(
    counts: NDArray[np.float64] | NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return ascending edges, ``[k + 1]`` float64, and counts, ``[k]`` int64, of the bins that hold finite values.

    The given counts are ``[2048]``. Zeros and subnormal values share one bin, from the largest negative to the smallest
    positive normal float32. Empty bins at both ends are dropped, and a gap between occupied bins becomes a single empty
    bin.
    """
    bins = in_order(counts)
    occupied = bins.nonzero()[0]
    if not len(occupied):
        return np.array([0.0, 0.0]), np.zeros(1, dtype=np.int64)
    keep = np.zeros(len(EDGES), dtype=bool)
    keep[occupied] = keep[occupied + 1] = True
    kept = keep.nonzero()[0]
    # Between two kept edges there is one occupied bin or a run of empty bins, so the first bin has the right count.
    return EDGES[kept], bins[kept[:-1]]


@dataclass(frozen=True)
class Histogram:
    """A histogram with explicit bin edges and summary numbers for the back ends.

    Args:
        edges: The bin edges in ascending order, ``[bins + 1]`` float64.
        counts: The number of values per bin, ``[bins]`` int64. Each value is in exactly one bin.
        min: The smallest finite value; NaN if there is none.
        max: The largest finite value; NaN if there is none.
        sum: The sum of the finite values.
        sum_squares: The sum of the squares of the finite values.
        fraction: The fraction of the values that were counted; less than 1 if the counts are from a sample. The other
            numbers cover all values.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    min: float
    max: float
    sum: float
    sum_squares: float
    fraction: float = 1.0

    @property
    def count(self) -> int:
        """The number of finite values that were counted."""
        return int(self.counts.sum())

    @property
    def np_histogram(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The counts and edges in the format of ``numpy.histogram``, for ``wandb.Histogram(np_histogram=…)``."""
        return self.counts, self.edges

    def quantile(self, share: float) -> float:
        """Estimate a quantile of the counted values by interpolation within its bin.

        The error is less than the width of the bin, which is at most 25 % of the value for the fixed bin edges. The
        result is NaN if the histogram is empty.

        Args:
            share: The fraction of the values below the quantile, between 0 and 1.

        Raises:
            ArgumentError: If ``share`` is not between 0 and 1.

        Example:
            >>> ten = Histogram(np.array([0.0, 1.0, 2.0]), np.array([5, 5]), 0.0, 2.0, 10.0, 15.0)
            >>> ten.quantile(0.5), ten.quantile(0.9)
            (1.0, 1.8)
        """
        if not 0 <= share <= 1:
            raise ArgumentError(f"a quantile is a fraction between 0 and 1, got {share!r}")
        if not self.count:
            return math.nan
        below = np.concatenate(([0], np.cumsum(self.counts)))
        # The cumulative count is equal at both edges of an empty bin, so only occupied bins can be searched.
        occupied = np.flatnonzero(self.counts)
        where = occupied[np.searchsorted(below[occupied + 1], share * self.count)]
        edges = np.clip(self.edges, self.min, self.max)
        inside = (share * self.count - below[where]) / self.counts[where]
        return float(edges[where] + inside * (edges[where + 1] - edges[where]))

    def underflow_fraction(self, dtype: torch.dtype) -> float:
        """Return the fraction of the counted values that would underflow to zero in a narrower dtype.

        A nonzero value rounds to zero if its magnitude is below half of the smallest positive number of the dtype. It
        counts if this holds for its whole bin. Magnitudes below 2**-126 do not count, because they share the bin around
        zero with real zeros. The result is NaN if the histogram is empty.

        Args:
            dtype: A floating-point type such as ``torch.float16``, ``torch.bfloat16``, ``torch.float8_e4m3fn`` or
                ``torch.float8_e5m2``.
        """
        numbers = _numbers_of(dtype)
        half = numbers.smallest_normal * numbers.eps / 2
        small = (self.edges[:-1] >= -half) & (self.edges[1:] <= half)
        around_zero = (self.edges[:-1] < 0) & (self.edges[1:] > 0)
        return self._share(small & ~around_zero)

    def overflow_fraction(self, dtype: torch.dtype) -> float:
        """Return the fraction of the counted values that would overflow in a narrower dtype.

        A value counts if its whole bin lies beyond the largest number of the dtype, so values that fit are never
        counted. Returns NaN if the histogram is empty.

        Args:
            dtype: A floating-point type, as for :meth:`underflow_fraction`.
        """
        largest = _numbers_of(dtype).max
        return self._share((self.edges[:-1] > largest) | (self.edges[1:] < -largest))

    def _share(self, bins: NDArray[np.bool_]) -> float:
        return int(self.counts[bins].sum()) / self.count if self.count else math.nan

    def coarsened(self, bins: int) -> Histogram:
        """Return the same values in at most ``bins`` bins, by merging neighboring bins.

        The edge with the lowest loss is removed first. The loss of an edge is the number of values in the two adjacent
        bins times their total width. For a bell curve, this merges the many thin bins around zero and keeps the tails.

        Example:
            >>> fine = Histogram(np.arange(5.0), np.array([1, 2, 30, 40]), 0.0, 3.5, 200.0, 600.0)
            >>> coarse = fine.coarsened(3)
            >>> coarse.edges.tolist(), coarse.counts.tolist()
            ([0.0, 2.0, 3.0, 4.0], [3, 30, 40])
        """
        edges, counts = self.edges, self.counts
        excess = len(counts) - max(bins, 1)
        if excess <= 0:
            return self
        losses = (counts[:-1] + counts[1:]) * (edges[2:] - edges[:-2])
        # With a stable sort, equal histograms are always merged in the same way.
        kept = np.sort(np.argsort(losses, kind="stable")[excess:]) + 1
        kept = np.concatenate(([0], kept))
        return replace(self, edges=edges[np.append(kept, -1)], counts=np.add.reduceat(counts, kept))


def _numbers_of(dtype: object) -> torch.finfo:
    import torch

    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"dtype must be a floating-point type of torch, such as torch.float16, got {dtype!r}")
    return torch.finfo(dtype)

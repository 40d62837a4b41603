"""Histograms: counts of fixed bins on the device, and counts with bin edges on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_recorder.bins import BIN_SHIFT, BINS, BINS_PER_OCTAVE, FINITE_BINS
from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values, count_bins

__all__ = ["EDGES", "ExponentHistogram", "Histogram", "between_edges", "in_order", "quantiles_of"]

_HALF = BINS // 2

# Lower edges of the magnitude bins as float64. A bin is the set of float32 whose upper eleven bits are equal.
_MAGNITUDES: NDArray[np.float64] = (
    (np.arange(FINITE_BINS + 1, dtype=np.uint32) << BIN_SHIFT).view(np.float32).astype(np.float64)
)
_MAGNITUDES[-1] = 2.0**128
# One bin around zero holds zeros and all subnormal values.
EDGES: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[BINS_PER_OCTAVE:][::-1], _MAGNITUDES[BINS_PER_OCTAVE:]))
"""The edges of the bins of finite values in ascending order, with one bin around zero, ``[2034]``."""
# Both edges of all finite bins in ascending order. The two bins next to zero are treated as zero.
_LOW: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[:0:-1], _MAGNITUDES[:-1]))
_HIGH: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[-2::-1], _MAGNITUDES[1:]))
_LOW[FINITE_BINS - 1] = _HIGH[FINITE_BINS] = 0.0


def in_order(counts: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the counts between adjacent :data:`EDGES`, ``[..., k]`` int64.

    Zeros and subnormal values (below 1.2e-38) share one bin: the first octave of both signs.

    Args:
        counts: The counts of one or more ``ExponentHistogram``, ``[..., 2048]``.
    """
    counts = counts.astype(np.int64, copy=False)
    positive, negative = (counts[..., half : half + FINITE_BINS] for half in (0, _HALF))
    center = sum(half[..., :BINS_PER_OCTAVE].sum(axis=-1, keepdims=True) for half in (positive, negative))
    return np.concatenate((negative[..., : BINS_PER_OCTAVE - 1 : -1], center, positive[..., BINS_PER_OCTAVE:]), axis=-1)


def between_edges(
    counts: NDArray[np.float64] | NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return ascending edges, ``[k + 1]`` float64, and counts, ``[k]`` int64, of the bins that hold finite values.

    Zeros and subnormal values share one bin, from the largest negative to the smallest positive normal float32. Empty
    bins at both ends are dropped, and a gap between occupied bins becomes a single empty bin.

    Args:
        counts: The counts of an ``ExponentHistogram``, ``[2048]``.
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


def quantiles_of(counts: Tensor, shares: Sequence[float]) -> Tensor:
    """Return quantiles of the finite values, ``[..., k]`` float64, by interpolation within their bins.

    Args:
        counts: The counts of one or more ``ExponentHistogram``, ``[..., 2048]``.
        shares: The fractions of the values below the quantiles, ``k`` numbers between 0 and 1.
    """
    low, high = (torch.from_numpy(ends).to(counts.device) for ends in (_LOW, _HIGH))
    counts = torch.cat((counts[..., _HALF : _HALF + FINITE_BINS].flip(-1), counts[..., :FINITE_BINS]), dim=-1)
    below = counts.cumsum(-1)
    total = below[..., -1:]
    # The lowest rank is above zero, so that the search finds the first occupied bin.
    ranks = (total * torch.tensor(shares, dtype=torch.float64, device=counts.device)).clamp(min=2.0**-20)
    where = torch.searchsorted(below, ranks).clamp(max=counts.shape[-1] - 1)
    inside = (ranks - below.gather(-1, where)) / counts.gather(-1, where) + 1
    return torch.where(total > 0, low[where] + inside * (high - low)[where], torch.nan)


class ExponentHistogram(Reduction):
    """Exact counts of the values in 2048 bins that the float32 format defines.

    The bin of a value is its sign, its exponent and the first two bits of its mantissa. Each octave has four bins, each
    a quarter of its power of two wide, so the relative bin width is between 1/7 and 1/4. The edges are the same for
    every tensor. Therefore no pass is needed to find the range, merging is integer addition, and histograms of
    different steps, ranks or runs can be compared bin by bin. Values of other dtypes are converted to float32 first. A
    float64 beyond the range of float32 goes to the end bin of its sign.

    State: ``[2048]`` counts. Bins 0 to 1019 hold ``+0`` and the positive values in ascending order, bins 1024 to 2043
    hold ``-0`` and the negative values by magnitude, and the octaves from 1020 and from 2044 hold infinities and NaN.
    The first bin of each sign reaches up to 2**-128, so :class:`Tallies` counts exact zeros. With ``sample`` the state
    has one more slot: the number of all values.

    Statistics: ``histogram``, the counts; with ``sample`` also ``histogram_fraction``, the fraction of the values that
    were counted, 1 if none was left out; for each q of ``quantiles`` also ``quantile_<q>``, the value below which the
    fraction q of the finite values lies. Quantiles are interpolated within their bin with a relative error of at most
    25 %, or an absolute error of at most 2**-128 below 2**-126. They are NaN without a finite value.

    Args:
        sample: The maximum number of values to count per tensor, one from each of that many equal parts; all by
            default.
        quantiles: The fractions of the quantiles, between 0 and 1.
    """

    def __init__(self, *, sample: int | None = None, quantiles: Iterable[float] = ()) -> None:
        if sample is not None:
            check_integer("sample", sample, 1)
        self.sample = sample
        self.quantiles = _checked_shares(quantiles)
        self.piecewise = sample is None  # a sample is drawn from the whole tensor, not from a piece
        self.width = BINS if sample is None else BINS + 1
        self.statistics = (
            "histogram",
            *(("histogram_fraction",) if sample is not None else ()),
            *(f"quantile_{share:g}" for share in self.quantiles),
        )

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        if self.sample is None:
            count_bins(state, values.flat)
            return
        sampled = values.sampled(self.sample)
        count_bins(state, sampled)
        state[BINS].add_(values.numel)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        counts = state[..., :BINS]
        found = {"histogram": counts}
        if self.sample is not None:
            found["histogram_fraction"] = torch.where(state[..., BINS] > 0, counts.sum(-1) / state[..., BINS], 1)
        if self.quantiles:
            values = quantiles_of(counts, self.quantiles)
            found.update({f"quantile_{share:g}": values[..., i] for i, share in enumerate(self.quantiles)})
        return found


def _checked_shares(shares: object) -> tuple[float, ...]:
    if not isinstance(shares, Iterable):
        raise ArgumentError(f"quantiles takes a list of fractions, got {shares!r}")
    found = tuple(shares)
    for share in found:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            is_percentage = isinstance(share, (int, float)) and 1 < share <= 100
            hint = f": write {share / 100:g}" if is_percentage else ""
            raise ArgumentError(f"quantiles takes fractions between 0 and 1, got {share!r}{hint}")
        if found.count(share) > 1:
            raise ArgumentError(f"quantiles has {share:g} more than once")
    return found


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
        """Number of finite values that were counted."""
        return int(self.counts.sum())

    @property
    def np_histogram(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Counts and edges in the format of ``numpy.histogram``, for ``wandb.Histogram(np_histogram=…)``."""
        return self.counts, self.edges

    def quantile(self, share: float) -> float:
        """Estimate a quantile of the counted values by interpolation within its bin.

        The error is less than the width of the bin. With the fixed bin edges that is at most 25 % of the value. Returns
        NaN if the histogram is empty.

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
        # Both edges of an empty bin have the same number of values below them, so only occupied bins can be searched.
        occupied = np.flatnonzero(self.counts)
        where = occupied[np.searchsorted(below[occupied + 1], share * self.count)]
        edges = np.clip(self.edges, self.min, self.max)
        inside = (share * self.count - below[where]) / self.counts[where]
        return float(edges[where] + inside * (edges[where + 1] - edges[where]))

    def underflow_fraction(self, dtype: torch.dtype) -> float:
        """Return the fraction of the counted values that would underflow to zero in a narrower dtype.

        A value counts if it is nonzero and its bin lies below half of the smallest positive number of the dtype, which
        rounds to zero. Magnitudes below 2**-126 count as zero, because the bin around zero does not resolve them.
        Returns NaN if the histogram is empty.

        Args:
            dtype: A floating-point type such as ``torch.float16``, ``torch.bfloat16``, ``torch.float8_e4m3fn`` or
                ``torch.float8_e5m2``.
        """
        _check_floating(dtype)
        half = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
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
        _check_floating(dtype)
        largest = torch.finfo(dtype).max
        return self._share((self.edges[:-1] > largest) | (self.edges[1:] < -largest))

    def _share(self, bins: NDArray[np.bool_]) -> float:
        return int(self.counts[bins].sum()) / self.count if self.count else math.nan

    def coarsened(self, bins: int) -> Histogram:
        """Return the same values in at most ``bins`` bins, by merging neighboring bins.

        Edges are removed in order of the lowest information loss, which is the number of values in the two adjacent
        bins times their total width. For a bell curve this merges the many thin bins around zero and preserves the
        tails.

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
        # A stable sort always merges equal histograms in the same way.
        kept = np.sort(np.argsort(losses, kind="stable")[excess:]) + 1
        kept = np.concatenate(([0], kept))
        return replace(self, edges=edges[np.append(kept, -1)], counts=np.add.reduceat(counts, kept))


def _check_floating(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"dtype must be a floating-point type of torch, such as torch.float16, got {dtype!r}")

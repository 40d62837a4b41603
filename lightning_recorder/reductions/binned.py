"""Counts between edges, on the host, as sinks take them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_recorder.errors import ArgumentError

__all__ = ["Histogram"]


@dataclass(frozen=True)
class Histogram:
    """Counts between edges, with what a back end wants to know of the values beside them.

    Args:
        edges: Ascending, ``[bins + 1]`` float64.
        counts: ``[bins]`` int64; each value lies in exactly one bin.
        min: Smallest finite value; NaN when there is none.
        max: Largest finite value; NaN when there is none.
        sum: Sum of the finite values.
        sum_squares: Sum of their squares.
        fraction: Share of the values that were counted; less than 1 where the counts are of a sample. The other numbers
            are of all values.
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
        """Counts and edges, as ``numpy.histogram`` gives them and ``wandb.Histogram(np_histogram=…)`` takes them."""
        return self.counts, self.edges

    def quantile(self, share: float) -> float:
        """The value below which that share of the counted values lies, interpolated in its bin.

        It is off by less than the width of the bin, which for a histogram with the fixed edges is a quarter of the
        value. NaN without a value.

        Args:
            share: Between 0 and 1.

        Raises:
            ArgumentError: If the share is not.

        Example:
            >>> ten = Histogram(np.array([0.0, 1.0, 2.0]), np.array([5, 5]), 0.0, 2.0, 10.0, 15.0)
            >>> ten.quantile(0.5), ten.quantile(0.9)
            (1.0, 1.8)
        """
        if not 0 <= share <= 1:
            raise ArgumentError(f"a quantile has a share between 0 and 1, got {share!r}")
        if not self.count:
            return math.nan
        below = np.concatenate(([0], np.cumsum(self.counts)))
        # Both sides of an empty bin have the same number of values below them, and the edges of a bin rise.
        occupied = np.flatnonzero(self.counts)
        where = occupied[np.searchsorted(below[occupied + 1], share * self.count)]
        edges = np.clip(self.edges, self.min, self.max)
        inside = (share * self.count - below[where]) / self.counts[where]
        return float(edges[where] + inside * (edges[where + 1] - edges[where]))

    def underflow_fraction(self, dtype: torch.dtype) -> float:
        """The share of the counted values that a narrower type would make zero.

        Values count as such that are not zero themselves and lie in a bin below half of the smallest positive number of
        the type, which is rounded to zero; those below 2**-126 are taken for zero, as the bin around zero tells no
        more. NaN without a value.

        Args:
            dtype: As ``torch.float16``, ``torch.bfloat16``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        """
        _check_floating(dtype)
        half = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2
        small = (self.edges[:-1] >= -half) & (self.edges[1:] <= half)
        around_zero = (self.edges[:-1] < 0) & (self.edges[1:] > 0)
        return self._share(small & ~around_zero)

    def overflow_fraction(self, dtype: torch.dtype) -> float:
        """The share of the counted values that are too large for a narrower type.

        Values count as such that lie in a bin which begins beyond the largest number of the type, so that none is
        counted which fits. NaN without a value.

        Args:
            dtype: As for :meth:`underflow_fraction`.
        """
        _check_floating(dtype)
        largest = torch.finfo(dtype).max
        return self._share((self.edges[:-1] > largest) | (self.edges[1:] < -largest))

    def _share(self, bins: NDArray[np.bool_]) -> float:
        return int(self.counts[bins].sum()) / self.count if self.count else math.nan

    def coarsened(self, bins: int) -> Histogram:
        """The same values in at most ``bins`` bins, by joining neighbours.

        The edges go at which the least is lost: those between two bins with the smallest product of the values in both
        and the width of both. In a bell curve that is the many thin bins around zero, and the tails stay.

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
        # Stable, so that the same histogram is always joined in the same way.
        kept = np.sort(np.argsort(losses, kind="stable")[excess:]) + 1
        kept = np.concatenate(([0], kept))
        return replace(self, edges=edges[np.append(kept, -1)], counts=np.add.reduceat(counts, kept))


def _check_floating(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"dtype must be a floating-point type of torch, such as torch.float16, got {dtype!r}")

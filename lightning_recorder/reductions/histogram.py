"""A histogram whose edges are those of the floating-point format."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import BINS, Values

__all__ = ["ExponentHistogram", "Histogram"]

_HALF = BINS // 2
_PER_OCTAVE = 4  # bins between two powers of two
_FINITE = _HALF - _PER_OCTAVE  # bins of one sign that hold finite values; the last octave is inf and NaN

# Lower ends of the magnitude bins, as float64: a bin is the set of float32 whose upper eleven bits are equal.
_MAGNITUDES: NDArray[np.float64] = (np.arange(_FINITE + 1, dtype=np.uint32) << 21).view(np.float32).astype(np.float64)
_MAGNITUDES[-1] = 2.0**128


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
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    min: float
    max: float
    sum: float
    sum_squares: float

    @property
    def count(self) -> int:
        """Number of finite values."""
        return int(self.counts.sum())

    def coarsened(self, bins: int) -> Histogram:
        """The same values in at most ``bins`` bins, by joining neighbours with the fewest values between them.

        Joining by weight keeps resolution where the values are: in a bell curve it is the many thin bins around zero
        that go first.

        Example:
            >>> fine = Histogram(np.arange(5.0), np.array([1, 2, 30, 40]), 0.0, 3.5, 200.0, 600.0)
            >>> coarse = fine.coarsened(3)
            >>> coarse.edges.tolist(), coarse.counts.tolist()
            ([0.0, 2.0, 3.0, 4.0], [3, 30, 40])
        """
        # Lists, which for a hundred bins are five times as fast as arrays.
        edges, counts = self.edges.tolist(), self.counts.tolist()
        pairs = [left + right for left, right in itertools.pairwise(counts)]
        while len(counts) > max(bins, 1):
            first = pairs.index(min(pairs))
            counts[first : first + 2] = [pairs[first]]
            del edges[first + 1]
            # Of the pairs around the joined one each is now of what was three bins.
            pairs[max(0, first - 1) : first + 2] = [
                counts[left] + counts[left + 1] for left in range(max(0, first - 1), min(first + 1, len(counts) - 1))
            ]
        return Histogram(
            np.array(edges), np.array(counts, dtype=np.int64), self.min, self.max, self.sum, self.sum_squares
        )


class ExponentHistogram(Reduction):
    """Exact counts of the values in 2048 bins that are fixed by the float32 format.

    The bin of a value is its sign, its exponent and the first two bits of its mantissa, so a power of two starts a bin
    and three more follow before the next, each a quarter of the octave wide; the relative width is between 1/7 and 1/4.
    The edges are the same for every tensor, so no pass for a range is needed, merging is addition of integers, and the
    histograms of two steps, ranks or runs can be compared bin by bin. Values of other dtypes are counted where their
    float32 lies; a float64 beyond float32's range goes to the end bin of its sign.

    State: ``[2048]`` counts. Bins 0 to 1019 hold ``+0`` and the positive values in ascending order, 1024 to 2043 ``-0``
        and the negative ones by
    magnitude, the octaves from 1020 and from 2044 infinities and NaN. Statistic: ``histogram``, the state itself.
    """

    width = BINS

    @classmethod
    @override
    def initial(cls) -> Tensor:
        return torch.zeros(cls.width, dtype=torch.float64)

    @classmethod
    @override
    def update_state(cls, state: Tensor, values: Values) -> None:
        state += values.histogram

    @classmethod
    @override
    def merge_states(cls, state: Tensor, other: Tensor) -> None:
        state += other

    @classmethod
    @override
    def summarize(cls, state: Tensor) -> dict[str, Tensor]:
        return {"histogram": state}

    @staticmethod
    def to_edges(counts: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Ascending edges, ``[k + 1]`` float64, and counts, ``[k]`` int64, of the bins that hold finite values.

        Args:
            counts: The state, ``[2048]``.

        Zeros have one bin, from the largest negative to the smallest positive normal float32, together with the
        subnormals between. Empty bins are left out at both ends, and a gap between occupied ones becomes a single empty
        bin.
        """
        whole = counts.astype(np.int64)
        positive, negative = whole[:_FINITE], whole[_HALF : _HALF + _FINITE]
        # The first octave of each sign is zero and the subnormals: below 1.2e-38, together one bin.
        centre = int(positive[:_PER_OCTAVE].sum() + negative[:_PER_OCTAVE].sum())
        magnitudes = _MAGNITUDES[_PER_OCTAVE:]
        edges = np.concatenate((-magnitudes[::-1], magnitudes))
        bins = np.concatenate((negative[_PER_OCTAVE:][::-1], [centre], positive[_PER_OCTAVE:]))
        return _without_empty(edges, bins)


def _without_empty(
    edges: NDArray[np.float64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Drop empty bins at the ends and join each run of empty bins between occupied ones."""
    occupied = np.flatnonzero(counts)
    if not len(occupied):
        return np.array([0.0, 0.0]), np.zeros(1, dtype=np.int64)
    keep = np.zeros(len(edges), dtype=bool)
    keep[occupied] = keep[occupied + 1] = True
    kept = np.flatnonzero(keep)
    # Between two kept edges lies one occupied bin or a run of empty ones: the first bin tells for all of them.
    return edges[kept], counts[kept[:-1]]

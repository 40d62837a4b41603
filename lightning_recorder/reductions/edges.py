"""The edges of the bins, which the float32 format fixes, and what can be read with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.reductions.values import BINS

__all__ = ["between_edges", "quantiles_of"]

_HALF = BINS // 2
_PER_OCTAVE = 4  # bins between two powers of two
_FINITE = _HALF - _PER_OCTAVE  # bins of one sign that hold finite values; the last octave is inf and NaN

# Lower ends of the magnitude bins, as float64: a bin is the set of float32 whose upper eleven bits are equal.
_MAGNITUDES: NDArray[np.float64] = (np.arange(_FINITE + 1, dtype=np.uint32) << 21).view(np.float32).astype(np.float64)
_MAGNITUDES[-1] = 2.0**128
# With one bin around zero for all that is not normal.
_EDGES: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[_PER_OCTAVE:][::-1], _MAGNITUDES[_PER_OCTAVE:]))
# Both ends of all finite bins in ascending order; the two that begin with zero hold nothing else to speak of.
_LOW: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[:0:-1], _MAGNITUDES[:-1]))
_HIGH: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[-2::-1], _MAGNITUDES[1:]))
_LOW[_FINITE - 1] = _HIGH[_FINITE] = 0.0


def between_edges(
    counts: NDArray[np.float64] | NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Ascending edges, ``[k + 1]`` float64, and counts, ``[k]`` int64, of the bins that hold finite values.

    Zeros have one bin, from the largest negative to the smallest positive normal float32, together with the subnormals
    between. Empty bins are left out at both ends, and a gap between occupied ones becomes a single empty bin.

    Args:
        counts: The counts of an ``ExponentHistogram``, ``[2048]``.
    """
    counts = counts.astype(np.int64, copy=False)
    # The first octave of each sign is zero and the subnormals: below 1.2e-38, together one bin.
    centre = counts[:_PER_OCTAVE].sum() + counts[_HALF : _HALF + _PER_OCTAVE].sum()
    bins = np.concatenate(
        (counts[_HALF + _FINITE - 1 : _HALF + _PER_OCTAVE - 1 : -1], [centre], counts[_PER_OCTAVE:_FINITE])
    )
    occupied = bins.nonzero()[0]
    if not len(occupied):
        return np.array([0.0, 0.0]), np.zeros(1, dtype=np.int64)
    keep = np.zeros(len(_EDGES), dtype=bool)
    keep[occupied] = keep[occupied + 1] = True
    kept = keep.nonzero()[0]
    # Between two kept edges lies one occupied bin or a run of empty ones: the first bin tells for all of them.
    return _EDGES[kept], bins[kept[:-1]]


def quantiles_of(counts: Tensor, shares: Sequence[float]) -> Tensor:
    """The values below which the shares of the finite values lie, ``[..., k]`` float64, interpolated in their bins.

    Args:
        counts: The counts of ``ExponentHistogram`` s, ``[..., 2048]``.
        shares: ``k`` numbers between 0 and 1.
    """
    low, high = (torch.from_numpy(ends).to(counts.device) for ends in (_LOW, _HIGH))
    counts = torch.cat((counts[..., _HALF : _HALF + _FINITE].flip(-1), counts[..., :_FINITE]), dim=-1)
    below = counts.cumsum(-1)
    total = below[..., -1:]
    # The least rank is more than none, so that the first bin which has a value is found.
    ranks = (total * torch.tensor(shares, dtype=torch.float64, device=counts.device)).clamp(min=2.0**-20)
    where = torch.searchsorted(below, ranks).clamp(max=counts.shape[-1] - 1)
    inside = (ranks - below.gather(-1, where)) / counts.gather(-1, where) + 1
    return torch.where(total > 0, low[where] + inside * (high - low)[where], torch.nan)

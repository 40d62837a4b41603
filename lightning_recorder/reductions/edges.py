"""Bin edges that the float32 format defines, and functions that read histograms with them."""

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

# Lower edges of the magnitude bins as float64. A bin is the set of float32 whose upper eleven bits are equal.
_MAGNITUDES: NDArray[np.float64] = (np.arange(_FINITE + 1, dtype=np.uint32) << 21).view(np.float32).astype(np.float64)
_MAGNITUDES[-1] = 2.0**128
# One bin around zero holds zeros and all subnormal values.
_EDGES: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[_PER_OCTAVE:][::-1], _MAGNITUDES[_PER_OCTAVE:]))
# Both edges of all finite bins in ascending order. The two bins next to zero are treated as zero.
_LOW: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[:0:-1], _MAGNITUDES[:-1]))
_HIGH: NDArray[np.float64] = np.concatenate((-_MAGNITUDES[-2::-1], _MAGNITUDES[1:]))
_LOW[_FINITE - 1] = _HIGH[_FINITE] = 0.0


def between_edges(
    counts: NDArray[np.float64] | NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return ascending edges, ``[k + 1]`` float64, and counts, ``[k]`` int64, of the bins that hold finite values.

    Zeros and subnormal values share one bin, from the largest negative to the smallest positive normal float32. Empty
    bins at both ends are dropped, and a gap between occupied bins becomes a single empty bin.

    Args:
        counts: The counts of an ``ExponentHistogram``, ``[2048]``.
    """
    counts = counts.astype(np.int64, copy=False)
    # Merge the first octave of both signs, which holds zero and the subnormals (below 1.2e-38), into one bin.
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
    # Between two kept edges there is one occupied bin or a run of empty bins, so the first bin has the right count.
    return _EDGES[kept], bins[kept[:-1]]


def quantiles_of(counts: Tensor, shares: Sequence[float]) -> Tensor:
    """Return quantiles of the finite values, ``[..., k]`` float64, by interpolation within their bins.

    Args:
        counts: The counts of one or more ``ExponentHistogram``, ``[..., 2048]``.
        shares: The fractions of the values below the quantiles, ``k`` numbers between 0 and 1.
    """
    low, high = (torch.from_numpy(ends).to(counts.device) for ends in (_LOW, _HIGH))
    counts = torch.cat((counts[..., _HALF : _HALF + _FINITE].flip(-1), counts[..., :_FINITE]), dim=-1)
    below = counts.cumsum(-1)
    total = below[..., -1:]
    # The lowest rank is above zero, so that the search finds the first occupied bin.
    ranks = (total * torch.tensor(shares, dtype=torch.float64, device=counts.device)).clamp(min=2.0**-20)
    where = torch.searchsorted(below, ranks).clamp(max=counts.shape[-1] - 1)
    inside = (ranks - below.gather(-1, where)) / counts.gather(-1, where) + 1
    return torch.where(total > 0, low[where] + inside * (high - low)[where], torch.nan)

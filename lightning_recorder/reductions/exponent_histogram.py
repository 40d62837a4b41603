"""A histogram with fixed bins, counted on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_recorder.bins import BINS, FINITE_BINS
from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.records.histogram import MAGNITUDES
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.values import Values, count_bins

__all__ = ["ExponentHistogram", "quantiles_of"]

_HALF = BINS // 2

# The lower and upper edges of all finite bins, in ascending order. The two bins next to zero are treated as zero.
_LOW: NDArray[np.float64] = np.concatenate((-MAGNITUDES[:0:-1], MAGNITUDES[:-1]))
_HIGH: NDArray[np.float64] = np.concatenate((-MAGNITUDES[-2::-1], MAGNITUDES[1:]))
_LOW[FINITE_BINS - 1] = _HIGH[FINITE_BINS] = 0.0


def quantiles_of(counts: Tensor, shares: Sequence[float]) -> Tensor:
    """Return quantiles of the finite values from counts ``[..., 2048]``, interpolated within the bins.

    Returns:
        The quantiles, ``[..., k]`` float64.
    """
    low, high = (torch.from_numpy(ends).to(counts.device) for ends in (_LOW, _HIGH))
    counts = torch.cat((counts[..., _HALF : _HALF + FINITE_BINS].flip(-1), counts[..., :FINITE_BINS]), dim=-1)
    below = counts.cumsum(-1)
    total = below[..., -1:]
    # Clamp the lowest rank above zero, so that the search finds the first nonempty bin.
    ranks = (total * torch.tensor(shares, dtype=torch.float64, device=counts.device)).clamp(min=2.0**-20)
    where = torch.searchsorted(below, ranks).clamp(max=counts.shape[-1] - 1)
    inside = (ranks - below.gather(-1, where)) / counts.gather(-1, where) + 1
    return torch.where(total > 0, low[where] + inside * (high - low)[where], torch.nan)


class ExponentHistogram(Reduction):
    """Exact counts of the values in 2048 bins that the float32 format defines.

    The bin of a value is determined by its sign, its exponent and the first two bits of its mantissa. Each octave, from
    a power of two to the next, has four bins of equal width, so the relative bin width is between 1/7 and 1/4. The
    edges are the same for every tensor. Therefore no pass is needed to find the range, merging is integer addition, and
    histograms of different steps, ranks or runs can be compared bin by bin. Values of other dtypes are converted to
    float32 first. A float64 beyond the range of float32 is counted in the end bin of its sign.

    State: ``[2048]`` counts. Bins 0 to 1019 hold ``+0`` and the positive values in ascending order, bins 1024 to 2043
    hold ``-0`` and the negative values by magnitude, and the octaves from 1020 and from 2044 hold infinities and NaN.
    The first bin of each sign also holds magnitudes up to 2**-128; only :class:`Tallies` counts exact zeros. With
    ``sample`` the state has one more slot: the number of all values.

    Statistics: ``histogram``, the counts; with ``sample`` also ``histogram_fraction``, the fraction of the values that
    were counted; for each q of ``quantiles`` also ``quantile_<q>``, the value below which the fraction q of the finite
    values lies. Quantiles are interpolated within their bin with a relative error of at most 25 %. For magnitudes below
    2**-126, the absolute error is at most 2**-128. Quantiles are NaN without a finite value.

    Args:
        sample: The maximum number of values to count per tensor. The tensor is divided into that many equal parts, and
            one value of each part is counted. By default, all values are counted.
        quantiles: The fractions of the quantiles, between 0 and 1.
    """

    def __init__(self, *, sample: int | None = None, quantiles: Iterable[float] = ()) -> None:
        if sample is not None:
            check_integer("sample", sample, 1)
        self.sample = sample
        self.quantiles = _checked_shares(quantiles)
        self.piecewise = sample is None  # a sample is drawn from the whole tensor, not from pieces
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

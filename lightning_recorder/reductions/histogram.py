"""A histogram whose edges are those of the floating-point format."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.reductions.base import Reduction
from lightning_recorder.reductions.edges import quantiles_of
from lightning_recorder.reductions.values import BINS, Values, count_bins

__all__ = ["ExponentHistogram"]


class ExponentHistogram(Reduction):
    """Exact counts of the values in 2048 bins that are fixed by the float32 format.

    The bin of a value is its sign, its exponent and the first two bits of its mantissa, so a power of two starts a bin
    and three more follow before the next, each a quarter of the power wide; the relative width is between 1/7 and 1/4.
    The edges are the same for every tensor, so no pass for a range is needed, merging is addition of integers, and the
    histograms of two steps, ranks or runs can be compared bin by bin. Values of other dtypes are counted where their
    float32 lies; a float64 beyond float32's range goes to the end bin of its sign.

    State: ``[2048]`` counts. Bins 0 to 1019 hold ``+0`` and the positive values in ascending order, 1024 to 2043 ``-0``
    and the negative ones by magnitude, the octaves from 1020 and from 2044 infinities and NaN; bin 0 of a sign reaches
    to 2**-128, so zeros are told apart by :class:`Tallies`. With ``sample`` one word more: the number of all values.

    Statistics: ``histogram``, the counts; with ``sample`` also ``histogram_fraction``, the share of the values that
    were counted, 1 where none was left out; for each q of ``quantiles`` ``quantile_<q>``, the value below which the
    share q of the finite values lies. A quantile is interpolated in its bin, so it is off by less than the width of the
    bin, a quarter of its magnitude, below 2**-126 by 2**-128; NaN without a finite value.

    Args:
        sample: Count no more than this many values of a tensor, one of each of so many equal parts; by default all.
        quantiles: Shares between 0 and 1.
    """

    def __init__(self, *, sample: int | None = None, quantiles: Iterable[float] = ()) -> None:
        if sample is not None:
            check_integer("sample", sample, 1)
        self.sample = sample
        self.quantiles = _checked_shares(quantiles)
        self.piecewise = sample is None  # the sample is of the whole tensor, not of a piece
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
        raise ArgumentError(f"quantiles takes a list of shares, got {shares!r}")
    found = tuple(shares)
    for share in found:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ArgumentError(f"quantiles takes shares between 0 and 1, got {share!r}")
        if found.count(share) > 1:
            raise ArgumentError(f"quantiles has {share:g} more than once")
    return found

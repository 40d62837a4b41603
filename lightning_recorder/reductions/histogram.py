"""A histogram with bins that the floating-point format defines."""

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
        raise ArgumentError(f"quantiles takes a list of shares, got {shares!r}")
    found = tuple(shares)
    for share in found:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            is_percentage = isinstance(share, (int, float)) and 1 < share <= 100
            hint = f": write {share / 100:g}" if is_percentage else ""
            raise ArgumentError(f"quantiles takes shares between 0 and 1, got {share!r}{hint}")
        if found.count(share) > 1:
            raise ArgumentError(f"quantiles has {share:g} more than once")
    return found

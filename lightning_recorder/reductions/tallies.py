"""Counts of zero, NaN and infinite values in a stream."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.scalar import ScalarReduction
from lightning_recorder.reductions.values import Values

__all__ = ["Tallies"]


class Tallies(ScalarReduction):
    """Fraction of zeros and number of NaN and infinities among all values.

    State: ``[numel, zeros, nans, infinities]``. Statistics: ``zero_fraction``, the fraction of values that are zero of
    either sign, NaN for an empty stream; ``nan_count``; ``inf_count``, of either sign. Merging is integer addition,
    which is exact in any order.
    """

    width = 4
    statistics: tuple[str, ...] = ("zero_fraction", "nan_count", "inf_count")

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        numel = values.finite_count + values.nonfinite_count
        return numel, values.zero_count, values.nan_count, values.nonfinite_count - values.nan_count

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        numel, zeros, nans, infinities = state.unbind(-1)
        return {"zero_fraction": zeros / numel, "nan_count": nans, "inf_count": infinities}

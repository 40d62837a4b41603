"""Extreme values of a stream: its range, zeros, NaN, infinities, and magnitudes beyond a threshold."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import check_number
from lightning_recorder.reductions.base import ScalarReduction
from lightning_recorder.reductions.values import Values, count_where

__all__ = ["Extrema", "NearZero", "Saturation", "Tallies"]

_INF = float("inf")


class Extrema(ScalarReduction):
    """Minimum and maximum of the finite values.

    State: ``[min, max]``, or ``[inf, -inf]`` for an empty stream. Statistics: ``min`` and ``max``, both NaN for a
    stream without a finite value. States are merged by ``minimum`` and ``maximum``, which is exact in any order.
    """

    width = 2
    statistics: tuple[str, ...] = ("min", "max")
    additive = False

    @override
    def initial(self) -> Tensor:
        return torch.tensor([_INF, -_INF], dtype=torch.float64)

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        low = torch.nan_to_num(values.flat, nan=_INF, posinf=_INF, neginf=_INF).amin()
        high = torch.nan_to_num(values.flat, nan=-_INF, posinf=-_INF, neginf=-_INF).amax()
        return low, high

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state[..., 0] = torch.minimum(state[..., 0], other[..., 0])
        state[..., 1] = torch.maximum(state[..., 1], other[..., 1])

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        finite = torch.where(state.isfinite(), state, torch.nan)
        return {"min": finite[..., 0], "max": finite[..., 1]}


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


class _Share(ScalarReduction):
    """Base class for the fraction of values whose magnitude satisfies a comparison; state ``[values, hits]``.

    Magnitudes and the threshold are compared in float32, or in float64 if the values are float64 or integers.
    """

    width = 2

    def __init__(self, threshold: float, name: str | None = None) -> None:
        check_number("threshold", threshold, 0.0)
        self.threshold = threshold
        self.statistics = self.statistics if name is None else (name,)

    @property
    @abstractmethod
    def _comparison(self) -> Callable[..., Tensor]:
        """The comparison of a magnitude with the threshold. It is always false for NaN."""

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        sizes = values.flat.abs()
        # A threshold beyond the range of the dtype would become infinite, and infinities would compare as equal to it.
        hits = count_where(self._comparison, sizes, min(self.threshold, torch.finfo(sizes.dtype).max))
        return torch.full_like(hits, values.numel, dtype=torch.float64), hits

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {self.statistics[0]: state[..., 1] / state[..., 0]}


class NearZero(_Share):
    """Fraction of the values that are zero or nearly zero.

    State: ``[values, values with |x| <= threshold]``. States are merged by addition, which is exact in any order.
    Statistic: ``near_zero_fraction``, the second divided by the first; NaN for an empty stream. A NaN counts as a
    value. Threshold and values are compared in float32, or in float64 if the values are float64 or integers.

    Args:
        threshold: The largest magnitude that counts as nearly zero.
        name: The name of the statistic, for use with several thresholds.
    """

    statistics: tuple[str, ...] = ("near_zero_fraction",)

    def __init__(self, threshold: float = 1e-6, name: str | None = None) -> None:
        super().__init__(threshold, name)

    @property
    @override
    def _comparison(self) -> Callable[..., Tensor]:
        return torch.le


class Saturation(_Share):
    """Fraction of the values beyond a threshold, such as 0.99 for the output of ``Tanh``.

    State: ``[values, values with |x| > threshold]``. States are merged by addition, which is exact in any order.
    Statistic: ``saturation_fraction``, the second divided by the first; NaN for an empty stream. An infinity exceeds
    every threshold. A NaN counts as a value but never as saturated. Threshold and values are compared as in
    :class:`NearZero`.

    Args:
        threshold: The largest magnitude that does not count as saturated.
        name: The name of the statistic, for use with several thresholds.
    """

    statistics: tuple[str, ...] = ("saturation_fraction",)

    @property
    @override
    def _comparison(self) -> Callable[..., Tensor]:
        return torch.gt

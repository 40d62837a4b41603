"""Shares of the values that are small or large in magnitude."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import check_number
from lightning_recorder.reductions.scalar import ScalarReduction
from lightning_recorder.reductions.values import Values, count_where

__all__ = ["NearZero", "Saturation"]


class _Share(ScalarReduction):
    """The share of the values whose magnitude compares with a threshold as asked; state ``[values, hits]``.

    Magnitudes are compared in float32, those of float64 and of integers in float64, and so is the threshold.
    """

    width = 2

    def __init__(self, threshold: float, name: str | None = None) -> None:
        check_number("threshold", threshold, 0.0)
        self.threshold = threshold
        self.statistics = self.statistics if name is None else (name,)

    @property
    @abstractmethod
    def _comparison(self) -> Callable[..., Tensor]:
        """Of a magnitude with the threshold; nothing compares with NaN."""

    @override
    def words_of(self, values: Values) -> Sequence[Tensor]:
        sizes = values.flat.abs()
        # A threshold beyond the type would be an infinity, to which one compares as equal.
        hits = count_where(self._comparison, sizes, min(self.threshold, torch.finfo(sizes.dtype).max))
        return torch.full_like(hits, values.numel, dtype=torch.float64), hits

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {self.statistics[0]: state[..., 1] / state[..., 0]}


class NearZero(_Share):
    """Share of the values that are zero or nearly so.

    State: ``[values, those of them with |x| <= threshold]``, merged by addition, exact in any order. Statistic:
    ``near_zero_fraction``, the second over the first; NaN for an empty stream. A NaN counts among the values. Threshold
    and values are compared in float32, or in float64 if the values are of float64 or integers.

    Args:
        threshold: The largest magnitude that counts as nearly zero.
        name: Of the statistic, where there are to be several thresholds.
    """

    statistics: tuple[str, ...] = ("near_zero_fraction",)

    def __init__(self, threshold: float = 1e-6, name: str | None = None) -> None:
        super().__init__(threshold, name)

    @property
    @override
    def _comparison(self) -> Callable[..., Tensor]:
        return torch.le


class Saturation(_Share):
    """Share of the values beyond a threshold, such as 0.99 behind a ``Tanh``.

    State: ``[values, those of them with |x| > threshold]``, merged by addition, exact in any order. Statistic:
    ``saturation_fraction``, the second over the first; NaN for an empty stream. An infinity is beyond any threshold, a
    NaN counts among the values alone. Threshold and values are compared as by :class:`NearZero`.

    Args:
        threshold: The largest magnitude that does not count as saturated.
        name: Of the statistic, where there are to be several thresholds.
    """

    statistics: tuple[str, ...] = ("saturation_fraction",)

    @property
    @override
    def _comparison(self) -> Callable[..., Tensor]:
        return torch.gt

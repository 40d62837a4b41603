"""Higher moments: skewness and kurtosis of a stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.reductions.moments import moments_of, sum_of_products
from lightning_recorder.reductions.scalar import ScalarReduction
from lightning_recorder.reductions.values import Values

__all__ = ["HigherMoments"]

_NO_SPREAD = 1e-14


class HigherMoments(ScalarReduction):
    """Population skewness and excess kurtosis of the finite values, in float64.

    State: ``[count, mean, m2, m3, m4]``, where ``m_k`` is the sum of the k-th powers of the deviations from the mean.
    With the shares ``a = n_a / n`` and ``b = n_b / n`` and with ``d = mean_b - mean_a``, two states are merged by

    ::

        m3 = m3_a + m3_b + d**3 * n * a * b * (a - b)             + 3 * d * (a * m2_b - b * m2_a)
        m4 = m4_a + m4_b + d**4 * n * a * b * (a**2 - a * b + b**2)
                         + 6 * d**2 * (a**2 * m2_b + b**2 * m2_a) + 4 * d * (a * m3_b - b * m3_a)

    (Pébay, "Formulas for Robust, One-Pass Parallel Computation of Covariances and Arbitrary-Order Statistical Moments",
    2008). The other slots are merged as in :class:`~lightning_recorder.reductions.RunningMoments`.

    Statistics: ``skewness``, ``sqrt(n) * m3 / m2**1.5``, 0 for a symmetric distribution; ``kurtosis``,
    ``n * m4 / m2**2 - 3``, 0 for a normal distribution and larger with outliers. For any split of the stream they agree
    within 1e-9, as long as the standard deviation is at least 1e-4 of the mean. Both are NaN for a stream without a
    finite value, if the standard deviation is below 1e-14 of the mean and thus only rounding error, and if the fourth
    powers of the deviations exceed the range of float64 (deviations above 1e75 or below 1e-75).
    """

    width = 5
    statistics: tuple[str, ...] = ("skewness", "kurtosis")
    additive = False

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        count, mean, m2, deviations = moments_of(values)
        squares = deviations.square()
        return count, mean, m2, sum_of_products(squares, deviations), sum_of_products(squares, squares)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        count_a, mean_a, m2_a, m3_a, m4_a = state.unbind(-1)
        count_b, mean_b, m2_b, m3_b, m4_b = other.unbind(-1)
        count = count_a + count_b
        a, b = count_a / count.clamp(min=1), count_b / count.clamp(min=1)
        delta = mean_b - mean_a
        mean = mean_a + delta * b
        # An empty stream has no mean, and the difference could be so large that its power overflows.
        delta = torch.where(a * b > 0, delta, 0)
        m2 = m2_a + m2_b + delta**2 * count * a * b
        m3 = m3_a + m3_b + delta**3 * count * a * b * (a - b) + 3 * delta * (a * m2_b - b * m2_a)
        m4 = m4_a + m4_b + delta**4 * count * a * b * (a**2 - a * b + b**2)
        m4 = m4 + 6 * delta**2 * (a**2 * m2_b + b**2 * m2_a) + 4 * delta * (a * m3_b - b * m3_a)
        state.copy_(torch.stack((count, mean, m2, m3, m4), dim=-1))

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        count, mean, m2, m3, m4 = state.unbind(-1)
        spread = (m2 / count).sqrt() > _NO_SPREAD * mean.abs()
        return {
            "skewness": torch.where(spread, count.sqrt() * m3 / m2**1.5, torch.nan),
            "kurtosis": torch.where(spread, count * m4 / m2.square() - 3, torch.nan),
        }

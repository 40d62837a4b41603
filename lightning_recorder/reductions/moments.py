"""Streaming moments: count, mean and variance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import check_integer
from lightning_recorder.reductions.scalar import ScalarReduction
from lightning_recorder.reductions.values import Values, finite_or_zero_

__all__ = ["RunningMoments", "merged_moments", "moments_of", "sum_of_products"]


class RunningMoments(ScalarReduction):
    """Count, sum, mean, variance, standard deviation and root mean square of the finite values, in float64.

    State: ``[count, mean, m2]``, where ``m2`` is the sum of squared deviations from the mean. Two states are merged by

    ::

        n    = n_a + n_b
        d    = mean_b - mean_a
        mean = mean_a + d * n_b / n
        m2   = m2_a + m2_b + d**2 * n_a * n_b / n

    (Chan, Golub & LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979). Unlike
    sums of squares, this does not lose a small variance next to a large mean. For any split of the stream, the mean is
    accurate within ``1e-12 * rms`` and the variance within ``1e-12 * (variance + 2e-4 * mean**2)``. Squares of
    magnitudes above about 1e154 exceed the range of float64, and ``variance``, ``std`` and ``rms`` become infinite or
    NaN.

    Statistics: ``count``; ``sum``, which is ``mean * count``; ``mean``; ``variance``, ``m2 / (count - correction)``;
    ``std``, the square root of the variance; ``rms``, ``sqrt(mean**2 + m2 / count)`` for any correction. For an empty
    stream the count and the sum are zero and the others are NaN. The variance and ``std`` are also NaN if the count
    does not exceed the correction.

    Args:
        correction: The number that is subtracted from the count for the variance: 0 for the population variance, 1 for
            the sample variance.
    """

    width = 3
    statistics: tuple[str, ...] = ("count", "sum", "mean", "variance", "std", "rms")
    additive = False

    def __init__(self, correction: int = 0) -> None:
        check_integer("correction", correction, 0)
        self.correction = correction

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        return moments_of(values)[:3]

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state.copy_(torch.stack(merged_moments(state.unbind(-1), other.unbind(-1)), dim=-1))

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        count, mean, m2 = state.unbind(-1)
        total = mean * count
        mean = torch.where(count > 0, mean, torch.nan)
        degrees = count - self.correction
        variance = torch.where(degrees > 0, m2 / degrees, torch.nan)
        return {
            "count": count,
            "sum": total,
            "mean": mean,
            "variance": variance,
            "std": variance.sqrt(),
            "rms": (mean.square() + m2 / count).sqrt(),
        }


def moments_of(values: Values) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the count, mean and sum of squared deviations of the finite values, each 0-d float64, and the deviations.

    The deviations, ``[numel]`` float64, are zero for values that are not finite.
    """
    count = values.finite_count
    mean = values.finite.sum(dtype=torch.float64) / count.clamp(min=1)
    # Always copied, whatever the dtype. A NaN or an infinity survives the subtraction and then adds nothing.
    deviations = finite_or_zero_(values.flat.to(torch.float64, copy=True).sub_(mean))
    return count, mean, sum_of_products(deviations, deviations), deviations


def sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of the products of two float64 tensors, ``[numel]``, as a 0-d tensor.

    A dot product is not accurate enough: it adds in few lanes and loses many equal small products next to a huge one.
    """
    return (one * other).sum()


def merged_moments(one: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the counts, means and sums of squared deviations of two streams, each of any common shape."""
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = one, other
    count = count_a + count_b
    share = count_b / count.clamp(min=1)
    delta = mean_b - mean_a
    return count, torch.addcmul(mean_a, delta, share), torch.addcmul(m2_a + m2_b, delta * delta, count_a * share)

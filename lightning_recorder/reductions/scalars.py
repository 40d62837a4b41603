"""Statistics with a state of a few numbers: moments, norms, extrema, tallies, threshold fractions, batch spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import check_integer, check_number
from lightning_recorder.reductions.base import Reduction, ScalarReduction
from lightning_recorder.reductions.values import Values, count_where, finite_or_zero_

__all__ = [
    "SPREAD_VALUES",
    "BatchSpread",
    "Extrema",
    "HigherMoments",
    "NearZero",
    "Norms",
    "RunningMoments",
    "Saturation",
    "Tallies",
    "has_spread",
    "merged_moments",
    "moments_of",
    "sum_of_products",
]


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
    stream, the count and the sum are zero and the other statistics are NaN. The variance and ``std`` are also NaN if
    the count does not exceed the correction.

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
    # Copy values of any dtype, since the next steps are in place. The subtraction preserves NaN and infinities, which
    # then become zero.
    deviations = finite_or_zero_(values.flat.to(torch.float64, copy=True).sub_(mean))
    return count, mean, sum_of_products(deviations, deviations), deviations


def sum_of_products(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of the products of two float64 tensors, ``[numel]``, as a 0-d tensor.

    A dot product is not accurate enough. It adds in few SIMD lanes, so many small products are lost next to a huge one.
    """
    return (one * other).sum()


def merged_moments(one: Sequence[Tensor], other: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the counts, means and sums of squared deviations of two streams, each of any common shape."""
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = one, other
    count = count_a + count_b
    share = count_b / count.clamp(min=1)
    delta = mean_b - mean_a
    return count, torch.addcmul(mean_a, delta, share), torch.addcmul(m2_a + m2_b, delta * delta, count_a * share)


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
    ``n * m4 / m2**2 - 3``, 0 for a normal distribution and larger with outliers. For any split of the stream, the
    results agree within 1e-9, as long as the standard deviation is at least 1e-4 of the mean. Both statistics are NaN
    in three cases: the stream has no finite value; the standard deviation is below 1e-14 of the mean and thus only
    rounding error; the fourth powers of the deviations exceed the range of float64 (deviations above 1e75 or below
    1e-75).
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
        # The mean of an empty stream is meaningless. Set the difference to zero, because a power of it could overflow,
        # and infinity times a count of zero is NaN.
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


class Norms(ScalarReduction):
    """Largest magnitude, sum of magnitudes and Euclidean norm of the finite values, in float64.

    State: ``[abs_max, sum |x|, sum x**2]``, or ``[-inf, 0, 0]`` for an empty stream. Statistics: ``abs_max``, NaN for a
    stream without a finite value; ``l1_norm``, ``sum |x|``; ``l2_norm``, ``sqrt(sum x**2)``. The ``l2_norm`` is
    infinite with values above 1e154 and ignores values below 1e-154. The norms cover all values of the stream, so they
    grow with the number of batches. The ``rms`` of :class:`~lightning_recorder.reductions.RunningMoments` is the norm
    per value. The sums have a relative error of at most 1e-12, for any order of merging.
    """

    width = 3
    statistics: tuple[str, ...] = ("abs_max", "l1_norm", "l2_norm")
    additive = False

    @override
    def initial(self) -> Tensor:
        return torch.tensor([-torch.inf, 0, 0], dtype=torch.float64, device="cpu")

    @override
    def slots_of(self, values: Values) -> Sequence[Tensor]:
        sizes = values.finite.abs()
        # Nonfinite values count as zero, which cannot be the maximum unless there is no finite value.
        largest = torch.where(values.finite_count > 0, sizes.amax().double(), -torch.inf)
        return largest, sizes.sum(dtype=torch.float64), sum_of_products(values.doubles, values.doubles)

    @override
    def merge_states(self, state: Tensor, other: Tensor) -> None:
        state[..., 0] = torch.maximum(state[..., 0], other[..., 0])
        state[..., 1:] += other[..., 1:]

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        largest, total, squares = state.unbind(-1)
        return {
            "abs_max": torch.where(largest >= 0, largest, torch.nan),
            "l1_norm": total,
            "l2_norm": squares.sqrt(),
        }


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
        return torch.tensor([_INF, -_INF], dtype=torch.float64, device="cpu")

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

    State: ``[numel, zeros, nans, infinities]``. Statistics: ``zero_fraction``, the fraction of values equal to +0 or
    -0, NaN for an empty stream; ``nan_count``; ``inf_count``, of either sign. Merging is integer addition, which is
    exact in any order.
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
    """Base class for the fraction of values whose magnitude satisfies a comparison. State: ``[values, hits]``.

    Magnitudes and the threshold are compared in float32, or in float64 if the values are float64 or integers.
    """

    width = 2

    def __init__(self, threshold: float, name: str | None = None) -> None:
        check_number("threshold", threshold, 0.0)
        self.threshold = threshold
        self.statistics = self.statistics if name is None else (name,)

    _comparison: Callable[..., Tensor]
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
    Statistic: ``near_zero_fraction``, the second number divided by the first; NaN for an empty stream. A NaN counts as
    a value. Threshold and values are compared in float32, or in float64 if the values are float64 or integers.

    Args:
        threshold: The largest magnitude that counts as nearly zero.
        name: The name of the statistic, for use with several thresholds.
    """

    statistics: tuple[str, ...] = ("near_zero_fraction",)

    def __init__(self, threshold: float = 1e-6, name: str | None = None) -> None:
        super().__init__(threshold, name)

    _comparison = staticmethod(torch.le)


class Saturation(_Share):
    """Fraction of the values beyond a threshold, such as 0.99 for the output of ``Tanh``.

    State: ``[values, values with |x| > threshold]``. States are merged by addition, which is exact in any order.
    Statistic: ``saturation_fraction``, the second number divided by the first; NaN for an empty stream. An infinity
    exceeds every threshold. A NaN counts as a value but never as saturated. Threshold and values are compared as in
    :class:`NearZero`.

    Args:
        threshold: The largest magnitude that does not count as saturated.
        name: The name of the statistic, for use with several thresholds.
    """

    statistics: tuple[str, ...] = ("saturation_fraction",)

    _comparison = staticmethod(torch.gt)


SPREAD_VALUES = (64, 256)
"""The maximum numbers of rows and columns that :class:`BatchSpread` reads. The C code has arrays of these sizes."""


class BatchSpread(Reduction):
    """Variation between the rows of a matrix, such as the samples of a batch, relative to the size of the values.

    State: the sum of the squared deviations from the column means, and the sum of the squares. States are merged by
    addition, so each deviation is from the mean of its own tensor. Statistic: ``batch_spread``, the square root of the
    first number divided by the second: rms(x - mean over the first dimension) / rms(x). It is 0 for equal rows and
    1 for columns of mean zero. It is NaN if all values are zero, and for tensors that are not ``[samples, features]``
    or not finite.

    To bound the time, at most 64 rows and 256 columns are read, at regular distances. Differences in other columns are
    not seen. Recorders use C code for this statistic where possible.

    Example:
        >>> spread = BatchSpread()
        >>> spread.update(torch.tensor([[3.0, 1.0], [3.0, -1.0]]))
        >>> round(float(spread.compute()["batch_spread"]), 4)
        0.3162
    """

    width = 2
    statistics: tuple[str, ...] = ("batch_spread",)

    @override
    def update_state(self, state: Tensor, values: Values) -> None:
        tensor = values.plain
        if not has_spread(tensor):
            return
        rows, columns = (-(-size // most) for size, most in zip(tensor.shape, SPREAD_VALUES, strict=True))
        some = tensor[::rows, ::columns].double()
        # Subtract the first row, so that the deviations of equal rows are exactly zero.
        deviations = some - some[:1]
        sums = torch.stack([(deviations - deviations.mean(0)).square().sum(), some.square().sum()])
        # Ignore tensors with a nonfinite value, which would make the result of all other tensors NaN.
        state += torch.where(sums.isfinite().all(), sums, 0.0)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        deviations, squares = state.unbind(-1)
        return {"batch_spread": (deviations / squares).sqrt()}


def has_spread(tensor: Tensor) -> bool:
    """Return True for a matrix of floats with several rows."""
    return tensor.dim() == 2 and tensor.is_floating_point() and tensor.shape[0] > 1 and tensor.shape[1] > 0

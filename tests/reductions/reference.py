"""Reference implementation of the statistics: value by value in Python, from the whole stream.

It shares nothing with the package: sums are exact (``math.fsum``), and the bin of a value comes from ``math.frexp``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NAN = math.nan
FLOAT32_MAX = float(np.finfo(np.float32).max)


def values_of(tensors: Iterable[Tensor]) -> list[float]:
    """Return the real numbers of tensors in order; a complex number becomes two."""
    found: list[float] = []
    for tensor in tensors:
        for value in tensor.detach().resolve_conj().flatten().tolist():
            found += [value.real, value.imag] if isinstance(value, complex) else [float(value)]
    return found


@dataclass(frozen=True)
class Moments:
    """Count, mean, variance and root mean square of the finite values."""

    count: int
    mean: float
    variance: float
    rms: float

    @staticmethod
    def of(values: Sequence[float]) -> Moments:
        finite = [value for value in values if math.isfinite(value)]
        count = len(finite)
        if not count:
            return Moments(0, NAN, NAN, NAN)
        # Divide first, so that the sum of huge values stays finite.
        mean = math.fsum(value / count for value in finite)
        variance = math.fsum((value - mean) ** 2 / count for value in finite)
        return Moments(count, mean, variance, math.sqrt(math.fsum(value**2 / count for value in finite)))

    def assert_near(self, summary: Mapping[str, SupportsFloat], correction: int = 0) -> None:
        """Assert the bounds: 1e-12 of the rms for the mean, and 1e-12 of variance + 2e-4 mean**2 for the variance.

        Squares of numbers below 1e-150 underflow in float64, so that error is allowed in addition.
        """
        count, mean, std, rms = (float(summary[name]) for name in ("count", "mean", "std", "rms"))
        assert count == self.count
        if not self.count:
            assert [math.isnan(value) for value in (mean, std, rms)] == [True] * 3
            return
        bound = 1e-12 * (self.variance + 2e-4 * self.mean**2) + 1e-300
        assert abs(mean - self.mean) <= 1e-12 * self.rms + 1e-150
        degrees = self.count - correction
        if degrees <= 0:
            assert math.isnan(std)
        else:
            assert abs(std**2 * degrees / self.count - self.variance) <= bound
        assert abs(rms - self.rms) <= 1e-12 * self.rms + 1e-150


def extrema_of(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest finite value, NaN without one."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (NAN, NAN)


def tallies_of(values: Sequence[float]) -> tuple[float, int, int]:
    """Return the fraction of zeros, the number of NaN and the number of infinities."""
    zeros, nans, infinities = (sum(map(test, values)) for test in (lambda value: value == 0, math.isnan, math.isinf))
    return (zeros / len(values) if values else NAN, nans, infinities)


def to_float32(value: float) -> float:
    """Return the nearest float32, or the largest one for a finite value beyond its range."""
    if math.isfinite(value):
        value = min(max(value, -FLOAT32_MAX), FLOAT32_MAX)
    return float(np.float32(value))


def bin_of(value: float) -> int:
    """Return the bin of a float32 that is not NaN: sign, exponent and the first two bits of the mantissa."""
    sign = 1024 if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return sign + 255 * 4
    if abs(value) < 2.0**-126:  # zero and the subnormals have four bins of equal width
        return sign + int(abs(value) * 2.0**128)
    mantissa, exponent = math.frexp(abs(value))  # mantissa in [1/2, 1)
    return sign + (exponent + 126) * 4 + int(mantissa * 8) - 4


def bins_of(values: Sequence[float]) -> NDArray[np.int64]:
    """Return the 2048 counts without NaN, whose bits are not specified."""
    counts = np.zeros(2048, dtype=np.int64)
    for value in values:
        if not math.isnan(value):
            counts[bin_of(to_float32(value))] += 1
    return counts


def assert_bins(state: Tensor, values: Sequence[float]) -> None:
    """Compare the state of a histogram with the reference: exact bins, and the number of NaN in the two NaN octaves."""
    counts, expected = state.numpy().copy(), bins_of(values)
    nans = 0
    for octave in (slice(1020, 1024), slice(2044, 2048)):
        nans += int(counts[octave].sum()) - int(expected[octave].sum())
        assert counts[octave].min() >= 0
        counts[octave] = expected[octave]
    assert counts.tolist() == expected.tolist()
    assert nans == sum(map(math.isnan, values))


def assert_statistics(summary: dict[str, Tensor], tensors: Iterable[Tensor]) -> None:
    """Compare the summary of ``Statistics`` with all of the references above."""
    values = values_of(tensors)
    Moments.of(values).assert_near(summary)
    np.testing.assert_array_equal([float(summary[name]) for name in ("min", "max")], extrema_of(values))
    tallies = [float(summary[name]) for name in ("zero_fraction", "nan_count", "inf_count")]
    np.testing.assert_array_equal(tallies, tallies_of(values))
    assert_bins(summary["histogram"], values)
    assert all(value.dtype == torch.float64 for value in summary.values())

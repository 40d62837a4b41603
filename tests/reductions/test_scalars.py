"""Tests of moments, norms and extreme values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import Extrema, HigherMoments, NearZero, Norms, RunningMoments, Saturation, Tallies
from tests.reductions.laws import (
    assert_neutral,
    assert_nothing_waits,
    assert_rows_agree,
    bits,
    computed,
    merged,
    one_number,
    reduced,
)
from tests.reductions.reference import FLOAT32_MAX, Moments, extrema_of, tallies_of, values_of
from tests.reductions.strategies import DTYPES, INTEGERS, streams, tensors


def summary(*tensors: Tensor) -> dict[str, float]:
    """Return the statistics of a stream as numbers."""
    moments = RunningMoments()
    for tensor in tensors:
        moments.update(tensor)
    return {name: float(value) for name, value in moments.compute().items()}


def test_moments_values_by_hand() -> None:
    """For 1, 2, 3 and 6 the mean is 3, the population variance 3.5 and the mean square 12.5."""
    assert summary(torch.tensor([1.0, 2.0]), torch.tensor([[3.0], [6.0]])) == {
        "count": 4.0,
        "sum": 12.0,
        "mean": 3.0,
        "variance": 3.5,
        "std": math.sqrt(3.5),
        "rms": math.sqrt(12.5),
    }


def test_one_value_has_no_spread() -> None:
    """The deviation of a single value is zero, not NaN, because the default correction is 0."""
    found = summary(torch.tensor(-5.0))
    assert found == {"count": 1.0, "sum": -5.0, "mean": -5.0, "variance": 0.0, "std": 0.0, "rms": 5.0}


def test_the_correction_is_subtracted_from_the_count() -> None:
    """A correction of 1 gives the sample variance, NaN for a single value, and does not change the rms."""
    moments = RunningMoments(correction=1)
    moments.update(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    found = {name: float(value) for name, value in moments.compute().items()}
    assert (found["variance"], found["std"]) == (14 / 3, math.sqrt(14 / 3))
    assert found["rms"] == math.sqrt(12.5)
    moments.reset()
    moments.update(torch.tensor(5.0))
    assert math.isnan(moments.compute()["variance"])


@pytest.mark.parametrize("correction", [-1, 0.5, True, "1"])
def test_a_wrong_correction_is_refused(correction: object) -> None:
    """A correction that is not a count is rejected."""
    with pytest.raises(ArgumentError, match="correction must be an integer of at least 0"):
        RunningMoments(correction)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)], [torch.tensor([float("nan"), float("inf")])]])
def test_without_a_finite_value_all_but_the_count_is_nan(tensors: list[Tensor]) -> None:
    """A stream without a finite value has count and sum 0, and NaN as mean, variance, deviation and rms."""
    found = summary(*tensors)
    assert (found.pop("count"), found.pop("sum")) == (0.0, 0.0)
    assert [math.isnan(value) for value in found.values()] == [True] * 4


def test_values_that_are_not_finite_take_no_part() -> None:
    """NaN and infinities are ignored in count, mean and deviation."""
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert summary(torch.cat((torch.tensor([1.0, 3.0]), bad)), bad) == {
        "count": 2.0,
        "sum": 4.0,
        "mean": 2.0,
        "variance": 1.0,
        "std": 1.0,
        "rms": math.sqrt(5),
    }


@settings(max_examples=100)
@given(streams)
def test_moments_any_stream_agrees_with_exact_sums(stream: list[Tensor]) -> None:
    """For every type, shape and split the moments equal exact sums over the whole stream."""
    moments = RunningMoments()
    for tensor in stream:
        moments.update(tensor)
    Moments.of(values_of(stream)).assert_near(moments.compute())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moments_a_small_spread_beside_a_large_mean_is_kept(dtype: torch.dtype) -> None:
    """The variance of 1e4 ± 1e-3 in a hundred batches is about 1e-6, within a tenth of a percent."""
    batches = torch.normal(1e4, 1e-3, (100, 64), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = batches.to(dtype)
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    variance = float(moments.compute()["std"]) ** 2
    assert variance == pytest.approx(1.05e-6, rel=0.1)
    assert variance == pytest.approx(Moments.of(values_of(batches)).variance, rel=1e-3)


@pytest.mark.parametrize("share", [1, 10, 1000])
def test_a_small_spread_among_bad_values_is_kept(share: int) -> None:
    """Any number of values that are not finite does not affect the spread of the finite ones."""
    good = torch.tensor([1e4 - 1e-3, 1e4 + 1e-3], dtype=torch.float64)
    bad = torch.full((2 * share,), float("nan"), dtype=torch.float64)
    assert summary(torch.cat((good, bad)))["std"] == pytest.approx(1e-3, rel=0.01)


def test_many_small_batches_lose_nothing() -> None:
    """After ten thousand merges the mean is accurate within 1e-12 of the rms."""
    batches = torch.rand(10_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    moments = RunningMoments()
    state = moments.initial()
    singles = torch.stack((torch.full((10_000,), 2.0), batches.mean(1), batches.var(1, correction=0) * 2), dim=1)
    for single in singles.double():
        moments.merge_states(state, single)
    Moments.of(values_of(batches)).assert_near(moments.summarize(state))


def test_many_equal_values_beside_a_huge_one_stay_within_the_bound() -> None:
    """Many equal values next to an outlier, whose squares all round in one direction, stay within the bound."""
    values = torch.ones(2**18, dtype=torch.float64)
    values[0] = 3e24
    moments = RunningMoments()
    moments.update(values)
    Moments.of(values.tolist()).assert_near(moments.compute())


# Higher moments


INF, NAN = math.inf, math.nan
BOUND = 1e-9  # the documented bound, for a standard deviation of at least 1e-4 of the mean


def shape_of(values: Sequence[float]) -> tuple[float, float, float]:
    """Return skewness, excess kurtosis and the deviation relative to the mean, from exact sums of exact numbers."""
    exact = [Fraction(value) for value in values if math.isfinite(value)]
    count = len(exact)
    if not count:
        return NAN, NAN, NAN
    mean = sum(exact, Fraction()) / count
    m2, m3, m4 = (sum(((value - mean) ** power for value in exact), Fraction()) for power in (2, 3, 4))
    if not m2:
        return NAN, NAN, 0.0
    skewness = math.copysign(math.sqrt(m3**2 * count / m2**3), m3)
    spread = math.sqrt(m2 / count / mean**2) if mean else INF
    return skewness, float(count * m4 / m2**2 - 3), spread


def assert_shape(found: dict[str, list[float]], values: Sequence[float]) -> None:
    """Assert the bound if the spread is large enough, and NaN if the spread is negligible."""
    skewness, kurtosis, spread = shape_of(values)
    # Close to 1e-14 the result depends on rounding.
    if math.isnan(spread) or spread < 0.99e-14:
        np.testing.assert_array_equal([found["skewness"], found["kurtosis"]], [[NAN], [NAN]])
    elif spread >= 1e-4:
        assert found["skewness"] == [pytest.approx(skewness, abs=BOUND, rel=0)]
        assert found["kurtosis"] == [pytest.approx(kurtosis, abs=BOUND, rel=0)]


@pytest.mark.parametrize(
    ("stream", "skewness", "kurtosis"),
    [
        ([torch.tensor([1.0, 2.0]), torch.tensor([[3], [4], [5]])], 0.0, -1.3),
        ([torch.tensor([0.0, 0.0, 0.0, 1.0])], 2 / math.sqrt(3), -2 / 3),
        ([torch.tensor([0.0, 0.0, -1.0]), torch.tensor(0.0)], -2 / math.sqrt(3), -2 / 3),
        ([torch.tensor([-1.0]), torch.tensor([1.0])], 0.0, -2.0),
        ([torch.tensor([NAN, 0.0, INF, 0.0, 0.0, -INF, 1.0])], 2 / math.sqrt(3), -2 / 3),
        ([torch.tensor([0j, 0 + 1j])], 2 / math.sqrt(3), -2 / 3),
        ([torch.tensor([0.0] * 99 + [1.0])], 98 / math.sqrt(99), 1 / (0.01 * 0.99) - 6),
    ],
)
def test_higher_moments_values_by_hand(stream: list[Tensor], skewness: float, kurtosis: float) -> None:
    """For 0, 0, 0 and 1 the skewness is 2/√3 and the excess kurtosis -2/3; NaN and infinities are ignored."""
    found = computed(HigherMoments, *stream)
    # allow for rounding of a few operations
    assert found == {"skewness": [pytest.approx(skewness, abs=1e-13)], "kurtosis": [pytest.approx(kurtosis, abs=1e-12)]}


@pytest.mark.parametrize(
    "stream",
    [
        [],
        [torch.zeros(0)],
        [torch.tensor([NAN, INF])],
        [torch.tensor(5.0)],
        [torch.zeros(4)],
        [torch.full((1000,), 0.1)],
        [torch.full((300_000,), 0.1, dtype=torch.float64), torch.full((7,), 0.1, dtype=torch.float64)],
        [torch.full((3,), 0.1, dtype=torch.float64)] * 100,
        [torch.full((3,), -FLOAT32_MAX)] * 7,
    ],
)
def test_without_a_spread_both_are_nan(stream: list[Tensor]) -> None:
    """Both are NaN without a finite value and for constants, even with rounding errors."""
    assert [math.isnan(value) for (value,) in computed(HigherMoments, *stream).values()] == [True, True]


ORDINARY = tuple(dtype for dtype in DTYPES if dtype not in (torch.float64, torch.complex128))


@settings(max_examples=100)
@given(st.lists(tensors(ORDINARY), max_size=4))
def test_any_stream_agrees_with_exact_fractions(stream: list[Tensor]) -> None:
    """For every type up to float32, shape and split both are within 1e-9 of those of the whole stream."""
    assert_shape(computed(HigherMoments, *stream), values_of(stream))


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.floats(-1, 1), max_size=12), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0, -30.0, 1e3, 9e3]),
    st.sampled_from([1e-30, 1.0, 1e30]),
)
def test_doubles_agree_however_they_are_split(parts: list[list[float]], mean: float, scale: float) -> None:
    """Updates, merges from the left and merges from the right agree with one update within 1e-9."""
    stream = [(torch.tensor(part, dtype=torch.float64) + mean) * scale for part in parts]
    values = values_of(stream)
    assume(shape_of(values)[2] >= 1e-4)
    assume(max(values) - min(values) >= 1e-70)  # the fourth powers of smaller deviations are below the range of float64
    singles = [reduced(HigherMoments, part) for part in stream]
    backwards = merged(HigherMoments)
    for single in reversed(singles):
        backwards = merged(HigherMoments, single, backwards)
    whole = torch.cat(stream)
    for state in (
        reduced(HigherMoments, whole),
        reduced(HigherMoments, *stream),
        reduced(HigherMoments, *whole),
        merged(HigherMoments, *singles),
        backwards,
    ):
        assert_shape({name: [float(value)] for name, value in state.compute().items()}, values)


def test_higher_moments_a_small_spread_beside_a_large_mean_is_kept() -> None:
    """For a hundred skewed batches with a spread of 1e-4 of their mean, both are within 1e-9."""
    batches = torch.empty(100, 32, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0)) + 9e3
    found = computed(HigherMoments, *batches)
    skewness, kurtosis, spread = shape_of(values_of(batches))
    assert spread == pytest.approx(1.1e-4, rel=0.1)
    assert found["skewness"] == [pytest.approx(skewness, abs=BOUND)]
    assert found["kurtosis"] == [pytest.approx(kurtosis, abs=BOUND)]


def test_higher_moments_a_large_tensor_loses_nothing() -> None:
    """A tensor that is processed in pieces has the moments that follow from the counts of its few distinct values."""
    tensor = torch.tensor([0.0, 0.0, 0.0, 1.0]).repeat(100_000)
    found = computed(HigherMoments, tensor)
    assert found["skewness"] == [pytest.approx(2 / math.sqrt(3), abs=BOUND)]
    assert found["kurtosis"] == [pytest.approx(-2 / 3, abs=BOUND)]


def test_the_largest_float32_have_a_shape() -> None:
    """The fourth powers of the largest float32 are within the range of the state."""
    stream = [torch.tensor([FLOAT32_MAX, -FLOAT32_MAX]), torch.tensor([FLOAT32_MAX, FLOAT32_MAX / 2])]
    assert shape_of(values_of(stream))[2] == pytest.approx(1.69, abs=0.5)
    assert_shape(computed(HigherMoments, *stream), values_of(stream))


def test_two_constants_have_a_shape_together() -> None:
    """Three states of zeros and one of ones, each without a spread, merge to the moments of 0, 0, 0 and 1."""
    zero, one = reduced(HigherMoments, torch.zeros(5)), reduced(HigherMoments, torch.ones(5))
    found = merged(HigherMoments, zero, one, zero, zero).compute()
    assert float(found["skewness"]) == pytest.approx(2 / math.sqrt(3), abs=1e-13)
    assert float(found["kurtosis"]) == pytest.approx(-2 / 3, abs=1e-13)


@settings(max_examples=40)
@given(streams)
def test_higher_moments_the_initial_state_is_neutral(stream: list[Tensor]) -> None:
    """Merging with an empty state from either side changes no bit."""
    # Huge deviations, whose powers overflow, are not supported.
    assume(all(abs(value) < 1e70 for value in values_of(stream) if math.isfinite(value)))
    assert_neutral(HigherMoments, *stream)


def test_a_huge_mean_is_kept_beside_an_empty_state() -> None:
    """Merging a value of 1e150, whose powers overflow, with an empty state from either side changes no bit."""
    state = reduced(HigherMoments, torch.tensor([1e150], dtype=torch.float64))
    assert state.state.tolist() == [1.0, 1e150, 0.0, 0.0, 0.0]
    for one, other in ((state, HigherMoments()), (HigherMoments(), state)):
        assert bits(merged(HigherMoments, one, other).state) == bits(state.state)


def test_higher_moments_rows_are_merged_and_summarized_together_as_one_by_one() -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    rows = [[torch.arange(-4.0, 3)], [], [torch.tensor([NAN, 0.5])], [torch.zeros(2), torch.ones(3)]]
    assert_rows_agree(HigherMoments, rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64, *INTEGERS[:1]], ids=str)
def test_higher_moments_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    assert_nothing_waits(HigherMoments, torch.arange(12).reshape(3, 4).to(dtype), torch.zeros(0, 2).to(dtype))


# Norms


STATISTICS = ("abs_max", "l1_norm", "l2_norm")


def assert_norms(norms: dict[str, list[float]], tensors: list[Tensor]) -> None:
    """Compare norms with the reference: the maximum exactly, the others within a relative error of 1e-12.

    Squares of numbers below 1e-150 underflow in float64, so that error is allowed in addition for the l2 norm.
    """
    sizes = [abs(value) for value in values_of(tensors) if math.isfinite(value)]
    np.testing.assert_array_equal(norms["abs_max"], [max(sizes, default=NAN)])
    assert norms["l1_norm"] == [pytest.approx(math.fsum(sizes), rel=1e-12, abs=0)]
    assert norms["l2_norm"] == [pytest.approx(math.hypot(*sizes), rel=1e-12, abs=1e-150)]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([torch.tensor([3.0, -4.0]), torch.tensor(12.0)], [12.0, 19.0, 13.0]),
        ([torch.tensor([[-3, 4]]), torch.tensor([[[12]]])], [12.0, 19.0, 13.0]),
        ([torch.tensor([3 - 4j])], [4.0, 7.0, 5.0]),
        ([torch.tensor([3.0, NAN, -INF, INF, -4.0])], [4.0, 7.0, 5.0]),
        ([torch.tensor([-0.0])], [0.0, 0.0, 0.0]),
        ([torch.tensor([False, True])], [1.0, 1.0, 1.0]),
        ([torch.tensor([30000.0, -40000.0], dtype=torch.float16)], [40000.0, 70000.0, 50000.0]),
        ([torch.tensor([1e200, -1e199], dtype=torch.float64)], [1e200, 1.1e200, INF]),
        ([], [NAN, 0.0, 0.0]),
        ([torch.zeros(0)], [NAN, 0.0, 0.0]),
        ([torch.tensor([NAN, INF])], [NAN, 0.0, 0.0]),
        ([torch.tensor([NAN]), torch.tensor([-2.0])], [2.0, 2.0, 2.0]),
    ],
)
def test_norms_values_by_hand(tensors: list[Tensor], expected: list[float]) -> None:
    """The norms cover all finite values; without one the maximum is NaN and the sums are zero."""
    found = computed(Norms, *tensors)
    np.testing.assert_array_equal([found[name][0] for name in STATISTICS], expected)


@settings(max_examples=100)
@given(streams)
def test_norms_any_stream_agrees_with_exact_sums(stream: list[Tensor]) -> None:
    """For every type, shape and split the norms equal exact sums over the whole stream."""
    assert_norms(computed(Norms, *stream), stream)


@settings(max_examples=40)
@given(streams, streams, streams)
def test_order_and_grouping_of_merges_do_not_matter(
    first: list[Tensor], second: list[Tensor], third: list[Tensor]
) -> None:
    """Merging states in any order and grouping gives the norms of all streams together."""
    a, b, c = (reduced(Norms, *stream) for stream in (first, second, third))
    everything = [*first, *second, *third]
    for result in (merged(Norms, a, b, c), merged(Norms, a, merged(Norms, b, c)), merged(Norms, c, b, a)):
        assert_norms({name: [float(value)] for name, value in result.compute().items()}, everything)


def test_norms_a_large_tensor_loses_nothing() -> None:
    """The norms of a tensor that is processed in pieces equal exact sums."""
    tensor = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
    assert_norms(computed(Norms, tensor), [tensor])


@settings(max_examples=40)
@given(streams)
def test_norms_the_initial_state_is_neutral(stream: list[Tensor]) -> None:
    """Merging with an empty state from either side changes no bit."""
    assert_neutral(Norms, *stream)


def test_norms_rows_are_merged_and_summarized_together_as_one_by_one() -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    assert_rows_agree(Norms, [[torch.arange(-4.0, 3)], [], [torch.tensor([NAN, 0.5])], [torch.zeros(2), torch.ones(3)]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    assert_nothing_waits(Norms, torch.arange(12).reshape(3, 4).to(dtype), torch.zeros(0, 2).to(dtype))


def extrema(*tensors: Tensor) -> list[float]:
    """Return the minimum and maximum of a stream as numbers."""
    reduction = Extrema()
    for tensor in tensors:
        reduction.update(tensor)
    return [float(value) for value in reduction.compute().values()]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([torch.tensor([3.0, -1.0, 2.0])], [-1.0, 3.0]),
        ([torch.tensor([5.0]), torch.tensor([[-7.0]]), torch.tensor(1.0)], [-7.0, 5.0]),
        ([torch.tensor([INF, 2.0, -INF, NAN])], [2.0, 2.0]),
        ([torch.tensor([1, 2**40])], [1.0, 2.0**40]),
        ([torch.tensor([True, False])], [0.0, 1.0]),
        ([torch.tensor([1 + 5j, 2 - 3j])], [-3.0, 5.0]),
        ([torch.tensor([1e308, -1e308], dtype=torch.float64)], [-1e308, 1e308]),
        ([torch.tensor([65504.0], dtype=torch.float16)], [65504.0, 65504.0]),
        ([torch.tensor([1e-45])], [2.0**-149, 2.0**-149]),
        ([], [NAN, NAN]),
        ([torch.tensor([INF, NAN, -INF])], [NAN, NAN]),
        ([torch.zeros(0)], [NAN, NAN]),
    ],
)
def test_extrema_values_by_hand(tensors: list[Tensor], expected: list[float]) -> None:
    """The extrema cover the finite values and are NaN without one."""
    np.testing.assert_array_equal(extrema(*tensors), expected)


@settings(max_examples=100)
@given(streams)
def test_extrema_any_stream_agrees_with_python(stream: list[Tensor]) -> None:
    """For every type, shape and split the extrema are exactly the min and max of the finite values in Python."""
    np.testing.assert_array_equal(extrema(*stream), extrema_of(values_of(stream)))


# Tallies


def tallies(*tensors: Tensor) -> list[float]:
    """Return the fraction of zeros and the numbers of NaN and infinities of a stream."""
    reduction = Tallies()
    for tensor in tensors:
        reduction.update(tensor)
    summary = reduction.compute()
    assert list(summary) == ["zero_fraction", "nan_count", "inf_count"]
    return [float(value) for value in summary.values()]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([torch.tensor([0.0, -0.0, 1.0, 2.0])], [0.5, 0.0, 0.0]),
        ([torch.tensor([0.0]), torch.tensor([[1.0, NAN, 3.0]])], [0.25, 1.0, 0.0]),
        ([torch.tensor([INF, -INF, NAN, 0.0])], [0.25, 1.0, 2.0]),
        ([torch.tensor([False, True])], [0.5, 0.0, 0.0]),
        ([torch.tensor([0, 1, 2, 3, 0])], [0.4, 0.0, 0.0]),
        ([torch.tensor([0j, 1 + 0j])], [0.75, 0.0, 0.0]),
        ([torch.tensor([1e-45, 5e-324], dtype=torch.float64)], [0.0, 0.0, 0.0]),
        ([torch.tensor([1e-45])], [0.0, 0.0, 0.0]),
        ([torch.tensor([1e308, -1e308, 2.0**128], dtype=torch.float64)], [0.0, 0.0, 0.0]),
        ([], [NAN, 0.0, 0.0]),
        ([torch.zeros(0)], [NAN, 0.0, 0.0]),
    ],
)
def test_tallies_values_by_hand(tensors: list[Tensor], expected: list[float]) -> None:
    """Zeros of either sign are counted; a subnormal is not a zero, and a huge float64 is not an infinity."""
    np.testing.assert_array_equal(tallies(*tensors), expected)


@settings(max_examples=100)
@given(streams)
def test_tallies_any_stream_agrees_with_python(stream: list[Tensor]) -> None:
    """For every type, shape and split the tallies equal a count value by value."""
    np.testing.assert_array_equal(tallies(*stream), tallies_of(values_of(stream)))


# Thresholds


# Every dtype can represent these numbers, so comparing in that dtype is exact.
thresholds = st.sampled_from([0.0, 2.0**-20, 0.5, 1.0, 2.0, 65504.0])


@pytest.mark.parametrize(
    ("tensors", "near_zero", "saturated"),
    [
        ([torch.tensor([0.5, -0.5, 0.75, -3.0])], 0.5, 0.5),
        ([torch.tensor([0.0, -0.0]), torch.tensor([[1.0]]), torch.tensor(-1.0)], 0.5, 0.5),
        ([torch.tensor([NAN, 0.0, 0.0, INF, -INF])], 0.4, 0.4),
        ([torch.tensor([NAN])], 0.0, 0.0),
        ([torch.tensor([0.25 + 4j])], 0.5, 0.5),
        ([torch.tensor([0, 0, 0, -128], dtype=torch.int8)], 0.75, 0.25),
        ([torch.tensor([True, False])], 0.5, 0.5),
        ([], NAN, NAN),
        ([torch.zeros(0)], NAN, NAN),
    ],
)
def test_thresholds_values_by_hand(tensors: list[Tensor], near_zero: float, saturated: float) -> None:
    """With a threshold of 0.5 a magnitude of 0.5 is near zero and not saturated; a NaN only counts as a value."""
    assert one_number(reduced(lambda: NearZero(0.5), *tensors)) == pytest.approx(near_zero, abs=0, nan_ok=True)
    assert one_number(reduced(lambda: Saturation(0.5), *tensors)) == pytest.approx(saturated, abs=0, nan_ok=True)


def test_the_names_of_the_statistics() -> None:
    """The statistics are named near_zero_fraction and saturation_fraction."""
    assert list(NearZero().compute()) == ["near_zero_fraction"]
    assert list(Saturation(1.0).compute()) == ["saturation_fraction"]


def test_by_default_a_millionth_is_near_zero() -> None:
    """By default magnitudes up to 1e-6 are near zero."""
    tensor = torch.tensor([1e-6, -9e-7, 1.1e-6, 0.0], dtype=torch.float64)
    assert one_number(reduced(NearZero, tensor)) == 0.75


@settings(max_examples=100)
@given(streams, thresholds)
def test_any_stream_agrees_with_a_count_value_by_value(stream: list[Tensor], threshold: float) -> None:
    """For every type, shape and split the fractions equal a count value by value."""
    values = values_of(stream)
    near = sum(abs(value) <= threshold for value in values)
    beyond = sum(abs(value) > threshold for value in values)
    expected = (near / len(values), beyond / len(values)) if values else (NAN, NAN)
    found = [one_number(reduced(partial(kind, threshold), *stream)) for kind in (NearZero, Saturation)]
    np.testing.assert_array_equal(found, expected)


@settings(max_examples=40)
@given(streams, streams, thresholds)
def test_merging_adds_the_counts(first: list[Tensor], second: list[Tensor], threshold: float) -> None:
    """A merge in either order is bitwise the state of both streams together, and an empty state is neutral."""
    for kind in (NearZero, Saturation):
        make = partial(kind, threshold)
        one, other = reduced(make, *first), reduced(make, *second)
        both = reduced(make, *first, *second).state.tolist()
        assert merged(make, one, other).state.tolist() == both
        assert merged(make, other, one).state.tolist() == both
        assert_neutral(make, *first)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_an_infinity_is_beyond_a_threshold_that_the_type_has_not(dtype: torch.dtype) -> None:
    """With a threshold beyond the largest float32, only float32 infinities exceed it."""
    tensor = torch.tensor([1.0, INF, -INF, -60000.0], dtype=dtype)
    assert one_number(reduced(lambda: Saturation(1e39), tensor)) == 0.5
    assert one_number(reduced(lambda: NearZero(1e39), tensor)) == 0.5


def test_a_large_tensor_is_counted_exactly() -> None:
    """Each value of a tensor that is processed in pieces is counted once."""
    tensor = torch.arange(600_000, dtype=torch.int32)
    assert reduced(lambda: NearZero(99_999.0), tensor).state.tolist() == [600_000.0, 100_000.0]
    assert reduced(lambda: Saturation(99_999.0), tensor).state.tolist() == [600_000.0, 500_000.0]


@pytest.mark.parametrize("kind", [NearZero, Saturation])
@pytest.mark.parametrize("threshold", [-1e-9, NAN, True, "0.5", None])
def test_a_threshold_that_is_no_magnitude_is_refused(kind: Any, threshold: object) -> None:
    """A threshold that is negative, NaN or not a number is rejected by the constructor."""
    with pytest.raises(ArgumentError, match=r"^threshold must be a number of at least 0, got "):
        kind(threshold)


@pytest.mark.parametrize("kind", [NearZero, Saturation])
def test_another_threshold_is_not_merged(kind: type[NearZero | Saturation]) -> None:
    """Statistics with different thresholds cannot be merged, and the state does not change."""
    one, other = reduced(lambda: kind(0.5), torch.ones(3)), reduced(lambda: kind(0.25), torch.ones(3))
    before = one.state.tolist()
    with pytest.raises(ArgumentError, match=r"\(threshold=0\.5\) cannot be merged with .*\(threshold=0\.25\)"):
        one.merge(other)
    assert one.state.tolist() == before


@pytest.mark.parametrize("kind", [NearZero, Saturation])
def test_rows_are_merged_and_summarized_together_as_one_by_one(kind: type[NearZero | Saturation]) -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    rows = [[torch.arange(-4.0, 3)], [], [torch.tensor([NAN, 0.5])], [torch.zeros(2), torch.ones(3)]]
    assert_rows_agree(lambda: kind(0.5), rows)


@pytest.mark.parametrize("kind", [NearZero, Saturation])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(kind: type[NearZero | Saturation], dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    assert_nothing_waits(lambda: kind(0.5), torch.arange(12).reshape(3, 4).to(dtype), torch.zeros(0, 2).to(dtype))

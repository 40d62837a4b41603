"""Tests of skewness and kurtosis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.reductions import HigherMoments
from tests.reductions.laws import (
    assert_neutral,
    assert_nothing_waits,
    assert_rows_agree,
    bits,
    computed,
    merged,
    reduced,
)
from tests.reductions.reference import FLOAT32_MAX, values_of
from tests.reductions.strategies import DTYPES, INTEGERS, streams, tensors

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
def test_values_by_hand(stream: list[Tensor], skewness: float, kurtosis: float) -> None:
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


def test_a_small_spread_beside_a_large_mean_is_kept() -> None:
    """For a hundred skewed batches with a spread of 1e-4 of their mean, both are within 1e-9."""
    batches = torch.empty(100, 32, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0)) + 9e3
    found = computed(HigherMoments, *batches)
    skewness, kurtosis, spread = shape_of(values_of(batches))
    assert spread == pytest.approx(1.1e-4, rel=0.1)
    assert found["skewness"] == [pytest.approx(skewness, abs=BOUND)]
    assert found["kurtosis"] == [pytest.approx(kurtosis, abs=BOUND)]


def test_a_large_tensor_loses_nothing() -> None:
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
def test_the_initial_state_is_neutral(stream: list[Tensor]) -> None:
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


def test_rows_are_merged_and_summarized_together_as_one_by_one() -> None:
    """Merging and summarising a block of states gives the same results as row by row."""
    rows = [[torch.arange(-4.0, 3)], [], [torch.tensor([NAN, 0.5])], [torch.zeros(2), torch.ones(3)]]
    assert_rows_agree(HigherMoments, rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.complex64, *INTEGERS[:1]], ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    assert_nothing_waits(HigherMoments, torch.arange(12).reshape(3, 4).to(dtype), torch.zeros(0, 2).to(dtype))

"""Tests of extreme values."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import Extrema, NearZero, Saturation, Tallies
from tests.reductions.laws import assert_neutral, assert_nothing_waits, assert_rows_agree, merged, one_number, reduced
from tests.reductions.reference import extrema_of, tallies_of, values_of
from tests.reductions.strategies import DTYPES, streams

INF, NAN = math.inf, math.nan


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

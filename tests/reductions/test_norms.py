"""Tests of the norms of a stream."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_recorder.reductions import Norms
from tests.reductions.laws import (
    assert_neutral,
    assert_nothing_waits,
    assert_rows_agree,
    computed,
    merged,
    reduced,
)
from tests.reductions.reference import values_of
from tests.reductions.strategies import DTYPES, streams

INF, NAN = math.inf, math.nan
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
def test_values_by_hand(tensors: list[Tensor], expected: list[float]) -> None:
    """The norms cover all finite values; without one the maximum is NaN and the sums are zero."""
    found = computed(Norms, *tensors)
    np.testing.assert_array_equal([found[name][0] for name in STATISTICS], expected)


@settings(max_examples=100)
@given(streams)
def test_any_stream_agrees_with_exact_sums(stream: list[Tensor]) -> None:
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


def test_a_large_tensor_loses_nothing() -> None:
    """The norms of a tensor that is processed in pieces equal exact sums."""
    tensor = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
    assert_norms(computed(Norms, tensor), [tensor])


@settings(max_examples=40)
@given(streams)
def test_the_initial_state_is_neutral(stream: list[Tensor]) -> None:
    """Merging with an empty state from either side changes no bit."""
    assert_neutral(Norms, *stream)


def test_rows_are_merged_and_summarized_together_as_one_by_one() -> None:
    """Merging and summarising a block of states gives the same results as row by row."""
    assert_rows_agree(Norms, [[torch.arange(-4.0, 3)], [], [torch.tensor([NAN, 0.5])], [torch.zeros(2), torch.ones(3)]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    assert_nothing_waits(Norms, torch.arange(12).reshape(3, 4).to(dtype), torch.zeros(0, 2).to(dtype))

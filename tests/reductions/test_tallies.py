"""Tests of the counts of zeros, NaN and infinities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_recorder.reductions import Tallies
from tests.reductions.reference import tallies_of, values_of
from tests.reductions.strategies import streams

INF, NAN = math.inf, math.nan


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
def test_values_by_hand(tensors: list[Tensor], expected: list[float]) -> None:
    """Zeros of either sign are counted; a subnormal is not a zero, and a huge float64 is not an infinity."""
    np.testing.assert_array_equal(tallies(*tensors), expected)


@settings(max_examples=100)
@given(streams)
def test_any_stream_agrees_with_python(stream: list[Tensor]) -> None:
    """For every type, shape and split the tallies equal a count value by value."""
    np.testing.assert_array_equal(tallies(*stream), tallies_of(values_of(stream)))

"""Tests of the smallest and the largest value."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_recorder.reductions import Extrema
from tests.reductions.reference import extrema_of, values_of
from tests.reductions.strategies import streams

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
def test_values_by_hand(tensors: list[Tensor], expected: list[float]) -> None:
    """The extrema cover the finite values and are NaN without one."""
    np.testing.assert_array_equal(extrema(*tensors), expected)


@settings(max_examples=100)
@given(streams)
def test_any_stream_agrees_with_python(stream: list[Tensor]) -> None:
    """For every type, shape and split the extrema are exactly the min and max of the finite values in Python."""
    np.testing.assert_array_equal(extrema(*stream), extrema_of(values_of(stream)))

"""Tests of the last value of a stream."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import LastValue
from tests.reductions.laws import (
    assert_equal,
    assert_neutral,
    assert_nothing_waits,
    assert_rows_agree,
    bits,
    filled,
    merged,
    reduced,
)
from tests.reductions.reference import values_of
from tests.reductions.strategies import COMPLEX, DTYPES, tensors

INF, NAN = math.inf, math.nan
REAL = tuple(dtype for dtype in DTYPES if not dtype.is_complex)
SPECIAL = torch.tensor([[NAN, INF], [-INF, -0.0]])


def last(*stream: Tensor, dim: int | None = None) -> Tensor:
    """Return the last value of a stream."""
    return reduced(lambda: LastValue(dim), *stream).compute()["last"]


def test_values_by_hand() -> None:
    """The second of two tensors is kept, in its shape, including values that are not finite."""
    found = last(torch.ones(2, 2), SPECIAL)
    np.testing.assert_array_equal(found, [[NAN, INF], [-INF, -0.0]])
    assert math.copysign(1.0, found[1, 1]) == -1.0


def test_the_last_sample_by_hand() -> None:
    """With a dimension the last slice along it is kept, from batches of any size."""
    first, second = torch.arange(6.0).reshape(3, 2), torch.tensor([[7.0, 8.0]])
    assert last(second, first, dim=0).tolist() == [4.0, 5.0]
    assert last(first, second, dim=0).tolist() == [7.0, 8.0]
    assert last(first, dim=1).tolist() == [1.0, 3.0, 5.0]
    assert last(first, dim=-1).tolist() == [1.0, 3.0, 5.0]


def test_a_number_is_kept() -> None:
    """The last of several 0-d tensors, such as losses, is kept as a number."""
    found = last(torch.tensor(2.0), torch.tensor(-5.0))
    assert (found.shape, float(found)) == ((), -5.0)


def test_the_last_number_of_vectors_is_kept() -> None:
    """The last slice of a vector is a number."""
    found = last(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]), dim=0)
    assert (found.shape, float(found)) == ((), 5.0)


@settings(max_examples=100)
@given(tensors(), st.lists(st.integers(0, 5)))
def test_any_tensor_is_kept_as_it_is(tensor: Tensor, others: list[int]) -> None:
    """For every type, shape and layout each number is exact, whatever came before."""
    before = [torch.full_like(tensor, other) for other in others]
    found = last(*before, tensor)
    assert found.shape == (*tensor.shape, *((2,) if tensor.is_complex() else ()))
    np.testing.assert_array_equal(found.flatten(), np.array(values_of([tensor]), dtype=float))


@st.composite
def sample_streams(draw: st.DrawFn) -> tuple[int, list[Tensor]]:
    """Draw a dimension and matrices that differ in their size along it, which is at least one."""
    dim = draw(st.sampled_from([0, 1, -1]))
    dtypes = draw(st.sampled_from([COMPLEX, REAL]))
    shape = [2, 2]
    stream = []
    for _ in range(draw(st.integers(1, 3))):
        shape[dim] = draw(st.integers(1, 3))
        stream.append(draw(filled(shape, dtypes)))
    return dim, stream


@settings(max_examples=60)
@given(sample_streams())
def test_any_stream_leaves_its_last_sample(drawn: tuple[int, list[Tensor]]) -> None:
    """For every type and split, updates and merges in order keep the last slice of the whole stream."""
    dim, stream = drawn
    expected = np.array(values_of([stream[-1].select(dim, -1)]), dtype=float)
    np.testing.assert_array_equal(last(*stream, dim=dim).flatten(), expected)
    parts = [reduced(lambda: LastValue(dim), tensor) for tensor in stream]
    joined = merged(lambda: LastValue(dim), *parts)
    np.testing.assert_array_equal(joined.compute()["last"].flatten(), expected)
    assert bits(joined.state) == bits(reduced(lambda: LastValue(dim), *stream).state)


# Order


def test_a_merge_takes_the_last_of_the_other() -> None:
    """In a.merge(b) the value of b is the last, unless b is empty; a NaN counts as a value."""
    a, b, nothing = reduced(LastValue, torch.zeros(2)), reduced(LastValue, torch.tensor([1.0, NAN])), LastValue()
    np.testing.assert_array_equal(merged(LastValue, a, b).compute()["last"], [1.0, NAN])
    np.testing.assert_array_equal(merged(LastValue, b, a).compute()["last"], [0.0, 0.0])
    np.testing.assert_array_equal(merged(LastValue, nothing, b, nothing).compute()["last"], [1.0, NAN])
    emptied = reduced(LastValue, torch.ones(2))
    emptied.reset()
    np.testing.assert_array_equal(merged(LastValue, b, emptied).compute()["last"], [1.0, NAN])


def test_merging_is_associative() -> None:
    """The grouping of merges in order changes no bit, whichever streams are empty."""
    empty = reduced(LastValue, torch.zeros(1))
    empty.reset()
    choices = [empty, *(reduced(LastValue, torch.tensor([value])) for value in (1.0, NAN))]
    for a in choices:
        for b in choices:
            for c in choices:
                left = merged(LastValue, merged(LastValue, a, b), c)
                right = merged(LastValue, a, merged(LastValue, b, c))
                assert bits(left.state) == bits(right.state)


def test_it_is_ordered() -> None:
    """The reduction declares that it is ordered."""
    assert LastValue().ordered is True


# Empty streams


def test_before_the_first_tensor_there_is_no_number() -> None:
    """Before the first tensor, which determines the shape, the statistic is NaN."""
    assert LastValue().compute()["last"].isnan().all()


def test_after_a_reset_there_is_nan() -> None:
    """After a reset and after a restart each element is NaN."""
    state = reduced(LastValue, torch.ones(2))
    state.reset()
    np.testing.assert_array_equal(state.compute()["last"], [NAN, NAN])
    state.update(torch.ones(2))
    state.restart(state.state)
    np.testing.assert_array_equal(state.compute()["last"], [NAN, NAN])


def test_a_batch_without_a_sample_changes_nothing() -> None:
    """With a dimension, a tensor without a slice along it does not change the last value."""
    assert last(torch.tensor([[1.0, 2.0]]), torch.zeros(0, 2), dim=0).tolist() == [1.0, 2.0]


# Shapes


def test_another_shape_is_refused() -> None:
    """The first tensor determines the shape; another shape is rejected and changes nothing."""
    state = reduced(LastValue, torch.ones(2, 3))
    before = bits(state.state)
    message = r"^LastValue has numbers of shape \(2, 3\), but the new shape is \(1, 3\)$"
    with pytest.raises(ArgumentError, match=message):
        state.update(torch.zeros(1, 3))
    assert bits(state.state) == before


def test_a_missing_dimension_is_refused() -> None:
    """A tensor without the dimension is rejected with an error that names its shape."""
    with pytest.raises(ArgumentError, match=r"^a tensor of shape \(\) has no dimension 0; choose another dim$"):
        LastValue(0).update(torch.tensor(1.0))


def test_the_size_is_that_of_the_tensor() -> None:
    """The state takes 8 bytes per number and 8 for the count."""
    assert reduced(LastValue, torch.ones(2, 3)).nbytes == 56


# Life cycle


def test_a_state_dict_continues_the_stream() -> None:
    """A state loaded into a fresh object is bitwise identical to the saved one."""
    restored = LastValue()
    restored.load_state_dict(reduced(LastValue, SPECIAL).state_dict())
    assert_equal(restored.compute()["last"], SPECIAL.double())
    restored.update(torch.ones(2, 2))
    assert bits(restored.state) == bits(reduced(LastValue, SPECIAL, torch.ones(2, 2)).state)


def test_nothing_is_kept_of_the_tensor() -> None:
    """The value is a copy, which later changes of the tensor do not affect."""
    tensor = torch.ones(2, dtype=torch.float64)
    state = reduced(LastValue, tensor)
    tensor.zero_()
    assert state.compute()["last"].tolist() == [1.0, 1.0]


def test_the_initial_state_is_neutral() -> None:
    """Merging with an empty state from either side changes no bit."""
    assert_neutral(LastValue, torch.ones(2, 2), SPECIAL)


def test_rows_are_merged_and_summarized_together_as_one_by_one() -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    empty = torch.zeros(0, 2)
    assert_rows_agree(LastValue, [[SPECIAL], [torch.ones(2, 2)], [torch.zeros(2, 2), SPECIAL]])
    assert_rows_agree(LastValue, [[empty], [empty, empty]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_nothing_waits_for_the_device(dim: int | None, dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert_nothing_waits(lambda: LastValue(dim), tensor, tensor)

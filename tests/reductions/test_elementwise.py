"""Tests of elementwise statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import BatchMax, BatchMean, BatchMin, BatchSum, Reduction
from tests.reductions.laws import (
    assert_equal,
    assert_neutral,
    assert_nothing_waits,
    assert_rows_agree,
    bits,
    computed,
    filled,
    merged,
    reduced,
)
from tests.reductions.reference import values_of
from tests.reductions.strategies import COMPLEX, DTYPES

INF, NAN = math.inf, math.nan
Kind = Callable[[int], Reduction]
KINDS: tuple[Kind, ...] = (BatchMean, BatchSum, BatchMin, BatchMax)
each_kind = pytest.mark.parametrize("kind", KINDS)


def statistic(reduction: Reduction) -> Tensor:
    """Return the only statistic, in its shape."""
    (value,) = reduction.compute().values()
    return value


def sum_of(values: list[float]) -> float:
    """Return the IEEE 754 sum: NaN for a NaN and for infinities of both signs."""
    special = [value for value in values if not math.isfinite(value)]
    return sum(special) if special else math.fsum(values)


def extremum_of(values: list[float], choose: Callable[[list[float]], float]) -> float:
    """Return the smallest or largest value, NaN if there is a NaN."""
    return NAN if any(map(math.isnan, values)) else choose(values)


def reference(kind: Kind, values: list[float]) -> float:
    """Return the reference statistic of the values of one element."""
    if not values:
        return NAN
    total = sum_of(values)
    of_each: dict[Kind, float] = {
        BatchMean: total / len(values),
        BatchSum: total,
        BatchMin: extremum_of(values, min),
        BatchMax: extremum_of(values, max),
    }
    return of_each[kind]


@st.composite
def sample_streams(draw: st.DrawFn) -> tuple[int, list[Tensor]]:
    """Draw a sample dimension and tensors with equal shapes except for that dimension."""
    dim, dims = draw(st.sampled_from([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (-1, 2), (-1, 1), (-2, 3)]))
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 0]), min_size=dims, max_size=dims))
    # A complex tensor has two numbers per element, so it must not follow a real one.
    dtypes = draw(st.sampled_from([COMPLEX, tuple(dtype for dtype in DTYPES if not dtype.is_complex)]))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape[dim] = draw(st.integers(0, 3))
        tensors.append(draw(filled(shape, dtypes)))
    return dim, tensors


def assert_elements(state: Reduction, kind: Kind, dim: int, tensors: list[Tensor]) -> None:
    """Compare each element with the reference: extrema exactly, sums within 1e-14 of the sum of magnitudes.

    That is about fifty float64 rounding errors, more than a sum of nine numbers has.
    """
    samples = [sample for tensor in tensors for sample in tensor.movedim(dim, 0)]
    first = tensors[0].movedim(dim, 0)
    kept = statistic(state)
    assert kept.shape == (*first.shape[1:], *((2,) if first.is_complex() else ()))
    rows = [values_of([sample]) for sample in samples]
    for index, found in enumerate(kept.flatten().tolist()):
        values = [row[index] for row in rows]
        expected = reference(kind, values)
        exact = kind in (BatchMin, BatchMax) or not math.isfinite(expected)
        bound = 0.0 if exact else 1e-14 * math.fsum(map(abs, values))
        assert found == pytest.approx(expected, abs=bound, rel=0, nan_ok=True)


FIRST = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
LAST = torch.tensor([[8.0, 1.0]])


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (BatchMean, "batch_mean", [4.0, 1.0]),
        (BatchSum, "batch_sum", [12.0, 3.0]),
        (BatchMin, "batch_min", [1.0, -2.0]),
        (BatchMax, "batch_max", [8.0, 4.0]),
    ],
)
def test_values_by_hand(kind: Kind, name: str, expected: list[float]) -> None:
    """Every sample has the same weight, so a smaller last batch has less weight."""
    assert computed(lambda: kind(0), FIRST, LAST) == {name: expected}
    assert computed(lambda: kind(1), FIRST.T, LAST.T) == {name: expected}
    assert computed(lambda: kind(-1), FIRST.T, LAST.T) == {name: expected}


@each_kind
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 0), (0, 3)])
def test_the_shape_is_that_of_a_sample(kind: Kind, shape: tuple[int, ...]) -> None:
    """The statistic has the shape of the tensor without the sample dimension."""
    assert statistic(reduced(lambda: kind(0), torch.ones(shape))).shape == shape[1:]
    assert statistic(reduced(lambda: kind(-1), torch.ones(shape))).shape == shape[:-1]


@each_kind
def test_a_number_is_one_sample(kind: Kind) -> None:
    """Each 0-d tensor, such as a loss, is one sample, and the statistic is a number."""
    stream = [torch.tensor(3.0), torch.tensor(-1.0), torch.tensor(4.0)]
    state = reduced(lambda: kind(0), *stream)
    assert statistic(state).shape == ()
    assert float(statistic(state)) == reference(kind, [3.0, -1.0, 4.0])
    # The samples of a vector also have the shape ().
    state.update(torch.tensor([7.0, -2.0]))
    assert float(statistic(state)) == pytest.approx(reference(kind, [3.0, -1.0, 4.0, 7.0, -2.0]), abs=1e-15)


@each_kind
def test_a_complex_number_is_kept_as_two(kind: Kind) -> None:
    """Real and imaginary parts of complex tensors are separate, in a last dimension of size two."""
    found = statistic(reduced(lambda: kind(0), torch.tensor([[1 - 4j], [3 + 2j]])))
    assert found.tolist() == [[reference(kind, [1.0, 3.0]), reference(kind, [-4.0, 2.0])]]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (BatchMean, [NAN, INF, -INF, NAN, 1.5]),
        (BatchSum, [NAN, INF, -INF, NAN, 3.0]),
        (BatchMin, [NAN, 1.0, -INF, -INF, 1.0]),
        (BatchMax, [NAN, INF, 1.0, INF, 2.0]),
    ],
)
def test_what_is_not_finite_stays_in_its_element(kind: Kind, expected: list[float]) -> None:
    """A NaN makes its own element NaN, as do infinities of both signs for a sum; other elements are not affected."""
    stream = [torch.tensor([[NAN, INF, -INF, INF, 1.0]]), torch.tensor([[1.0, 1.0, 1.0, -INF, 2.0]])]
    for order in (stream, stream[::-1]):
        np.testing.assert_array_equal(statistic(reduced(lambda: kind(0), *order)), expected)
        singles = [reduced(lambda: kind(0), tensor) for tensor in order]
        np.testing.assert_array_equal(statistic(merged(lambda: kind(0), *singles)), expected)


@each_kind
@settings(max_examples=60)
@given(sample_streams())
def test_any_stream_agrees_with_python_element_by_element(kind: Kind, drawn: tuple[int, list[Tensor]]) -> None:
    """For every type, dimension and split each element covers all its samples."""
    dim, tensors = drawn
    assert_elements(reduced(lambda: kind(dim), *tensors), kind, dim, tensors)
    parts = [reduced(lambda: kind(dim), tensor) for tensor in reversed(tensors)]
    assert_elements(merged(lambda: kind(dim), *parts), kind, dim, tensors)


def test_half_precision_is_summed_in_float64() -> None:
    """A thousand half-precision samples of 65504 and one of 1 have the sum 65504001, which float32 cannot represent."""
    stream = [torch.full((1000, 1), 65504.0, dtype=torch.float16), torch.ones(1, 1, dtype=torch.float16)]
    assert computed(BatchSum, *stream) == {"batch_sum": [65504001.0]}


# Empty streams


@each_kind
def test_a_stream_without_a_sample_is_nan(kind: Kind) -> None:
    """Batches without a sample determine the shape and give NaN for each element."""
    np.testing.assert_array_equal(statistic(reduced(lambda: kind(0), torch.zeros(0, 2))), [NAN, NAN])
    state = reduced(lambda: kind(0), FIRST)
    state.reset()
    np.testing.assert_array_equal(statistic(state), [NAN, NAN])


@each_kind
def test_before_the_first_tensor_there_is_no_number(kind: Kind) -> None:
    """Before the first tensor, which determines the shape, the statistic is NaN."""
    assert statistic(kind(0)).isnan().all()


@each_kind
def test_asking_before_the_first_tensor_changes_nothing(kind: Kind) -> None:
    """A state that was read, reset and saved before the first tensor behaves like a fresh one."""
    state = kind(0)
    state.reset()
    assert state.state_dict() == {}
    assert state.state.shape == (0,)
    state.update(FIRST)
    assert bits(state.state) == bits(reduced(lambda: kind(0), FIRST).state)


@each_kind
def test_merging_with_an_object_that_has_seen_nothing(kind: Kind) -> None:
    """An empty reduction takes over the shape and state of another; merging it into another changes nothing."""
    whole = reduced(lambda: kind(0), FIRST, LAST)
    fresh = kind(0)
    fresh.merge(whole)
    assert bits(fresh.state) == bits(whole.state)
    fresh.update(LAST)  # in its own memory
    assert bits(whole.state) == bits(reduced(lambda: kind(0), FIRST, LAST).state)
    before = bits(fresh.state)
    fresh.merge(kind(0))
    assert bits(fresh.state) == before


@each_kind
@pytest.mark.parametrize("seen", ["both", "this", "other"])
def test_another_dimension_is_not_merged(kind: Kind, seen: str) -> None:
    """Streams with different sample dimensions cannot be merged, even if one of them is empty."""
    one, other = kind(0), kind(1)
    if seen != "other":
        one.update(torch.ones(2, 2))
    if seen != "this":
        other.update(torch.ones(2, 2))
    with pytest.raises(ArgumentError, match="cannot be merged"):
        one.merge(other)


# Shapes


@each_kind
def test_a_sample_of_another_shape_is_refused(kind: Kind) -> None:
    """The first tensor determines the shape of a sample; another shape is rejected and changes nothing."""
    state = reduced(lambda: kind(0), FIRST)
    before = bits(state.state)
    with pytest.raises(ArgumentError, match=r"has numbers of shape \(2,\), but the new shape is \(3,\)$"):
        state.update(torch.ones(2, 3))
    with pytest.raises(ArgumentError, match=r"has numbers of shape \(2,\), but the new shape is \(2, 1\)$"):
        state.update(torch.ones(2, 2, 1))
    assert bits(state.state) == before


@each_kind
def test_states_of_another_shape_are_not_merged(kind: Kind) -> None:
    """States of samples with different shapes cannot be merged."""
    one, other = reduced(lambda: kind(0), torch.ones(2, 2)), reduced(lambda: kind(0), torch.ones(2, 3))
    with pytest.raises(ArgumentError, match="cannot be merged"):
        one.merge(other)


@each_kind
def test_a_missing_dimension_is_refused(kind: Kind) -> None:
    """A tensor without the sample dimension is rejected with an error that names its shape."""
    with pytest.raises(ArgumentError, match=r"^a tensor of shape \(3,\) has no dimension 1; choose another dim$"):
        kind(1).update(torch.ones(3))


# Life cycle


@each_kind
def test_a_state_dict_continues_the_stream(kind: Kind) -> None:
    """A state loaded into a fresh or used object continues bitwise identically."""
    saved = reduced(lambda: kind(0), FIRST).state_dict()
    expected = reduced(lambda: kind(0), FIRST, LAST)
    for restored in (kind(0), reduced(lambda: kind(0), LAST)):
        restored.load_state_dict(saved)
        restored.update(LAST)
        assert bits(restored.state) == bits(expected.state)
        assert_equal(statistic(restored), statistic(expected))


@each_kind
def test_a_state_dict_of_another_shape_is_refused(kind: Kind) -> None:
    """A saved state of samples with another shape is rejected, and the state does not change."""
    state = reduced(lambda: kind(0), FIRST)
    before = bits(state.state)
    with pytest.raises(ArgumentError, match=r"has numbers of shape \(2,\), but the saved ones have \(3,\)$"):
        state.load_state_dict(reduced(lambda: kind(0), torch.ones(1, 3)).state_dict())
    assert bits(state.state) == before


@each_kind
def test_the_state_dict_of_an_empty_stream_empties(kind: Kind) -> None:
    """Loading the state dict of an empty stream discards earlier data."""
    state = reduced(lambda: kind(0), FIRST)
    state.load_state_dict(kind(0).state_dict())
    state.update(LAST)
    assert bits(state.state) == bits(reduced(lambda: kind(0), LAST).state)


@each_kind
def test_the_initial_state_is_neutral(kind: Kind) -> None:
    """Merging with an empty state from either side changes no bit."""
    assert_neutral(lambda: kind(0), FIRST, LAST)
    assert_neutral(lambda: kind(0), torch.tensor([[NAN, INF, -INF]]))


@each_kind
def test_rows_are_merged_and_summarized_together_as_one_by_one(kind: Kind) -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    assert_rows_agree(lambda: kind(0), [[FIRST], [torch.zeros(0, 2)], [torch.tensor([[NAN, 1.0]])], [LAST, FIRST]])


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(kind: Kind, dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    tensors = [torch.arange(12).reshape(3, 4).to(dtype), torch.zeros(0, 4).to(dtype), torch.ones(1, 4).to(dtype)]
    assert_nothing_waits(lambda: kind(0), *tensors)

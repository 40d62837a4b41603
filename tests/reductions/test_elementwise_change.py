"""Tests of the comparison of each tensor with the previous one."""

from __future__ import annotations

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import Change, Reduction, StateBank, Values
from tests.reductions.laws import (
    assert_neutral,
    assert_nothing_waits,
    assert_rows_agree,
    bits,
    filled,
    merged,
    reduced,
)
from tests.reductions.reference import values_of
from tests.reductions.strategies import COMPLEX, DTYPES

INF, NAN = math.inf, math.nan
EAST, NORTH, WEST, NONE = (torch.tensor(pair) for pair in ([1.0, 0.0], [0.0, 2.0], [-3.0, 0.0], [0.0, 0.0]))


def pair_of(previous: Tensor, tensor: Tensor) -> tuple[float, float] | None:
    """Return the cosine and the ratio of norms of two neighbors, or None if a norm is zero."""
    p, x = (np.nan_to_num(np.array(values_of([each]), float), nan=0, posinf=0, neginf=0) for each in (previous, tensor))
    norms = np.sqrt(np.sum(p * p)), np.sqrt(np.sum(x * x))
    return None if 0 in norms else (float(np.sum(p * x) / norms[0] / norms[1]), float(norms[1] / norms[0]))


def assert_pairs(state: Reduction, pairs: list[tuple[float, float] | None]) -> None:
    """Compare the means with those of the pairs, within 1e-13 of the largest summand (about 1000 roundings)."""
    there = [pair for pair in pairs if pair is not None]
    assert float(state.state[0]) == len(there)
    found = {name: float(value) for name, value in state.compute().items()}
    cosines, ratios = ([pair[index] for pair in there] for index in (0, 1))
    expected = [math.fsum(each) / len(each) if each else NAN for each in (cosines, ratios)]
    assert found["cosine_to_previous"] == pytest.approx(expected[0], abs=1e-13, nan_ok=True)
    assert found["ratio_to_previous"] == pytest.approx(expected[1], rel=1e-13, nan_ok=True)


def change(*stream: Tensor) -> list[float]:
    """Return the mean cosine and mean ratio of a stream."""
    return [float(value) for value in reduced(Change, *stream).compute().values()]


@pytest.mark.parametrize(
    ("stream", "cosine", "ratio"),
    [
        ([EAST, EAST], 1.0, 1.0),
        ([EAST, WEST], -1.0, 3.0),
        ([WEST, EAST], -1.0, 1 / 3),
        ([EAST, NORTH], 0.0, 2.0),
        ([EAST, EAST, WEST, NORTH], 0.0, (1 + 3 + 2 / 3) / 3),
        ([torch.tensor([[3.0], [4.0]]), torch.tensor([[4.0], [3.0]])], 24 / 25, 1.0),
        ([torch.tensor([3 + 4j]), torch.tensor([4 + 3j])], 24 / 25, 1.0),
        ([torch.tensor([3, 4]), torch.tensor([-3, -4])], -1.0, 1.0),
        ([torch.tensor([NAN, 1.0]), torch.tensor([INF, 2.0])], 1.0, 2.0),
        ([EAST, NONE, WEST, EAST], -1.0, 1 / 3),
        ([EAST, NONE], NAN, NAN),
        ([NONE, EAST], NAN, NAN),
        ([EAST, torch.tensor([NAN, INF])], NAN, NAN),
        ([EAST], NAN, NAN),
        ([torch.zeros(0), torch.zeros(0)], NAN, NAN),
    ],
)
def test_values_by_hand(stream: list[Tensor], cosine: float, ratio: float) -> None:
    """Each tensor is compared with the previous one; pairs with a zero norm are ignored, and no pairs give NaN."""
    found = change(*stream)
    assert found == [pytest.approx(cosine, abs=1e-15, nan_ok=True), pytest.approx(ratio, rel=1e-15, nan_ok=True)]


def test_numbers_have_a_change() -> None:
    """For 0-d tensors the cosine is the sign change, and the ratio is that of the magnitudes."""
    assert change(torch.tensor(2.0), torch.tensor(-3.0), torch.tensor(-6.0)) == [0.0, 1.75]


def test_it_is_ordered() -> None:
    """The reduction declares that it is ordered."""
    assert Change().ordered is True


@st.composite
def ordered_streams(draw: st.DrawFn) -> list[Tensor]:
    """Draw tensors of one shape and several types."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=2))
    dtypes = draw(st.sampled_from([COMPLEX, tuple(dtype for dtype in DTYPES if not dtype.is_complex)]))
    return draw(st.lists(filled(shape, dtypes), min_size=1, max_size=6))


@settings(max_examples=100)
@given(ordered_streams())
def test_any_stream_agrees_with_all_pairs(stream: list[Tensor]) -> None:
    """For every type and shape the statistics are the means over all consecutive pairs."""
    assert_pairs(reduced(Change, *stream), [pair_of(*pair) for pair in pairwise(stream)])


@settings(max_examples=60)
@given(ordered_streams())
def test_a_cosine_is_a_cosine(stream: list[Tensor]) -> None:
    """The mean cosine does not exceed 1, except for rounding."""
    cosine = change(*stream)[0]
    assert math.isnan(cosine) or abs(cosine) <= 1 + 4 * 2.0**-52


# Order


@settings(max_examples=100)
@given(ordered_streams(), st.data())
def test_merging_in_order_counts_every_pair(stream: list[Tensor], data: st.DataObject) -> None:
    """Any split of a stream that is merged in order, with any grouping, has the same pairs."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), min_size=2, max_size=2)))
    parts = [stream[: cuts[0]], stream[cuts[0] : cuts[1]], stream[cuts[1] :]]
    a, b, c = (reduced(Change, *part) for part in parts)
    pairs = [pair_of(*pair) for pair in pairwise(stream)]
    for state in (merged(Change, a, b, c), merged(Change, a, merged(Change, b, c))):
        assert_pairs(state, pairs)
        # The number of updates and the first and last tensor are the same for any grouping.
        assert state.state[3:].tolist() == reduced(Change, *stream).state[3:].tolist()


def test_the_order_of_merges_matters() -> None:
    """In a.merge(b) the last tensor of a and the first tensor of b form a pair."""
    a, b = reduced(Change, EAST), reduced(Change, WEST)
    assert float(merged(Change, a, b).compute()["ratio_to_previous"]) == 3.0
    assert float(merged(Change, b, a).compute()["ratio_to_previous"]) == 1 / 3


# Ranks


@settings(max_examples=60)
@given(ordered_streams(), st.data())
def test_there_is_no_pair_between_ranks(stream: list[Tensor], data: st.DataObject) -> None:
    """The pairs of all ranks count, and the next tensor is compared with the last one of the first rank."""
    cut = data.draw(st.integers(1, len(stream)))
    first, second = stream[:cut], stream[cut:]
    state = reduced(Change, *first)
    other = reduced(Change, *second).state if second else state.initial()
    for empty in (state.initial(), other):
        state.merge_ranks(state.state, empty)
    pairs = [pair_of(*pair) for rank in (first, second) for pair in pairwise(rank)]
    assert_pairs(state, pairs)
    state.update(stream[0])
    assert_pairs(state, [*pairs, pair_of(first[-1], stream[0])])


def test_a_rank_without_a_tensor_has_that_of_another() -> None:
    """Merging a rank into one without a tensor gives its state, with a carried tensor or without."""
    for state in (reduced(Change, EAST, WEST), *restarted([EAST, WEST], [False, True])):
        empty = state.initial()
        state.merge_ranks(empty, state.state)
        assert bits(empty) == bits(state.state)


# Restarts


def test_a_restart_by_hand() -> None:
    """After a restart the last tensor is the predecessor of the next one, and earlier pairs are not counted again."""
    state = reduced(Change, EAST, WEST)
    state.restart(state.state)
    assert [math.isnan(float(value)) for value in state.compute().values()] == [True, True]
    state.update(NORTH)
    assert [float(value) for value in state.compute().values()] == [0.0, 2 / 3]


def test_a_restart_before_the_first_tensor_carries_nothing() -> None:
    """A restart does not change an empty row."""
    state = reduced(Change, EAST)
    state.reset()
    state.restart(state.state)
    assert state.state.tolist() == [0.0] * 9
    state.update(EAST)
    assert state.state[0] == 0.0


def test_a_reset_carries_nothing() -> None:
    """After a reset the next tensor is the first."""
    state = reduced(Change, EAST, WEST)
    state.reset()
    state.update(NORTH)
    assert state.state[0] == 0.0


def restarted(stream: list[Tensor], marks: list[bool]) -> list[Reduction]:
    """Return the states at each restart, which follows the marked tensors, and at the end."""
    found, state = [], Change()
    for tensor, mark in zip(stream, marks, strict=True):
        state.update(tensor)
        if mark:
            found.append(state.on(state.state.clone()))
            state.restart(state.state)
    return [*found, state]


@settings(max_examples=100)
@given(ordered_streams(), st.data())
def test_restarts_lose_no_pair_and_count_none_twice(stream: list[Tensor], data: st.DataObject) -> None:
    """Each result has the pairs that were completed since the last one, and merging them gives each pair once."""
    marks = data.draw(st.lists(st.booleans(), min_size=len(stream), max_size=len(stream)))
    states = restarted(stream, marks)
    pairs: list[list[tuple[float, float] | None]] = [[]]
    for index, mark in enumerate(marks):
        if index:
            pairs[-1].append(pair_of(stream[index - 1], stream[index]))
        if mark:
            pairs.append([])
    for state, expected in zip(states, pairs, strict=True):
        assert_pairs(state, expected)
    everything = [pair for part in pairs for pair in part]
    assert_pairs(merged(Change, *states), everything)
    backwards = states[-1]
    for state in reversed(states[:-1]):
        backwards = merged(Change, state, backwards)
    assert_pairs(backwards, everything)


def test_restarts_one_after_the_other_carry_the_same() -> None:
    """A result without a tensor between two others does not lose the carried tensor."""
    state = reduced(Change, EAST)
    state.restart(state.state)
    state.restart(state.state)
    state.update(WEST)
    assert [float(value) for value in state.compute().values()] == [-1.0, 3.0]


def test_a_bank_carries_the_last_tensor_of_each_key() -> None:
    """When a bank starts a new stream, each key continues from its own last tensor, if it has one."""
    bank: StateBank[str] = StateBank(Change())
    for key, tensor in (("a", EAST), ("b", NORTH)):
        bank.add(key, Values(tensor))
    bank.reset()
    for key, tensor in (("a", WEST), ("b", NORTH), ("c", EAST)):
        bank.add(key, Values(tensor))
    (collected,) = bank.collect()
    ratios = collected.reduction.summarize(collected.states)["ratio_to_previous"]
    assert collected.keys == ["a", "b", "c"]
    np.testing.assert_array_equal(ratios, [3.0, 1.0, NAN])


def test_rows_are_restarted_together_as_one_by_one() -> None:
    """Restarting a block of states gives the same result as row by row."""
    rows = [reduced(Change, *stream) for stream in ([EAST], [EAST, WEST], [NONE, NORTH])]
    block = torch.stack([*(row.state for row in rows), rows[0].initial()])
    one_by_one = block.clone()
    rows[0].restart(block)
    for row in one_by_one:
        rows[0].restart(row)
    assert bits(block) == bits(one_by_one)


# Shapes


def test_another_shape_is_refused() -> None:
    """The first tensor determines the shape; a tensor of another shape is rejected and changes nothing."""
    state = reduced(Change, torch.ones(2, 3))
    before = bits(state.state)
    with pytest.raises(ArgumentError, match=r"^Change has numbers of shape \(2, 3\), but the new shape is \(3, 2\)$"):
        state.update(torch.ones(3, 2))
    assert bits(state.state) == before


def test_the_size_is_that_of_two_tensors() -> None:
    """The state takes 16 bytes per element plus 40 bytes."""
    assert reduced(Change, torch.ones(2, 3)).nbytes == 136


# Life cycle


def test_a_state_dict_continues_the_stream() -> None:
    """A state loaded into a fresh object continues bitwise identically, including the carried tensor."""
    state = reduced(Change, EAST, WEST)
    state.restart(state.state)
    restored = Change()
    restored.load_state_dict(state.state_dict())
    for each in (state, restored):
        each.update(NORTH)
    assert bits(restored.state) == bits(state.state)


def test_before_the_second_tensor_there_is_no_number() -> None:
    """The statistics are NaN before and after the first tensor."""
    state = Change()
    for tensor in (EAST, NONE):
        assert [bool(value.isnan().all()) for value in state.compute().values()] == [True, True]
        state.update(tensor)


@settings(max_examples=60)
@given(ordered_streams())
def test_the_initial_state_is_neutral(stream: list[Tensor]) -> None:
    """Merging with an empty state from either side changes no bit."""
    assert_neutral(Change, *stream)


def test_rows_are_merged_and_summarized_together_as_one_by_one() -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    ends = (EAST, NONE, WEST)
    assert_rows_agree(Change, [[EAST], *([one, other] for one, other in product(ends, ends)), [NORTH, EAST, NORTH]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert_nothing_waits(Change, tensor, tensor)

"""Tests of the random sample."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import Reservoir
from tests.reductions.laws import assert_neutral, assert_nothing_waits, assert_rows_agree, bits, merged, reduced
from tests.reductions.reference import values_of
from tests.reductions.strategies import DTYPES, streams

NAN = math.nan


def sample(size: int, seed: int, *stream: Tensor) -> list[float]:
    """Return the sample of a stream."""
    found: list[float] = reduced(lambda: Reservoir(size, seed), *stream).compute()["sample"].tolist()
    return found


def as_bits(values: list[float]) -> Counter[str]:
    """Count the values by their bits; all NaN are equal, and zeros of both signs differ."""
    return Counter(map(repr, values))


# Contents


def test_a_short_stream_is_kept_whole() -> None:
    """All five values of a stream are in a sample of eight, and the last three places are NaN."""
    found = sample(8, 0, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor(5.0))
    assert sorted(found[:5]) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [math.isnan(value) for value in found[5:]] == [True, True, True]


def test_an_empty_stream_has_no_values() -> None:
    """All places are NaN for an empty stream."""
    for stream in ([], [torch.zeros(0)], [torch.zeros(0, 3), torch.zeros(2, 0)]):
        np.testing.assert_array_equal(sample(3, 0, *stream), [NAN] * 3)


def test_the_default_size() -> None:
    """By default the sample has 256 values and takes 4104 bytes."""
    assert Reservoir().compute()["sample"].shape == (256,)
    assert Reservoir().nbytes == 4104


@settings(max_examples=100)
@given(streams, st.integers(0, 3))
def test_each_value_of_a_short_stream_is_there_once(stream: list[Tensor], seed: int) -> None:
    """For every type, shape and split a sample that is large enough has exactly the values of the stream."""
    values = values_of(stream)
    found = sample(2048, seed, *stream)
    assert as_bits(found[: len(values)]) == as_bits(values)
    assert as_bits(found[len(values) :]) == as_bits([NAN] * (2048 - len(values)))


@settings(max_examples=100)
@given(streams, st.integers(1, 12), st.integers(0, 3))
def test_no_value_is_there_more_often_than_in_the_stream(stream: list[Tensor], size: int, seed: int) -> None:
    """A sample is full as soon as there are enough values, and each place has a distinct value of the stream."""
    values = values_of(stream)
    state = reduced(lambda: Reservoir(size, seed), *stream)
    taken = min(size, len(values))
    keys, places = state.state[1 : 1 + size], state.state[1 + size :].tolist()
    assert state.state[0] == len(values)
    assert keys.isfinite().tolist() == [True] * taken + [False] * (size - taken)
    assert keys.tolist() == sorted(keys.tolist())
    assert as_bits(places[:taken]) <= as_bits(values)


def test_values_that_are_not_finite_are_values() -> None:
    """NaN and infinities of the stream are sampled like other values."""
    found = sample(3, 0, torch.tensor([math.inf, NAN, -math.inf]))
    assert as_bits(found) == as_bits([math.inf, NAN, -math.inf])


# Reproducibility


def test_a_run_repeats_itself() -> None:
    """Two samples with the same seed are bitwise equal, and one with another seed has other values."""
    stream = [torch.arange(1000.0), torch.arange(1000.0, 1500.0)]
    first, second, other = (reduced(partial(Reservoir, 16, seed), *stream) for seed in (5, 5, 6))
    assert bits(first.state) == bits(second.state)
    assert set(first.state[17:].tolist()) != set(other.state[17:].tolist())


def test_the_random_numbers_of_torch_are_unchanged() -> None:
    """Updating, merging and computing draw no random number from torch and do not depend on its seed."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    state = reduced(lambda: Reservoir(16), torch.arange(1000.0))
    merged(lambda: Reservoir(16), state, state).compute()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert bits(reduced(lambda: Reservoir(16), torch.arange(1000.0)).state) == bits(state.state)


def test_batches_choose_different_places() -> None:
    """Equal batches do not always contribute the value at the same place."""
    stream = [torch.arange(64.0)] * 8
    assert len(set(sample(64, 0, *stream))) > 32


# Merging


def part(seed: int, start: int, count: int, size: int = 8) -> Reservoir:
    """Return a sample of consecutive numbers with its own seed."""
    state = Reservoir(size, seed)
    state.update(torch.arange(start, start + count))
    return state


def test_a_merge_has_the_values_of_both() -> None:
    """Merging two short streams in either order gives all of their values and the same state."""
    one, other = part(1, 0, 3), part(2, 10, 4)
    both = merged(lambda: Reservoir(8), one, other)
    assert sorted(both.compute()["sample"][:7].tolist()) == [0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 13.0]
    assert both.state[0] == 7.0
    assert bits(merged(lambda: Reservoir(8), other, one).state) == bits(both.state)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=3), st.integers(1, 10))
def test_merging_is_associative_and_commutative(counts: list[int], size: int) -> None:
    """The order and the grouping of merges of samples with different seeds change no bit."""
    a, b, c = (part(seed, 100 * seed, count, size) for seed, count in enumerate(counts))

    def make() -> Reservoir:
        return Reservoir(size)

    left = merged(make, merged(make, a, b), c)
    assert bits(left.state) == bits(merged(make, a, merged(make, b, c)).state)
    assert bits(left.state) == bits(merged(make, c, a, b).state)
    assert bits(left.state) == bits(merged(make, b, c, a).state)


def test_another_size_is_not_merged_but_another_seed_is() -> None:
    """Samples of different sizes cannot be merged, but different seeds can and should be."""
    with pytest.raises(ArgumentError, match=r"^Reservoir\(size=8\) cannot be merged with Reservoir\(size=9\)"):
        Reservoir(8).merge(Reservoir(9))
    state = Reservoir(8, seed=1)
    state.merge(Reservoir(8, seed=2))
    assert state.seed == 1


# Equal probability


def assert_uniform(counts: Tensor, draws: int, size: int) -> None:
    """Assert that each value was sampled equally often, within five standard deviations."""
    share = size / len(counts)
    deviation = math.sqrt(draws * share * (1 - share))
    assert counts.sum() == draws * size
    assert float((counts - draws * share).abs().max()) <= 5 * deviation


def inclusions(lengths: list[int], size: int, seeds: range, merge: bool) -> Tensor:
    """Count how often each number of a stream of tensors was sampled, with one draw per seed."""
    total = sum(lengths)
    tensors = torch.arange(total).split(lengths)
    counts = torch.zeros(total)
    for seed in seeds:
        if merge:
            states = [
                reduced(partial(Reservoir, size, seed * len(lengths) + index), tensor)
                for index, tensor in enumerate(tensors)
            ]
            state = merged(partial(Reservoir, size), *states)
        else:
            state = reduced(partial(Reservoir, size, seed), *tensors)
        counts[state.compute()["sample"].long()] += 1
    return counts


SEEDS = range(400)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "lengths",
    [[64], [16] * 4, [1] * 12, [12], [100], [64, 8], [8, 64], [5, 40, 13]],
    ids=str,
)
def test_each_value_is_there_with_equal_probability(lengths: list[int]) -> None:
    """Over 400 seeds each value is equally often in a sample of 8, for any split of the stream."""
    assert_uniform(inclusions(lengths, 8, SEEDS, merge=False), len(SEEDS), 8)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("lengths", [[64, 64], [16] * 4, [64, 8], [8, 64], [40, 5, 13], [200, 10]], ids=str)
def test_a_merged_sample_is_one_of_the_whole(lengths: list[int]) -> None:
    """Over 400 seeds each value is equally often in a merge of samples of 8, even for streams of different lengths."""
    assert_uniform(inclusions(lengths, 8, SEEDS, merge=True), len(SEEDS), 8)


def test_the_places_of_a_sample_are_in_random_order() -> None:
    """Over 400 seeds the first place has each of eight values equally often."""
    counts = torch.zeros(8)
    for seed in SEEDS:
        counts[int(sample(8, seed, torch.arange(8.0))[0])] += 1
    assert_uniform(counts, len(SEEDS), 1)


# Life cycle


def test_a_state_dict_continues_the_stream() -> None:
    """A state loaded into a fresh object with the same seed continues bitwise identically."""
    first, second = torch.arange(100.0), torch.arange(100.0, 130.0)
    restored = Reservoir(8, seed=3)
    restored.load_state_dict(reduced(lambda: Reservoir(8, seed=3), first).state_dict())
    restored.update(second)
    assert bits(restored.state) == bits(reduced(lambda: Reservoir(8, seed=3), first, second).state)


@pytest.mark.parametrize(
    ("size", "seed", "named"), [(0, 0, "size"), (2.5, 0, "size"), (8, -1, "seed"), (8, "a", "seed")]
)
def test_wrong_arguments_are_refused(size: int, seed: int, named: str) -> None:
    """Sizes below one, negative seeds and values that are not integers are rejected by the constructor."""
    with pytest.raises(ArgumentError, match=rf"^{named} must be an integer of at least [01], got "):
        Reservoir(size, seed)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63, 2**64 + 5])
def test_any_seed_will_do(seed: int) -> None:
    """A seed of more than 64 bits is accepted."""
    assert sorted(sample(4, seed, torch.arange(4.0))) == [0.0, 1.0, 2.0, 3.0]


@settings(max_examples=40)
@given(streams)
def test_the_initial_state_is_neutral(stream: list[Tensor]) -> None:
    """Merging with an empty state from either side changes no bit."""
    assert_neutral(lambda: Reservoir(5), *stream)


def test_rows_are_merged_and_summarized_together_as_one_by_one() -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    rows = [[torch.arange(40.0)], [], [torch.tensor([NAN, 0.5])], [torch.zeros(2), torch.ones(9)]]
    assert_rows_agree(lambda: Reservoir(5), rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    tensors = [torch.arange(12).reshape(3, 4).to(dtype), torch.tensor(1).to(dtype), torch.zeros(0, 2).to(dtype)]
    assert_nothing_waits(lambda: Reservoir(5), *tensors)

"""Tests of several statistics in one row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import (
    BatchMax,
    BatchMean,
    Change,
    ChannelMoments,
    Combined,
    DeadChannels,
    ExponentHistogram,
    Extrema,
    HigherMoments,
    LastValue,
    NearZero,
    Norms,
    Reduction,
    Reservoir,
    RunningMoments,
    Saturation,
    Tallies,
)
from tests.reductions.laws import (
    Make,
    assert_equal,
    assert_neutral,
    assert_nothing_waits,
    assert_rows_agree,
    bits,
    merged,
    reduced,
)
from tests.reductions.reference import Moments, values_of
from tests.reductions.strategies import streams

SCALARS: tuple[Make, ...] = (
    RunningMoments,
    Extrema,
    Tallies,
    Norms,
    HigherMoments,
    lambda: NearZero(0.5),
    lambda: Saturation(2.0),
)
WIDE: tuple[Make, ...] = (lambda: ExponentHistogram(quantiles=[0.25, 0.75]), lambda: Reservoir(8, seed=4))
SIZED: tuple[Make, ...] = (BatchMean, BatchMax, ChannelMoments, DeadChannels, lambda: LastValue(0))
ANY = (*SCALARS, *WIDE)
ALL = (*ANY, *SIZED)


def combined(*makes: Make) -> Callable[[], Combined]:
    """Return a factory of fresh combinations of fresh parts."""
    return lambda: Combined([make() for make in makes])


def rows_of(both: Reduction) -> list[tuple[Reduction, Tensor]]:
    """Return the parts of a combination, each with its part of the state."""
    assert isinstance(both, Combined)
    return list(zip(both.parts, both.state.split([part.width for part in both.parts]), strict=True))


def assert_as_alone(both: Reduction, makes: tuple[Make, ...], *stream: Tensor) -> None:
    """Assert that the words and statistics of each part are bitwise equal to those of the part alone."""
    alone = {make().statistics: reduced(make, *stream) for make in makes}
    assert set(both.statistics) == {name for names in alone for name in names}
    for part, row in rows_of(both):
        assert bits(row) == bits(alone[part.statistics].state)
    found = both.compute()
    assert tuple(found) == both.statistics
    for single in alone.values():
        for name, value in single.compute().items():
            assert_equal(found[name], value)


def test_values_by_hand() -> None:
    """For 3 and -4 the extrema are -4 and 3 and the norms are 4, 7 and 5."""
    found = reduced(combined(Extrema, Norms), torch.tensor([3.0]), torch.tensor([[-4]])).compute()
    names = {name: float(value) for name, value in found.items()}
    assert names == {"min": -4.0, "max": 3.0, "abs_max": 4.0, "l1_norm": 7.0, "l2_norm": 5.0}


# Equal to the parts alone


@settings(max_examples=60)
@given(streams)
def test_the_parts_are_what_they_are_alone(stream: list[Tensor]) -> None:
    """For every type, shape and split each part has bitwise the same state as alone."""
    assert_as_alone(reduced(combined(*ANY), *stream), ANY, *stream)
    assert_as_alone(reduced(combined(*reversed(ANY)), *stream), ANY, *stream)


SAMPLES = (torch.tensor([[1.0, -2.0], [3.0, 0.0]]), torch.tensor([[8.0, float("nan")]]))


@pytest.mark.parametrize("makes", [ALL, tuple(reversed(ALL)), SIZED, WIDE, SCALARS, (*SIZED[:1], *WIDE)])
def test_sized_parts_are_what_they_are_alone(makes: tuple[Make, ...]) -> None:
    """Parts whose width depends on the shape take it from the first tensor, whatever the other parts are."""
    assert (combined(*makes)().width == 0) is any(make in SIZED for make in makes)
    both = reduced(combined(*makes), *SAMPLES)
    assert both.width == sum(reduced(make, *SAMPLES).width for make in makes)
    assert_as_alone(both, makes, *SAMPLES)


@pytest.mark.parametrize("make", ALL)
def test_a_single_part_is_what_it_is_alone(make: Make) -> None:
    """A combination of one reduction is equal to that reduction."""
    assert_as_alone(reduced(combined(make), *SAMPLES), (make,), *SAMPLES)


def test_nested_parts_are_what_they_are_alone() -> None:
    """A combination can be a part of another combination."""
    inner = combined(Norms, BatchMean)
    makes: tuple[Make, ...] = (combined(inner, NearZero), Extrema, combined(LastValue))
    state = reduced(combined(*makes), torch.ones(2, 2), torch.zeros(2, 2))
    found = state.compute()
    for make in (Norms, BatchMean, NearZero, Extrema, LastValue):
        for name, value in reduced(make, torch.ones(2, 2), torch.zeros(2, 2)).compute().items():
            assert_equal(found[name], value)
    assert set(found) == set(state.statistics)


LARGE = torch.randn(3, 250_001, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_large_tensor_gives_what_it_gives_alone(dtype: torch.dtype) -> None:
    """For a tensor that is processed in pieces, counts, extrema and samples are bitwise those of the parts alone."""
    tensor = LARGE.to(dtype)
    makes: tuple[Make, ...] = (Extrema, Tallies, lambda: NearZero(0.5), *WIDE, lambda: ChannelMoments(0), BatchMax)
    assert_as_alone(reduced(combined(*makes), tensor), makes, tensor)
    moments = reduced(combined(RunningMoments, ExponentHistogram), tensor)
    Moments.of(values_of([tensor])).assert_near(moments.compute())


@pytest.mark.parametrize("others", [(), (Extrema,), (Extrema, BatchMean)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_histogram_of_a_sample_counts_no_more_values(others: tuple[Make, ...], dtype: torch.dtype) -> None:
    """A histogram with a sample of 1000 counts every 751st value of a large tensor, as it does alone."""

    def histogram() -> ExponentHistogram:
        return ExponentHistogram(sample=1000)

    tensor = LARGE.to(dtype)
    alone = reduced(histogram, tensor).compute()
    assert float(alone["histogram"].sum()) == 1000.0  # every 751st of 750003
    found = reduced(combined(histogram, *others), tensor).compute()
    assert_equal(found["histogram"], alone["histogram"])
    assert_equal(found["histogram_fraction"], alone["histogram_fraction"])


# Laws


@settings(max_examples=40)
@given(streams, streams)
def test_a_merge_is_that_of_the_parts(first: list[Tensor], second: list[Tensor]) -> None:
    """Merging combinations is bitwise equal to merging each part alone, and an empty combination is neutral."""
    both = merged(combined(*ANY), reduced(combined(*ANY), *first), reduced(combined(*ANY), *second))
    alone = {make().statistics: merged(make, reduced(make, *first), reduced(make, *second)) for make in ANY}
    for part, row in rows_of(both):
        assert bits(row) == bits(alone[part.statistics].state)


def test_the_initial_state_is_neutral() -> None:
    """Merging with an empty state from either side changes no bit."""
    assert_neutral(combined(*ALL), *SAMPLES)


def test_rows_are_merged_and_summarized_together_as_one_by_one() -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    assert_rows_agree(combined(*ALL), [SAMPLES, SAMPLES[1:], [torch.ones(1, 2), *SAMPLES]])


def test_two_collectives_merge_everything() -> None:
    """Summing the additive words of several states and merging the others equals merging the whole states."""
    streams_of_ranks = (SAMPLES, SAMPLES[1:], (torch.ones(1, 2), torch.full((3, 2), 0.25)))
    states = [reduced(combined(*ALL, Tallied), *stream) for stream in streams_of_ranks]
    whole = merged(combined(*ALL, Tallied), *states)
    additive = whole.additive_slots()
    assert (additive.shape, additive.dtype) == ((whole.width,), torch.bool)
    by_sum = torch.stack([state.state for state in states]).sum(0)
    assert_equal(by_sum[additive], whole.state[additive])
    # The additive words may have any value while the others are merged.
    rest = whole.initial()
    for state in states:
        other = torch.where(additive, 7.0, state.state)
        whole.merge_states(rest, other)
    assert bits(rest[~additive]) == bits(whole.state[~additive])


class Tallied(Combined):
    """A nested part with additive and other words and its own statistic names."""

    def __init__(self) -> None:
        super().__init__([Quiet(), Loud()])


class Quiet(Tallies):
    """An additive reduction."""

    statistics = ("quiet",)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"quiet": state[..., 0]}


class Loud(Extrema):
    """A reduction that is not additive."""

    statistics = ("loud",)

    @override
    def summarize(self, state: Tensor) -> dict[str, Tensor]:
        return {"loud": state[..., 0]}


@pytest.mark.parametrize(
    ("make", "additive"),
    [
        (RunningMoments, False),
        (Extrema, False),
        (Tallies, True),
        (Norms, False),
        (HigherMoments, False),
        (NearZero, True),
        (lambda: Saturation(1.0), True),
        (ExponentHistogram, True),
        (lambda: ExponentHistogram(sample=5), True),
        (Reservoir, False),
    ],
)
def test_the_additive_slots_are_those_of_the_parts(make: Make, additive: bool) -> None:
    """Words of a part are additive in a combination exactly if they are additive alone."""
    state = combined(make)() if make in (Extrema, Tallies) else combined(make, Quiet, Loud)()
    expected = {"loud": False, "quiet": True}
    found = {part.statistics: slots for part, slots in zip_words(state)}
    for names, slots in found.items():
        assert slots == [expected.get(names[0], additive)] * len(slots)


def zip_words(state: Combined) -> list[tuple[Reduction, list[bool]]]:
    """Return the parts with the list of their additive words."""
    slots = state.additive_slots().split([part.width for part in state.parts])
    return [(part, each.tolist()) for part, each in zip(state.parts, slots, strict=True)]


def test_a_merge_of_ranks_is_that_of_the_parts() -> None:
    """An ordered part makes no pair of the tensors of two ranks, and the others have the values of both."""
    one, other = (reduced(combined(Extrema, Change), torch.full((2,), value)) for value in (1.0, 3.0))
    one.merge_ranks(one.state, other.state)
    found = {name: float(value) for name, value in one.compute().items()}
    assert (found["min"], found["max"]) == (1.0, 3.0)
    assert math.isnan(found["ratio_to_previous"])


# Restarts


def test_a_restart_is_that_of_the_parts() -> None:
    """After a restart an ordered part carries over the same state as alone, and the others are empty."""
    makes: tuple[Make, ...] = (Extrema, Change, BatchMean)
    state = reduced(combined(*makes), torch.ones(2, 2))
    state.restart(state.state)
    state.update(torch.full((2, 2), 3.0))
    found = state.compute()
    assert float(found["ratio_to_previous"]) == 3.0
    assert [float(found["min"]), float(found["max"])] == [3.0, 3.0]
    assert found["batch_mean"].tolist() == [3.0, 3.0]


def test_a_restart_without_ordered_parts_empties_the_rows() -> None:
    """Without an ordered part the rows of a block are initial after a restart."""
    state = reduced(combined(*ALL[:3], *SIZED[:2]), *SAMPLES)
    block = state.state.repeat(3, 1)
    state.restart(block)
    assert bits(block) == bits(state.initial()) * 3


# Life cycle


@pytest.mark.parametrize("makes", [ANY, ALL])
def test_a_state_dict_continues_the_stream(makes: tuple[Make, ...]) -> None:
    """A state loaded into a fresh combination continues bitwise identically."""
    restored = combined(*makes)()
    restored.load_state_dict(reduced(combined(*makes), SAMPLES[0]).state_dict())
    restored.update(SAMPLES[1])
    assert bits(restored.state) == bits(reduced(combined(*makes), *SAMPLES).state)


def test_merging_with_one_that_has_seen_nothing() -> None:
    """An empty combination with sized parts takes over the other state; merging it into another changes nothing."""
    whole, fresh = reduced(combined(*ALL), *SAMPLES), merged(combined(*ALL))
    fresh.merge(whole)
    assert bits(fresh.state) == bits(whole.state)
    fresh.merge(combined(*ALL)())
    assert bits(fresh.state) == bits(whole.state)


def test_asking_before_the_first_tensor_changes_nothing() -> None:
    """A combination whose state was read before the first tensor behaves like a fresh one."""
    state = combined(Extrema, BatchMean)()
    state.reset()
    assert state.state.shape == (0,)
    state.update(SAMPLES[0])
    assert bits(state.state) == bits(reduced(combined(Extrema, BatchMean), SAMPLES[0]).state)


def test_before_the_first_tensor_there_is_no_number() -> None:
    """Before the first tensor, a combination with sized parts computes the same values as its parts."""
    found = combined(Extrema, BatchMean)().compute()
    assert [bool(found[name].isnan().all()) for name in ("min", "max", "batch_mean")] == [True] * 3


def test_a_refused_tensor_is_refused() -> None:
    """A tensor whose shape a part rejects raises the error of that part."""
    state = reduced(combined(BatchMean, Extrema), SAMPLES[0])
    with pytest.raises(ArgumentError, match=r"^BatchMean has numbers of shape \(2,\), but the new shape is \(3,\)$"):
        state.update(torch.ones(1, 3))


# Rejected arguments


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Extrema(), Extrema()], "two reductions have the statistics 'min', 'max': remove one of them"),
        ([Combined([Norms()]), Norms()], "two reductions have the statistics 'abs_max', 'l1_norm', 'l2_norm'"),
        ([BatchMean(0), BatchMean(1)], "two reductions have the statistics 'batch_mean'"),
        ([], "at least one reduction is needed, got none"),
        ([Extrema], "reductions are instances of Reduction, got the class Extrema: write Extrema()"),
        (Extrema, "reductions are instances of Reduction, got the class Extrema: write Extrema()"),
        ([Extrema(), "mean"], "reductions are instances of Reduction, got 'mean'"),
        (None, "reductions are instances of Reduction, got None"),
    ],
)
def test_wrong_parts_are_refused(parts: Any, message: str) -> None:
    """The constructor rejects an empty list, a part that is not a reduction, and two statistics of the same name."""
    with pytest.raises(ArgumentError, match="^" + re.escape(message)):
        Combined(parts)


def test_other_settings_are_not_merged() -> None:
    """Combinations are merged only if the settings of all parts are equal."""
    one = combined(Extrema, lambda: NearZero(0.5))()
    with pytest.raises(ArgumentError, match="cannot be merged"):
        one.merge(combined(Extrema, lambda: NearZero(0.25))())
    with pytest.raises(ArgumentError, match="cannot be merged"):
        one.merge(combined(Extrema)())
    one.merge(combined(Extrema, lambda: NearZero(0.5))())


def test_it_is_written_as_it_is_made() -> None:
    """The repr of a combination shows its parts with their settings."""
    assert repr(combined(Norms, lambda: NearZero(0.5))()) == "Combined([Norms(), NearZero(threshold=0.5)])"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.complex64], ids=str)
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    tensors = [torch.arange(12).reshape(3, 4).to(dtype), torch.ones(1, 4).to(dtype)]
    assert_nothing_waits(combined(*ALL), *tensors)


def test_a_state_loaded_in_inference_mode_can_be_updated_outside() -> None:
    """A combination with sized parts that was loaded in inference mode can be updated outside it."""
    saved = reduced(combined(BatchMean, Extrema), SAMPLES[0]).state_dict()
    state = combined(BatchMean, Extrema)()
    with torch.inference_mode():
        state.load_state_dict(saved)
    state.update(SAMPLES[0])
    assert state.compute()["max"] == SAMPLES[0].max()

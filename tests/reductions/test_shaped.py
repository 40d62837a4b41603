"""Tests of per-channel statistics."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import ChannelMoments, DeadChannels, Reduction
from tests.reductions.laws import (
    assert_neutral,
    assert_nothing_waits,
    assert_rows_agree,
    bits,
    computed,
    filled,
    merged,
    one_number,
    reduced,
)
from tests.reductions.reference import Moments, values_of
from tests.reductions.strategies import DTYPES

INF, NAN = math.inf, math.nan
KINDS: tuple[Callable[[int], Reduction], ...] = (ChannelMoments, DeadChannels)
each_kind = pytest.mark.parametrize("kind", KINDS)


def channels_of(tensors: list[Tensor], dim: int) -> list[list[float]]:
    """Return the values of each channel over all tensors."""
    return [
        [value for tensor in tensors for value in values_of([tensor.select(dim, channel)])]
        for channel in range(tensors[0].shape[dim])
    ]


@st.composite
def channel_streams(draw: st.DrawFn) -> tuple[int, list[Tensor]]:
    """Draw a dimension and tensors with the same number of channels there and any sizes elsewhere."""
    channels = draw(st.integers(1, 3))
    dim, dims = draw(st.sampled_from([(1, 2), (1, 3), (-1, 2), (-1, 3), (0, 2), (-2, 3), (2, 4)]))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 0]), min_size=dims, max_size=dims))
        shape[dim] = channels
        tensors.append(draw(filled(shape)))
    return dim, tensors


def assert_moments(reduction: Reduction, channels: list[list[float]]) -> None:
    """Compare the moments of each channel with exact sums, within the bounds of ``RunningMoments``."""
    counts = reduction.state.reshape(3, -1)[0]
    mean, std, rms = reduction.compute().values()
    for index, values in enumerate(channels):
        found = {"count": counts[index], "mean": mean[index], "std": std[index], "rms": rms[index]}
        Moments.of(values).assert_near(found)


# Moments


def test_moments_by_hand() -> None:
    """The columns 1, 3 and 2, 2 have means 2 and 2, deviations 1 and 0, and mean squares 5 and 4."""
    found = computed(ChannelMoments, torch.tensor([[1.0, 2.0], [3.0, 2.0]]))
    assert found == {"channel_mean": [2.0, 2.0], "channel_std": [1.0, 0.0], "channel_rms": [math.sqrt(5), 2.0]}


def test_moments_of_images_by_hand() -> None:
    """For images the second dimension is the channel dimension, and each channel covers all pixels and samples."""
    first = torch.tensor([[[[1.0, 1.0]], [[0.0, 4.0]]]])  # one sample, two channels, 1 × 2 pixels
    second = torch.tensor([[[[3.0, 3.0]], [[2.0, 2.0]]]])
    found = computed(ChannelMoments, first, second)
    assert found["channel_mean"] == [2.0, 2.0]
    # torch rounds a root up to one bit differently on some processors.
    assert found["channel_std"] == [1.0, pytest.approx(math.sqrt(2), rel=1e-15)]


def test_moments_of_features_by_hand() -> None:
    """With dim -1 the features of a transformer are the channels, for any leading dimensions."""
    found = computed(lambda: ChannelMoments(-1), torch.tensor([[[0.0, 5.0, -1.0], [2.0, 5.0, 1.0]]]))
    assert found["channel_mean"] == [1.0, 5.0, 0.0]
    assert found["channel_std"] == [1.0, 0.0, 1.0]


def test_a_smaller_batch_weighs_less() -> None:
    """After a batch of three samples of 1 and a batch of one sample of 5 the mean is 2."""
    assert computed(ChannelMoments, torch.ones(3, 1), torch.full((1, 1), 5.0))["channel_mean"] == [2.0]


def test_what_is_not_finite_stays_in_its_channel() -> None:
    """NaN and infinities are ignored in their channel, which is NaN without other values, and affect no other."""
    found = computed(ChannelMoments, torch.tensor([[1.0, NAN, NAN], [INF, 2.0, -INF]]))
    np.testing.assert_array_equal(found["channel_mean"], [1.0, 2.0, NAN])
    np.testing.assert_array_equal(found["channel_std"], [0.0, 0.0, NAN])
    np.testing.assert_array_equal(found["channel_rms"], [1.0, 2.0, NAN])


def test_a_complex_channel_has_both_parts() -> None:
    """Real and imaginary parts belong to the same channel, and dim -1 is the last dimension of the complex tensor."""
    found = computed(lambda: ChannelMoments(-1), torch.tensor([[1 + 3j, 0j]]))
    assert found["channel_mean"] == [2.0, 0.0]
    assert found["channel_std"] == [1.0, 0.0]


@settings(max_examples=100)
@given(channel_streams())
def test_any_stream_agrees_with_exact_sums_of_each_channel(drawn: tuple[int, list[Tensor]]) -> None:
    """For every type, dimension and split the moments of a channel cover all its values."""
    dim, tensors = drawn
    channels = channels_of(tensors, dim)

    def make() -> ChannelMoments:
        return ChannelMoments(dim)

    assert_moments(reduced(make, *tensors), channels)
    assert_moments(merged(make, *(reduced(make, tensor) for tensor in reversed(tensors))), channels)


def test_a_small_spread_beside_a_large_mean_is_kept() -> None:
    """1e4 ± 1e-3 in a hundred batches of doubles has a standard deviation of 1e-3 in each channel, within 1e-9."""
    batches = [torch.tensor([[1e4 - 1e-3, 5.0], [1e4 + 1e-3, 5.0]], dtype=torch.float64)] * 100
    found = computed(ChannelMoments, *batches)
    # The rounding error of 1e4 ± 1e-3 as doubles is 1e-12, a billionth of the deviation.
    assert found["channel_std"] == [pytest.approx(1e-3, rel=1e-9), 0.0]


# Dead channels


@pytest.mark.parametrize(
    ("tensors", "threshold", "expected"),
    [
        ([torch.tensor([[0.0, 1.0, 0.0, -2.0]])], 0.0, 0.5),
        ([torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1e-30]])], 0.0, 0.5),
        ([torch.tensor([[0.0, -0.0, 0.0]])], 0.0, 1.0),
        ([torch.tensor([[0.5, -0.5, 0.75, -0.75]])], 0.5, 0.5),
        ([torch.tensor([[0.0, NAN, INF, -INF]])], 0.0, 0.25),
        ([torch.tensor([[0.0, NAN]]), torch.tensor([[0.0, 0.0]])], 0.0, 0.5),
        ([torch.tensor([[0j, 1j, 0j, 1 + 0j]])], 0.0, 0.5),
        ([torch.tensor([[False, True]])], 0.0, 0.5),
        ([torch.zeros(2, 3, 4)], 0.0, 1.0),
        ([torch.zeros(0, 3)], 0.0, NAN),
        ([torch.zeros(0, 3), torch.zeros(1, 3)], 0.0, 1.0),
    ],
)
def test_dead_channels_by_hand(tensors: list[Tensor], threshold: float, expected: float) -> None:
    """A channel is dead if no magnitude in the stream exceeds the threshold; a channel with a NaN is not dead."""
    found = one_number(reduced(lambda: DeadChannels(threshold=threshold), *tensors))
    assert found == pytest.approx(expected, abs=0, nan_ok=True)


def test_a_channel_that_fires_once_is_not_dead() -> None:
    """A single value in the last of many batches makes a channel alive, also after a merge with dead ones."""
    dead = reduced(DeadChannels, *[torch.zeros(4, 2)] * 5)
    alive = reduced(DeadChannels, torch.tensor([[0.0, 0.1]]), torch.zeros(4, 2))
    assert [one_number(state) for state in (dead, alive, merged(DeadChannels, dead, alive, dead))] == [1.0, 0.5, 0.5]


@settings(max_examples=100)
@given(channel_streams(), st.sampled_from([0.0, 2.0**-24, 0.1, 1.0, 50.0]))
def test_any_stream_agrees_with_a_count_channel_by_channel(drawn: tuple[int, list[Tensor]], threshold: float) -> None:
    """For every type, dimension and split the fraction counts the channels without a value above the threshold."""
    dim, tensors = drawn
    channels = channels_of(tensors, dim)
    dead = sum(bool(values) and all(abs(value) <= threshold for value in values) for values in channels)

    def make() -> DeadChannels:
        return DeadChannels(dim, threshold)

    expected = dead / len(channels) if channels[0] else NAN
    for state in (reduced(make, *tensors), merged(make, *(reduced(make, tensor) for tensor in reversed(tensors)))):
        np.testing.assert_array_equal(one_number(state), expected)


@pytest.mark.parametrize("threshold", [-1.0, NAN, "0"])
def test_a_threshold_that_is_no_magnitude_is_refused(threshold: float) -> None:
    """A threshold that is negative, NaN or not a number is rejected by the constructor."""
    with pytest.raises(ArgumentError, match=r"^threshold must be a number of at least 0, got "):
        DeadChannels(threshold=threshold)


# Shapes


@each_kind
@pytest.mark.parametrize(("dim", "shape"), [(1, (3,)), (1, ()), (-1, ()), (-3, (2, 3)), (2, (2, 3))])
def test_a_missing_dimension_is_refused(kind: Callable[[int], Reduction], dim: int, shape: tuple[int, ...]) -> None:
    """A tensor without the channel dimension is rejected with an error that names its shape."""
    named = rf"^a tensor of shape \({', '.join(map(str, shape))},?\) has no dimension {dim}"
    with pytest.raises(ArgumentError, match=named):
        kind(dim).update(torch.ones(shape))


@each_kind
def test_another_number_of_channels_is_refused(kind: Callable[[int], Reduction]) -> None:
    """The first tensor determines the number of channels; another number is rejected and changes nothing."""
    state = reduced(lambda: kind(1), torch.ones(2, 3))
    before = bits(state.state)
    with pytest.raises(ArgumentError, match=r"has numbers of shape \(3,\), but the new shape is \(4,\)$"):
        state.update(torch.ones(2, 4))
    assert bits(state.state) == before


@pytest.mark.parametrize("dim", [0, -1])
def test_a_vector_has_one_value_in_each_channel(dim: int) -> None:
    """Each element of a vector, such as the gradient of a bias, is a channel."""
    vectors = [torch.tensor([0.0, 2.0]), torch.tensor([0.0, 4.0])]
    assert computed(lambda: ChannelMoments(dim), *vectors)["channel_mean"] == [0.0, 3.0]
    assert one_number(reduced(lambda: DeadChannels(dim), *vectors)) == 0.5


def test_a_tensor_without_channels_has_no_statistics() -> None:
    """For a tensor without channels the moments are empty and the dead fraction is NaN."""
    assert computed(ChannelMoments, torch.zeros(2, 0)) == {"channel_mean": [], "channel_std": [], "channel_rms": []}
    assert math.isnan(one_number(reduced(DeadChannels, torch.zeros(2, 0))))


def test_the_size_is_that_of_the_channels() -> None:
    """Moments take 24 bytes per channel and dead channels 8, from the first tensor on."""
    assert reduced(ChannelMoments, torch.ones(2, 5)).nbytes == 120
    assert reduced(DeadChannels, torch.ones(2, 5)).nbytes == 40
    assert [ChannelMoments().nbytes, DeadChannels().nbytes] == [0, 0]


# Laws


@settings(max_examples=40)
@given(channel_streams())
def test_the_initial_state_is_neutral(drawn: tuple[int, list[Tensor]]) -> None:
    """Merging with an empty state from either side changes no bit."""
    dim, tensors = drawn
    for kind in KINDS:
        assert_neutral(partial(kind, dim), *tensors)


@each_kind
def test_rows_are_merged_and_summarized_together_as_one_by_one(kind: Callable[[int], Reduction]) -> None:
    """Merging and summarizing a block of states gives the same results as row by row."""
    rows = [
        [torch.arange(6.0).reshape(2, 3)],
        [torch.zeros(0, 3)],
        [torch.tensor([[NAN, 1.0, 0.0]])],
        [torch.zeros(2, 3), torch.ones(1, 3)],
    ]
    assert_rows_agree(lambda: kind(1), rows)


@each_kind
def test_a_state_dict_continues_the_stream(kind: Callable[[int], Reduction]) -> None:
    """A state loaded into a fresh object continues bitwise identically."""
    first, second = torch.arange(6.0).reshape(2, 3), torch.tensor([[7.0, NAN, 0.0]])
    restored = kind(1)
    restored.load_state_dict(reduced(lambda: kind(1), first).state_dict())
    restored.update(second)
    assert bits(restored.state) == bits(reduced(lambda: kind(1), first, second).state)


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_waits_for_the_device(kind: Callable[[int], Reduction], dtype: torch.dtype) -> None:
    """A whole life cycle runs on meta tensors and reads no number elsewhere."""
    tensors = [torch.arange(12).reshape(3, 4).to(dtype), torch.zeros(0, 4).to(dtype), torch.ones(1, 4, 2).to(dtype)]
    assert_nothing_waits(lambda: kind(1), *tensors)

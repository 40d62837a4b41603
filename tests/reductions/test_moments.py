"""Tests of count, mean and variance."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_recorder.errors import ArgumentError
from lightning_recorder.reductions import RunningMoments
from tests.reductions.reference import Moments, values_of
from tests.reductions.strategies import streams


def summary(*tensors: Tensor) -> dict[str, float]:
    """Return the statistics of a stream as numbers."""
    moments = RunningMoments()
    for tensor in tensors:
        moments.update(tensor)
    return {name: float(value) for name, value in moments.compute().items()}


def test_values_by_hand() -> None:
    """For 1, 2, 3 and 6 the mean is 3, the population variance 3.5 and the mean square 12.5."""
    assert summary(torch.tensor([1.0, 2.0]), torch.tensor([[3.0], [6.0]])) == {
        "count": 4.0,
        "sum": 12.0,
        "mean": 3.0,
        "variance": 3.5,
        "std": math.sqrt(3.5),
        "rms": math.sqrt(12.5),
    }


def test_one_value_has_no_spread() -> None:
    """The deviation of a single value is zero, not NaN, because the default correction is 0."""
    found = summary(torch.tensor(-5.0))
    assert found == {"count": 1.0, "sum": -5.0, "mean": -5.0, "variance": 0.0, "std": 0.0, "rms": 5.0}


def test_the_correction_is_taken_from_the_count() -> None:
    """A correction of 1 gives the sample variance, NaN for a single value, and does not change the rms."""
    moments = RunningMoments(correction=1)
    moments.update(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    found = {name: float(value) for name, value in moments.compute().items()}
    assert (found["variance"], found["std"]) == (14 / 3, math.sqrt(14 / 3))
    assert found["rms"] == math.sqrt(12.5)
    moments.reset()
    moments.update(torch.tensor(5.0))
    assert math.isnan(moments.compute()["variance"])


@pytest.mark.parametrize("correction", [-1, 0.5, True, "1"])
def test_a_wrong_correction_is_refused(correction: object) -> None:
    """A correction that is not a count is rejected."""
    with pytest.raises(ArgumentError, match="correction must be an integer of at least 0"):
        RunningMoments(correction)  # type: ignore[arg-type]


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)], [torch.tensor([float("nan"), float("inf")])]])
def test_without_a_finite_value_all_but_the_count_is_nan(tensors: list[Tensor]) -> None:
    """A stream without a finite value has count and sum 0, and NaN as mean, variance, deviation and rms."""
    found = summary(*tensors)
    assert (found.pop("count"), found.pop("sum")) == (0.0, 0.0)
    assert [math.isnan(value) for value in found.values()] == [True] * 4


def test_values_that_are_not_finite_take_no_part() -> None:
    """NaN and infinities are ignored in count, mean and deviation."""
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert summary(torch.cat((torch.tensor([1.0, 3.0]), bad)), bad) == {
        "count": 2.0,
        "sum": 4.0,
        "mean": 2.0,
        "variance": 1.0,
        "std": 1.0,
        "rms": math.sqrt(5),
    }


@settings(max_examples=100)
@given(streams)
def test_any_stream_agrees_with_exact_sums(stream: list[Tensor]) -> None:
    """For every type, shape and split the moments equal exact sums over the whole stream."""
    moments = RunningMoments()
    for tensor in stream:
        moments.update(tensor)
    Moments.of(values_of(stream)).assert_near(moments.compute())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_small_spread_beside_a_large_mean_is_kept(dtype: torch.dtype) -> None:
    """The variance of 1e4 ± 1e-3 in a hundred batches is about 1e-6, within a tenth of a percent."""
    batches = torch.normal(1e4, 1e-3, (100, 64), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batches = batches.to(dtype)
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    variance = float(moments.compute()["std"]) ** 2
    assert variance == pytest.approx(1.05e-6, rel=0.1)
    assert variance == pytest.approx(Moments.of(values_of(batches)).variance, rel=1e-3)


@pytest.mark.parametrize("share", [1, 10, 1000])
def test_a_small_spread_among_bad_values_is_kept(share: int) -> None:
    """Any number of values that are not finite does not affect the spread of the finite ones."""
    good = torch.tensor([1e4 - 1e-3, 1e4 + 1e-3], dtype=torch.float64)
    bad = torch.full((2 * share,), float("nan"), dtype=torch.float64)
    assert summary(torch.cat((good, bad)))["std"] == pytest.approx(1e-3, rel=0.01)


def test_many_small_batches_lose_nothing() -> None:
    """After ten thousand merges the mean is accurate within 1e-12 of the rms."""
    batches = torch.rand(10_000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    moments = RunningMoments()
    state = moments.initial()
    singles = torch.stack((torch.full((10_000,), 2.0), batches.mean(1), batches.var(1, correction=0) * 2), dim=1)
    for single in singles.double():
        moments.merge_states(state, single)
    Moments.of(values_of(batches)).assert_near(moments.summarize(state))


def test_many_equal_values_beside_a_huge_one_stay_within_the_bound() -> None:
    """Many equal values next to an outlier, whose squares all round in one direction, stay within the bound."""
    values = torch.ones(2**18, dtype=torch.float64)
    values[0] = 3e24
    moments = RunningMoments()
    moments.update(values)
    Moments.of(values.tolist()).assert_near(moments.compute())

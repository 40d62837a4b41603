"""Tests of spikes compared with a running median."""

from __future__ import annotations

import functools
import math
import random
import statistics
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder.internals.random_states import RandomStates
from lightning_recorder.watch import KeptBatch, Reading, SpikeDetector
from lightning_recorder.watch.verdict import finding_of_spike, with_spike

THREE = "3 spikes (each above 3 × the largest of the 10 steps before it)"


@pytest.mark.parametrize("seed", range(3))
def test_the_median_is_that_of_the_last_values(seed: int) -> None:
    """At each value, the median is that of the last 101 finite values before it."""
    generator = random.Random(seed)
    detector = SpikeDetector(10.0)
    values: list[float] = []
    for _ in range(300):
        value = generator.choice([generator.random(), math.nan, math.inf])
        if values:
            last = values[-101:]
            assert detector.median == sorted(last)[len(last) // 2]
        detector.add(value)
        if math.isfinite(value):
            values.append(value)
    assert statistics.median(values[-101:]) == detector.median


@given(st.lists(st.floats(0.9, 1.1), min_size=1, max_size=60), st.integers(1, 9), st.floats(1e-6, 1e6))
def test_a_rise_has_its_beginning_its_end_and_its_length(usual: list[float], steps: int, scale: float) -> None:
    """After values around one, those that double twice per step have risen, in any unit; the usual ones have not."""
    detector = SpikeDetector(10.0)
    for value in usual:
        detector.add(scale * value)
    assert detector.rise() is None
    for step in range(steps):
        detector.add(scale * 4.0 ** (step + 1))
    rise = detector.rise()
    if steps == 1:
        assert rise is None
    else:
        assert rise is not None
        assert 0.9 * scale <= rise.before <= 1.1 * scale
        assert (rise.last, rise.steps) == (scale * 4.0**steps, steps)


@pytest.mark.parametrize(
    ("values", "fall"),
    [
        ([-(1.2**step) for step in range(80)], (-1.0, -(1.2**79), 79)),
        ([5.0] * 30 + [-50_001.0] * 9, None),  # the last ten values count
        ([5.0] * 30 + [-50_001.0] * 10, (5.0, -50_001.0, 39)),
        ([0.1] * 30 + [-9_999.0] * 10, None),
        ([5.0, 700.0] * 15 + [-50_001.0] * 30, None),  # a large loss may fall further
        ([-60_000.0] * 200, None),
        ([50_001.0] * 200, None),
        ([math.nan] * 200, None),
    ],
)
def test_a_fall_far_below_zero(values: list[float], fall: tuple[float, float, int] | None) -> None:
    """A fall is one to 10,000 times the size of the first values below zero; it has its first value and its length."""
    detector = SpikeDetector(10.0)
    for value in values:
        detector.add(value)
    assert detector.fall() == fall


def spikes(values: list[float], factor: float = 10.0) -> list[int]:
    detector = SpikeDetector(factor)
    return [index for index, value in enumerate(values) if detector.add(value)]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_spike_does_not_depend_on_the_unit(scale: float) -> None:
    """A value of ten times the median is a spike in any unit, once, and the next ordinary value is none."""
    generator = random.Random(0)
    values = [scale * generator.uniform(0.8, 1.2) for _ in range(60)]
    values[40] = scale * 30
    assert spikes(values) == [40]


@pytest.mark.parametrize(
    "values",
    [
        [100 * 0.9**step for step in range(200)],  # a fast decrease
        [1e-3 * 1.05**step for step in range(200)],  # warm-up of the gradient norm
        [1.0] * 5 + [50.0] + [1.0] * 50,  # during warm-up
        [0.0] * 100 + [1e-9],  # no median to compare with
        [math.nan, math.inf] * 50,
        [10.0 ** random.Random(1).gauss(0, 0.5 + step * 0) for step in range(100)],
        [random.Random(step).lognormvariate(0, 1.0) for step in range(1000)],  # heavy-tailed noise
        [-1.0 + 0.01 * step for step in range(200)],  # a loss that crosses zero
    ],
)
def test_ordinary_courses_have_no_spikes(values: list[float]) -> None:
    """Decreasing, increasing, noisy and signed series have no spike."""
    assert spikes(values) == []


@pytest.mark.parametrize(
    ("after", "median"),
    [([31.0], 1.0), ([29.0], None), ([40.0, 31.0], None), ([1.0] * 9 + [31.0], 1.0), ([1.0] * 10 + [31.0], None)],
)
def test_a_spike_has_further_values(after: list[float], median: float | None) -> None:
    """A value that exceeds a spike and all values since belongs to it, at most ten values later."""
    detector = SpikeDetector(10.0)
    assert [detector.add(value) for value in [*[1.0] * 30, 30.0]][-1] == 1.0
    assert detector.exceeds_spike() is None
    found = [(detector.add(value), detector.exceeds_spike()) for value in after]
    assert found[-1][1] == median
    assert detector.exceeds_spike() is None  # it is reported once


@pytest.mark.parametrize(
    ("ratios", "first", "largest"),
    [
        ([20], "a spike at step 0 (batch 0 of epoch 2): the loss to 40, 20 × its running median", ""),
        (
            [50, 20, 30],
            (
                f"{THREE}, the first and farthest above the median at step 0 (batch 0 of epoch 2): the loss to 100, "
                "50 × its running median"
            ),
            "",
        ),
        (
            [20, 50, 30],
            f"{THREE}, the first at step 0 (batch 0 of epoch 2): the loss to 40, 20 × its running median",
            "1 (batch 1 of epoch 2): the loss to 100, 50 × its running median",
        ),
        (
            [20, 10, 60],
            f"{THREE}, the first at step 0 (batch 0 of epoch 2): the loss to 40, 20 × its running median",
            "2 (batch 2 of epoch 2): the loss to 120, 60 × its running median",
        ),
    ],
)
def test_several_spikes_are_one_finding(ratios: list[float], first: str, largest: str) -> None:
    """The finding has the number of spikes, the first one and the one that is farthest above its median."""
    found = [
        finding_of_spike([("loss", 2 * ratio, 2.0)], Reading(step, 2, None, None, [], [step]), factor=10)
        for step, ratio in enumerate(ratios)
    ]
    joined = functools.reduce(with_spike, found)
    assert joined.verdict == first + (f"; the farthest above the median at step {largest}" if largest else "")
    assert (joined.first_step, joined.last_step, joined.records) == (0, len(ratios) - 1, len(ratios))
    assert joined.numbers["ratio"] == ratios[0]
    assert joined.numbers.get("largest_ratio", ratios[0]) == max(ratios)


def test_a_larger_value_of_a_spike_is_not_counted() -> None:
    """The finding names the value that is farthest above the median, although the spike began before it."""
    one, further, other = (
        finding_of_spike([("loss", 2 * ratio, 2.0)], Reading(step, 2, None, None, [], [step]), factor=10)
        for step, ratio in ((0, 20), (4, 50), (60, 30))
    )
    joined = with_spike(one, replace(further, records=0))
    begun = "at step 0 (batch 0 of epoch 2): the loss to 40, 20 × its running median"
    farthest = "farthest above the median at step 4 (batch 4 of epoch 2): the loss to 100, 50 × its running median"
    assert joined.verdict == f"a spike {begun}; the {farthest}"
    assert (joined.last_step, joined.records, joined.numbers["largest_step"]) == (4, 1, 4)
    two = "2 spikes (each above 3 × the largest of the 10 steps before it)"
    assert with_spike(joined, other).verdict == f"{two}, the first {begun}; the {farthest}"


@pytest.mark.parametrize(("scale", "count"), [(1e-5, 0), (1e-2, 1)])
def test_a_spike_of_a_loss_that_has_vanished_is_none(scale: float, count: int) -> None:
    """A value 30 times the median counts only if it is at least a thousandth of the first losses."""
    detector = SpikeDetector(10.0)
    values = [1.0, 0.9] * 10 + [scale * (1 + 0.1 * (number % 3)) for number in range(101)] + [30 * scale]
    assert sum(detector.add(value) is not None for value in values) == count


@pytest.mark.parametrize(
    ("indices", "where"),
    [([9], "batch 9 of"), ([8, 9], "batches 8 and 9 of"), ([6, 7, 8, 9], "batches 6 to 9 of"), ([], "batch 0 of")],
)
def test_the_batches_of_a_step_are_named(indices: list[int], where: str) -> None:
    """A step has several batches if gradients accumulate."""
    found = finding_of_spike([("loss", 30.0, 2.0)], Reading(4, 2, None, None, [], indices), factor=10)
    assert f"at step 4 ({where} epoch 2): " in found.verdict


@pytest.mark.parametrize(("rows", "severity"), [(2, "note"), (32, "warning"), (0, "warning")])
def test_a_spike_of_a_small_batch_is_a_note(rows: int, severity: str) -> None:
    """A step with less than half of the usual samples says how many it has, and blames no sample."""
    kept = KeptBatch(None, 9, 9, 2, RandomStates(), [], [], versions=[(torch.zeros(rows), 0)] if rows else [])
    reading = Reading(9, 2, None, None, [], [9], batches=[kept])
    found = finding_of_spike([("loss", 30.0, 2.0)], reading, factor=10, usual_rows=64)
    assert found.severity == severity
    assert ("2 of usually 64 samples" in found.verdict) == (rows == 2)
    assert ("wrong labels" in found.why) == (rows != 2)


@pytest.mark.parametrize(
    ("spikes", "share", "severity"),
    [
        ([("gradient norm", 49.0, 0.1)], 0.1, "note"),  # not ten times as large as an earlier one
        ([("gradient norm", 51.0, 0.1)], 0.1, "warning"),
        ([("gradient norm", 6.0, 0.5)], 0.45, "note"),
        ([("gradient norm", 6.0, 0.5)], 0.55, "warning"),
        ([("gradient norm", 60.0, 0.5)], 0.1, "warning"),  # no single sample makes as much
        ([("loss", 30.0, 2.0), ("gradient norm", 6.0, 0.5)], 0.55, "warning"),
        ([("loss", 30.0, 2.0), ("gradient norm", 60.0, 0.5)], 0.45, "note"),
    ],
)
def test_a_spike_at_a_low_loss_is_a_note(spikes: list[tuple[str, float, float]], share: float, severity: str) -> None:
    """If nearly all samples fit, a single one makes most of the gradient, and most of a loss close to zero."""
    reading = Reading(9, 2, None, None, [], [9])
    found = finding_of_spike(spikes, reading, factor=10, share=share, highest=5.0)
    assert found.severity == severity
    assert ("that is 0.45 × the first losses" in found.verdict) == (share == 0.45 and len(spikes) == 2)


def test_the_share_of_the_first_values() -> None:
    """The largest of the first ten values counts, and it is known after ten values."""
    detector = SpikeDetector(10.0)
    for value in [1.0, 2.0, *[1.5] * 7]:
        detector.add(value)
        assert detector.share(0.1) == math.inf
    detector.add(3.0)
    detector.add(8.0)
    assert (detector.share(1.5), detector.highest) == (0.5, 3.0)  # the last value is not before itself


@pytest.mark.parametrize(
    ("after", "stays"),
    [
        ([0.02] * 50, None),
        ([0.5] * 50, None),  # within three times the usual
        ([30.0] * 25 + [9.0] * 25, None),  # on its way back
        ([30.0] * 25 + [11.0] * 25, 11.0),
        ([5.0] * 25 + [11.0] * 25, 11.0),
        ([30.0] * 49, None),  # it is looked at once, 50 steps later
        ([30.0] * 51, None),
    ],
)
def test_a_series_that_does_not_come_back_from_a_spike(after: list[float], stays: float | None) -> None:
    """The median of the later half of 50 steps must be above three times the usual one and a third of the spike."""
    detector = SpikeDetector(10.0)
    for value in [*[1.0] * 30, 30.0, *after]:
        detector.add(value)
    rise = detector.stays()
    assert (rise and rise.last) == stays
    assert rise is None or (rise.before, rise.steps) == (1.0, 50)


def test_a_spike_that_is_no_note_makes_a_note_a_warning() -> None:
    """The finding names the first spike, and the first one that is a warning; what to do is that of the latter."""
    one, other = (
        finding_of_spike([("loss", value, 0.01)], Reading(step, 0, None, None, [], [step]), factor=10, share=value)
        for step, value in ((30, 0.2), (90, 0.15))
    )
    worse = replace(other, severity="warning", next="Do it.")
    found = with_spike(one, worse)
    assert (found.severity, found.next, found.first_step, found.last_step) == ("warning", "Do it.", 30, 90)
    assert "the first and farthest above the median at step 30" in found.verdict
    assert "; the worst at step 90 (batch 90 of epoch 0): the loss to 0.15" in found.verdict
    assert with_spike(worse, one).severity == "warning"


@pytest.mark.parametrize(
    ("spikes", "severity"),
    [
        ([("gradient norm", 6.0, 0.5)], "note"),
        ([("gradient norm", 60.0, 0.5)], "warning"),
        ([("loss", 30.0, 2.0), ("gradient norm", 6.0, 0.5)], "warning"),
    ],
)
def test_a_large_gradient_at_a_usual_loss_is_a_note(spikes: list[tuple[str, float, float]], severity: str) -> None:
    """At the end of a plateau, the gradient is large for a few steps and the loss falls."""
    reading = Reading(9, 2, None, None, [], [9])
    found = finding_of_spike(spikes, reading, factor=10, is_usual=True)
    assert (found.severity, "plateau" in found.why) == (severity, severity == "note")


def test_a_usual_value_is_not_above_the_ten_before_it() -> None:
    """The value itself, which is the last one, and those before the ten do not count."""
    detector = SpikeDetector(10.0)
    for value in [9.0, *[1.0, 1.2] * 4, 1.0]:
        detector.add(value)
    assert not detector.is_usual(1.0)  # only nine are before it
    detector.add(1.2)
    for value, is_usual in ((1.2, True), (1.3, False)):
        again = deepcopy(detector)
        again.add(value)
        assert again.is_usual(value) == is_usual

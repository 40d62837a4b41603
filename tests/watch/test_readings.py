"""Tests of values that are read without waiting for the device."""

from __future__ import annotations

import math

import torch

from lightning_recorder.watch import Reading, ReadingQueue
from tests.reductions.test_base import NoReading


def reading(step: int, loss: float | None = 1.0, norm: float | None = 2.0) -> Reading:
    tensors = [None if each is None else torch.tensor(each, dtype=torch.float64) for each in (loss, norm)]
    return Reading(step, 0, tensors[0], tensors[1], [], [step])


def test_values_arrive_in_one_transfer_after_some_steps() -> None:
    """A device without events is read after 16 steps, in the order of the steps; adding waits for nothing."""
    queue: ReadingQueue[Reading] = ReadingQueue(torch.device("cpu"))
    for step in range(15):
        with NoReading():  # type: ignore[no-untyped-call]  # the constructor of torch is untyped
            queue.add(reading(step, loss=float(step)))
            assert queue.take() == []
    with NoReading():  # type: ignore[no-untyped-call]  # the constructor of torch is untyped
        queue.add(reading(15, loss=15.0))
    found = queue.take()
    assert [(each.step, each.values) for each in found] == [(step, (float(step), 2.0)) for step in range(16)]
    assert queue.take(wait=True) == []
    assert len(queue) == 0


def test_values_that_are_waited_for_arrive_at_once() -> None:
    """Waiting reads everything that was added."""
    queue: ReadingQueue[Reading] = ReadingQueue(torch.device("cpu"))
    queue.add(reading(3))
    assert [each.step for each in queue.take(wait=True)] == [3]


def test_a_missing_value_is_not_bad() -> None:
    """A step without a loss or without gradients has NaN there, and is bad only by the other value."""
    queue: ReadingQueue[Reading] = ReadingQueue(torch.device("cpu"))
    for each in (reading(0, None), reading(1, norm=None), reading(2, None, math.inf), reading(3, None, None)):
        queue.add(each)
    found = queue.take(wait=True)
    assert [each.step for each in found] == [0, 1, 2]  # nothing was measured in step 3
    assert [each.is_bad for each in found] == [False, False, True]
    assert math.isnan(found[0].values[0])
    assert math.isnan(found[1].values[1])
    assert not found[2].has_bad_loss


def test_both_ways_of_reading_agree() -> None:
    """Values read one by one on the host equal those of the row, for each type and each missing value."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for loss, norm in ((0.1, 3.7), (math.inf, 1.0), (None, 0.3), (0.3, None)):
            parts = [None if each is None else torch.tensor(each, dtype=dtype) for each in (loss, norm)]
            one, other = (Reading(0, 0, parts[0], parts[1], [], [0]) for _ in range(2))
            one.read()
            row = other.row()
            assert row is not None
            other.set_values(row.tolist())
            assert str(one.values) == str(other.values)

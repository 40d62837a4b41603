"""On which steps is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_recorder.errors import ArgumentError
from lightning_recorder.schedule import EveryNSteps, Reduce, Sampling, check_reduce


@pytest.mark.parametrize(
    ("n", "steps"),
    [
        (0, []),
        (1, list(range(20))),
        (2, [0, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19]),
        (7, [0, 6, 13]),
        (20, [0, 19]),
        (50, [0]),
    ],
)
def test_the_first_step_and_each_one_that_lightning_logs(n: int, steps: list[int]) -> None:
    """Recorded are step 0 and every step k with (k + 1) % n == 0, and none at all for n = 0."""
    assert [step for step in range(20) if EveryNSteps(n)(step)] == steps


@pytest.mark.parametrize("n", [-1, 1.0, "2", None, True])
def test_a_cadence_that_can_never_work_is_refused(n: object) -> None:
    """A negative, fractional or boolean cadence is refused under the name that users give it."""
    with pytest.raises(ArgumentError, match=r"^every_n_train_steps must be an integer of at least 0, got "):
        EveryNSteps(n)  # type: ignore[arg-type]  # the point of the test


def test_schedules_are_values() -> None:
    """Schedules of equal cadence are equal, and equal as keys."""
    assert EveryNSteps(3) == EveryNSteps(3) != EveryNSteps(4)
    assert len({EveryNSteps(3), EveryNSteps(3), EveryNSteps(4)}) == 2


@pytest.mark.parametrize(
    ("sampling", "steps"),
    [
        (Sampling(5), [0, 4, 9, 14, 19]),
        (Sampling(5, first_n_steps=3), [0, 1, 2, 4, 9, 14, 19]),
        (Sampling(0, first_n_steps=2), [0, 1]),
        (Sampling(5, step_window=(4, 14)), [4, 9]),
        (Sampling(step_window=(4, 7)), [4, 5, 6]),
        (Sampling(when=lambda step: step in (1, 8)), [1, 8]),
        (Sampling(3, when=lambda step: step > 10), [11, 14, 17]),
        (Sampling(), [0, 9, 19]),
    ],
)
def test_what_is_given_holds_together(sampling: Sampling, steps: list[int]) -> None:
    """A step is recorded if its cadence or the beginning asks for it, and no window or predicate is against it."""
    assert list(filter(sampling.with_default(10), range(20))) == steps


def test_only_some_epochs() -> None:
    """The first epoch and then each n-th are recorded, whatever the steps."""
    sampling = Sampling(1, every_n_epochs=3)
    assert [epoch for epoch in range(8) if sampling(100, epoch)] == [0, 2, 5]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"every_n_train_steps": -1}, "every_n_train_steps must be an integer of at least 0, got -1"),
        ({"every_n_epochs": 0}, "every_n_epochs must be an integer of at least 1, got 0"),
        ({"first_n_steps": 1.5}, "first_n_steps must be an integer of at least 0, got 1.5"),
        (
            {"step_window": (5, 5)},
            r"step_window must be \(start, stop\), two integers with 0 <= start < stop, got \(5, 5\)",
        ),
        ({"step_window": 5}, "step_window must be"),
        ({"step_window": (1, 2, 3)}, "step_window must be"),
        ({"when": 3}, r"when takes a function \(step\) that says whether the step is recorded, got 3"),
    ],
)
def test_sampling_that_can_never_work_is_refused(arguments: dict[str, Any], told: str) -> None:
    """A wrong argument is refused by its name, with what is allowed."""
    with pytest.raises(ArgumentError, match=told):
        Sampling(**arguments)


@pytest.mark.parametrize("reduce", [0, -1, True, "batch", 1.0, None])
def test_what_becomes_no_record_is_refused(reduce: object) -> None:
    """Only steps, epochs and a positive number of steps can be put together."""
    with pytest.raises(ArgumentError, match="reduce must be 'step', 'epoch' or a number of steps of at least 1, got"):
        check_reduce(reduce)


@pytest.mark.parametrize(
    ("reduce", "cadence", "records"), [("step", 10, 100), (50, 10, 20), (50, 100, 10), ("epoch", 10, 1), ("step", 0, 0)]
)
def test_how_many_records_there_are(reduce: Reduce, cadence: int, records: int) -> None:
    """In a thousand steps there are as many records as steps are recorded, or windows have any."""
    assert Sampling(cadence).count_records(reduce, 1000) == records

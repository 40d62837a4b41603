"""Schedules select the steps to record."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_recorder.errors import ArgumentError, RecordingError
from lightning_recorder.schedule import Reduce, Sampling, Schedule, check_reduce


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
    """Step 0 and every step k with (k + 1) % n == 0 are recorded, and none for n = 0."""
    assert [step for step in range(20) if Sampling(n)(step)] == steps


@pytest.mark.parametrize("n", [-1, 1.0, "2"])
def test_a_cadence_that_can_never_work_is_refused(n: object) -> None:
    """A negative or fractional interval is rejected, with the name that users pass it under."""
    with pytest.raises(ArgumentError, match=r"^every_n_train_steps must be an integer of at least 0, got "):
        Sampling(n)  # type: ignore[arg-type]  # the point of the test


def test_schedules_are_values() -> None:
    """Schedules with equal conditions compare and hash equal."""
    assert Schedule(step_window=[3, 4]) == Schedule(step_window=(3, 4)) != Schedule()
    assert len({Sampling(3), Sampling(3), Sampling(4), Schedule(first_n_steps=1), Schedule(first_n_steps=1)}) == 3


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
    """A step is recorded if the interval or ``first_n_steps`` includes it and no window or predicate excludes it."""
    assert list(filter(sampling.with_default(10), range(20))) == steps


def test_only_some_epochs() -> None:
    """The first epoch and every n-th epoch are recorded, regardless of the steps."""
    sampling = Sampling(1, every_n_epochs=3)
    assert [epoch for epoch in range(8) if sampling(100, epoch)] == [0, 2, 5]


@pytest.mark.parametrize(
    ("arguments", "warned"),
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
        ({"when": 3}, r"when takes a function \(step\) that returns whether to record the step, got 3"),
        ({"when": lambda: True}, r"when takes a function \(step\) .*; the lambda at .*test_schedule.py:\d+ takes \(\)"),
        ({"step_window": (9, 2)}, r"got \(9, 2\): write \(2, 9\)"),
        ({"max_overhead": 2}, "max_overhead must be a fraction of the training time, above 0 and at most 1, got 2"),
        ({"every_n_train_steps": 2.0}, r"got 2\.0: write 2$"),
        ({"every_n_train_steps": True}, "got True: write 1 to record every step"),
    ],
)
def test_sampling_that_can_never_work_is_refused(arguments: dict[str, Any], warned: str) -> None:
    """An invalid argument is rejected with its name and the allowed values."""
    with pytest.raises(ArgumentError, match=warned):
        Sampling(**arguments)


def test_a_schedule_names_itself_in_errors() -> None:
    """Invalid and unknown arguments of a schedule are rejected when it is made, with its name."""
    with pytest.raises(ArgumentError, match=r"^Schedule: every_n_epochs must be an integer of at least 1, got 0$"):
        Schedule(every_n_epochs=0)
    with pytest.raises(TypeError, match=r"^Schedule has no argument window: did you mean step_window\?$"):
        Schedule(window=(1, 2))  # type: ignore[call-arg]  # the point of the test
    with pytest.raises(TypeError, match=r"^Schedule takes no argument without a name, got 1: write them as name=val"):
        Schedule(2)  # type: ignore[call-arg]  # the point of the test


def test_a_predicate_that_raises_names_its_line() -> None:
    """An error of the predicate is reported with its line in the user's code and the step."""
    sampling = Sampling(1, when=lambda step: 1 / step)
    with pytest.raises(RecordingError, match=r"^when raised at .*test_schedule.py:\d+: ZeroDiv.*, for step 0"):
        sampling(0)


def test_a_window_that_is_mistyped_is_suggested() -> None:
    """The message for a misspelled ``reduce`` value suggests a close match."""
    with pytest.raises(ArgumentError, match=r"got 'epochs': did you mean 'epoch'\?"):
        check_reduce("epochs")


@pytest.mark.parametrize("reduce", [0, -1, True, "batch", 1.0, None])
def test_what_becomes_no_record_is_refused(reduce: object) -> None:
    """Only steps, epochs and a positive number of steps are valid record spans."""
    with pytest.raises(ArgumentError, match="reduce must be 'step', 'epoch' or a number of steps of at least 1, got"):
        check_reduce(reduce)


@pytest.mark.parametrize(
    ("reduce", "cadence", "records"), [("step", 10, 100), (50, 10, 20), (50, 100, 10), ("epoch", 10, 1), ("step", 0, 0)]
)
def test_how_many_records_there_are(reduce: Reduce, cadence: int, records: int) -> None:
    """A thousand steps yield as many records as there are recorded steps or non-empty windows."""
    assert Sampling(cadence).count_records(reduce, 1000) == records

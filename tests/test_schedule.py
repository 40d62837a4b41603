"""On which steps is recorded."""

from __future__ import annotations

import pytest

from lightning_recorder.errors import ArgumentError
from lightning_recorder.schedule import EveryNSteps


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

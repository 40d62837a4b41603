"""Tests of the detection of modules whose recording stops or starts late."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from lightning_recorder.outputs.receipt import PresenceHistory

Present = Callable[[int], bool]


def changes(present: Present, records: int) -> tuple[list[int], list[int], bool]:
    """Return the records at which a unit starts late and stops, and True if it counts as stopped at the end."""
    coverage: PresenceHistory[str] = PresenceHistory()
    started, stopped = [], []
    for number in range(records):
        late, gone = coverage.update(number, ["always", *(["it"] if present(number) else [])])
        assert "always" not in [*late, *gone]
        started += [number] * len(late)
        stopped += [number] * len(gone)
    return started, stopped, coverage.finish() == ["it"]


@pytest.mark.parametrize(
    ("seen", "missing"), [(1, 140), (2, 38), (3, 20), (5, 11), (10, 11), (20, 21), (30, 21), (1000, 21)]
)
def test_how_many_records_it_takes(seen: int, missing: int) -> None:
    """A unit with the given number of records has stopped after the given number of records without it."""
    assert changes(lambda number: number < seen, seen + missing - 1)[1] == []
    assert changes(lambda number: number < seen, seen + missing) == ([], [seen + missing - 1], False)


@pytest.mark.parametrize(("seen", "missing"), [(1, 44), (2, 17), (3, 10), (10, 4), (1000, 3)])
def test_at_the_end_fewer_are_enough(seen: int, missing: int) -> None:
    """At the end of a run, a unit counts as stopped after fewer records, but at least three."""
    assert not changes(lambda number: number < seen, seen + missing - 1)[2]
    assert changes(lambda number: number < seen, seen + missing) == ([], [], True)


@pytest.mark.parametrize("length", range(1, 21))
@pytest.mark.parametrize("first", [True, False])
def test_branches_that_alternate_are_quiet(length: int, first: bool) -> None:
    """Alternating branches, each for up to 20 records, do not stop."""
    assert changes(lambda number: (number // length % 2 == 0) == first, 300)[1] == []


def test_branches_at_random_are_quiet() -> None:
    """None of 200 branches taken at random with any probability stops within 200 records."""
    generator = random.Random(3)
    for _ in range(200):
        share = generator.uniform(0.05, 1)
        taken = [generator.random() < share for _ in range(200)]
        assert changes(lambda number, taken=taken: taken[number], 200)[1] == []  # type: ignore[misc]  # bound at once


@pytest.mark.parametrize(("absent", "started"), [(0, []), (1, []), (2, []), (3, [3]), (50, [50])])
def test_a_late_start(absent: int, started: list[int]) -> None:
    """A unit has started late, once, if at least three records came before its first one."""
    assert changes(lambda number: number >= absent, 60)[0] == started


def test_a_unit_that_comes_back_stops_once() -> None:
    """A unit that stops, comes back and stops for longer is reported once."""
    found = changes(lambda number: number < 5 or 20 <= number < 25, 100)
    assert found == ([], [15], False)


def test_first_and_last_steps() -> None:
    """The steps of a unit are those of its first and its last record."""
    coverage: PresenceHistory[str] = PresenceHistory()
    for step, seen in [(0, "a"), (49, "ab"), (99, "b"), (149, "b")]:
        coverage.update(step, seen)
    assert (coverage.steps("a"), coverage.steps("b"), coverage.records) == ((0, 49), (49, 149), 4)
    assert "c" not in coverage

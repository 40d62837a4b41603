"""Settings of all tests."""

import functools
import gc
import importlib.metadata
import sys
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Every run has the same examples: a failure is of the change at hand. `--hypothesis-profile=search` draws others.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("repeatable")

# The processor time of a test in seconds, on average, by the beginning of the path of its file; the longest one counts.
_SECONDS = {
    "": 0.1,
    "tests/benchmarks/test_gpu.py": 1.8,
    "tests/callbacks/": 0.25,
    "tests/callbacks/test_any_program.py": 0.6,
    "tests/callbacks/test_compiled": 1.0,
    "tests/callbacks/test_compiled_counters.py": 2.5,
    "tests/callbacks/test_distributed.py": 0.8,
    "tests/callbacks/test_full_disk.py": 0.6,
    "tests/callbacks/test_noninterference.py": 0.8,
    "tests/callbacks/test_sick_layer.py": 3.4,
    "tests/check/": 0.3,
    "tests/dumps/test_killed.py": 3.0,
    "tests/graph/test_legibility.py": 0.4,
    "tests/insight/test_corpus.py": 6.0,
    "tests/insight/test_exam.py": 1.1,
    "tests/reductions/": 0.03,
    "tests/reductions/kernels/": 0.15,
    "tests/taps/": 0.02,
    "tests/test_examples.py": 3.0,
    "tests/test_packaging.py": 4.0,
}

# The processor time in seconds that the quick cases of a test may take together. One case is quick in any case.
_QUICK_SECONDS = 0.25


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Build the C code before the first test, so that all tests compute with the same code."""
    from lightning_recorder.reductions.kernels.fused import prepare

    prepare(wait=True)


def _once_for_each_path(entry_points: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that lists entry points, which reads the metadata of all packages once for each search path.

    Each ``Trainer`` asks for them, and reading those of 200 packages takes as long as a few steps of training.
    """

    @functools.cache
    def found(path: tuple[str, ...], **chosen: str) -> Any:
        return entry_points(**chosen)

    return lambda **chosen: found(tuple(sys.path), **chosen)


# Before Lightning imports the function.
pytest.MonkeyPatch().setattr(importlib.metadata, "entry_points", _once_for_each_path(importlib.metadata.entry_points))


@pytest.fixture(autouse=True)
def _new_disks() -> None:
    """Let each test begin as a run: a disk is reported once per run, and the tests of a process share one."""
    from lightning_recorder.disk import begin_run

    begin_run()


def seconds(file: str) -> float:
    """Return the processor time of a test of a file."""
    return _SECONDS[max((each for each in _SECONDS if file.startswith(each)), key=len)]


def shares(tests: Mapping[str, int], processes: int) -> dict[str, int]:
    """Return the process of each file, given its number of tests, so that all processes have about as much to do."""
    costs = {file: count * seconds(file) for file, count in tests.items()}
    busy = [0.0] * processes
    places = {}
    for file in sorted(costs, key=lambda file: -costs[file]):
        places[file] = min(range(processes), key=busy.__getitem__)
        busy[places[file]] += costs[file]
    return places


class _FixedFiles(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each process the same files in every run, so that no process works alone for long at the end.

    By default, a process that is free takes the next file, so that what was imported before a test depends on timing.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        self._places: dict[str, int] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._places:
            self._places = shares(Counter(each.partition("::")[0] for each in self.collection), self.numnodes)
        return str(self._places[nodeid.partition("::")[0]])


@pytest.hookimpl(tryfirst=True, optionalhook=True)  # before xdist's own, if it is used
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _FixedFiles(config, log)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow all cases of a test but the quick ones."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for test, found in cases.items():
        marker = found[0].get_closest_marker("quick_cases")
        # A product has the same object in all of its cases. Not every object can be hashed.
        values = [
            [(name, value if isinstance(value, (str, float, int)) else id(value)) for name, value in params.items()]
            for params in (item.callspec.params for item in found)
        ]
        quick = quick_cases(test, values, None if marker is None else marker.args[0])
        for place, item in enumerate(found):
            if place not in quick:
                item.add_marker(pytest.mark.slow)


def quick_cases(test: str, cases: Sequence[Sequence[Hashable]], number: int | None = None) -> set[int]:
    """Return the places of the quick cases of a test: so many, by default as many as the limit of their time allows."""
    if number is None:
        number = max(1, int(_QUICK_SECONDS / seconds(test)))
    return set(range(len(cases))) if len(cases) <= number else spread_cases(cases, number)


def spread_cases(cases: Sequence[Sequence[Hashable]], number: int) -> set[int]:
    """Return the places of so many cases, evenly spread, in which as many values as possible occur.

    Each case is given by its values. Places at equal distances alone are not enough: in a product of parameters they
    can all have the same value of one of them.
    """
    uses: Counter[Hashable] = Counter()
    chosen: set[int] = set()
    while len(chosen) < min(number, len(cases)):
        even = len(chosen) * len(cases) / number

        def preference(place: int, even: float = even) -> tuple[int, int, float]:
            counts = [uses[value] for value in cases[place]]
            return (-counts.count(0), sum(counts), abs(place - even))

        place = min((place for place in range(len(cases)) if place not in chosen), key=preference)
        chosen.add(place)
        uses.update(cases[place])
    return chosen


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while the tests are collected, a million objects that stay, nor look through them later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()

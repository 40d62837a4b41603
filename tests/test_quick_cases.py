"""The choice of cases, those that are quick and those that stand for all combinations, and the process of each file."""

from __future__ import annotations

import itertools

import pytest

from tests.conftest import quick_cases, shares, spread_cases
from tests.pairs import covering, pairs, pairwise


@pytest.mark.parametrize(("first", "second", "number"), [(5, 3, 5), (34, 2, 34), (12, 24, 60), (2, 31, 31), (3, 3, 3)])
def test_each_value_of_a_product_has_a_quick_case(first: int, second: int, number: int) -> None:
    """If there are enough quick cases for the longest parameter, each value of each parameter has one."""
    cases = [[("first", one), ("second", two)] for one, two in itertools.product(range(first), range(second))]
    chosen = spread_cases(cases, number)
    assert len(chosen) == number
    assert {value for place in chosen for value in cases[place]} == {value for case in cases for value in case}


def test_a_new_value_comes_before_an_even_use() -> None:
    """A value that occurs in few cases has a quick one, even if the other value of these cases occurs often."""
    cases = [["plain", step] for step in range(8)] + [["mixed", 0], ["scaled", 0]] * 2
    chosen = spread_cases(cases, 10)
    assert {value for place in chosen for value in cases[place]} == {value for case in cases for value in case}


def test_cases_without_common_values_are_evenly_spread() -> None:
    """The cases of a single parameter lie at equal distances, and all are chosen if there are too few."""
    assert spread_cases([[place] for place in range(12)], 4) == {0, 3, 6, 9}
    assert spread_cases([[place] for place in range(2)], 4) == {0, 1}


@pytest.mark.parametrize(
    ("file", "marked", "number"),
    [
        ("tests/test_any.py", None, 2),
        ("tests/callbacks/test_any.py", None, 1),
        ("tests/taps/test_any.py", None, 12),
        ("tests/insight/test_corpus.py", None, 1),
        ("tests/callbacks/test_any.py", 3, 3),
    ],
)
def test_quick_cases_take_a_quarter_of_a_second(file: str, marked: int | None, number: int) -> None:
    """So many cases are quick as take 0.25 s by the cost of their file, or as the marker says; at least one."""
    assert len(quick_cases(f"{file}::test_something", [[place] for place in range(12)], marked)) == number


@pytest.mark.parametrize(("sizes", "most"), [((32, 3, 7), 224), ((5, 5, 5), 28), ((2, 2, 2, 2, 2), 6), ((4, 3), 12)])
def test_all_pairs_of_values_occur(sizes: tuple[int, ...], most: int) -> None:
    """Each two values of two parameters occur together in few cases."""
    factors = [range(size) for size in sizes]
    cases = pairwise(*factors)
    assert set().union(*map(pairs, cases)) == set().union(*map(pairs, itertools.product(*factors)))
    assert len(cases) == len(set(cases)) <= most


def test_all_that_is_to_be_covered_is() -> None:
    """The chosen cases cover what all cases do, in their order, and one that adds nothing is left out."""
    assert covering("abcd", [{1}, {1, 2}, {2}, {3}]) == ["b", "d"]
    assert covering([], []) == []


def test_processes_have_about_as_much_to_do() -> None:
    """Each file, the longest first, goes to the process that has least to do."""
    files = {f"tests/{name}.py": count for name, count in zip("abcdefg", (90, 10, 20, 30, 40, 50, 10), strict=True)}
    places = shares(files, 3)
    busy = [sum(files[file] for file, place in places.items() if place == each) for each in range(3)]
    assert sorted(busy) == [80, 80, 90]


def test_files_with_long_tests_count_for_more() -> None:
    """Few tests with a training each are as much as many tests of a function."""
    files = {"tests/insight/test_corpus.py": 9, "tests/taps/test_base.py": 900, "tests/taps/test_forward.py": 300}
    places = shares(files, 2)
    assert places["tests/taps/test_base.py"] == places["tests/taps/test_forward.py"]
    assert places["tests/insight/test_corpus.py"] != places["tests/taps/test_base.py"]

"""Tests of tables over steps: their values, their order, and what is kept of many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from lightning_recorder.insight import STATISTICS
from lightning_recorder.records import history as history_module
from lightning_recorder.records.history import History, compact
from lightning_recorder.records.table import Schema, Table
from lightning_recorder.taps import Site
from tests.insight.records import record


@pytest.mark.parametrize("number", [3, 300])
def test_columns_are_those_of_the_records(number: int) -> None:
    """Statistics that all sites share, that some lack and that none has are returned as they were recorded."""
    table = History(STATISTICS)
    tables = []
    for step in range(4):
        sites = {(f"fc{place}", "out"): {"rms": 1.0 + place + step} for place in range(number)}
        sites["fc1", "out"]["mean"] = np.nan
        tables.append(record("activations", step, sites))
        table.add(tables[-1])
    for place, name in enumerate(STATISTICS):
        expected = np.stack([each.numbers[:, place] for each in tables])
        assert np.array_equal(table.get(name), expected, equal_nan=True), name


@given(
    npst.arrays(np.float64, st.tuples(st.integers(1, 4), st.sampled_from([1, 199, 200, 230])), elements=st.floats()),
    st.sampled_from(["as they are", "float32", "one value", "one value and NaN"]),
)
def test_what_takes_less_memory_is_not_rounded(values: NDArray[np.float64], kind: str) -> None:
    """The compact rows have the values to the bit; equal values and those of float32 take at most half the memory."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(np.float32).astype(np.float64) if kind == "float32" else values
    values = np.repeat(values[:, :1], values.shape[1], axis=1) if kind.startswith("one") else values
    values[:, -1:] = np.nan if kind.endswith("NaN") else values[:, -1:]
    rows = compact(values)
    assert np.array_equal(np.array([*map(np.float64, rows)]), values, equal_nan=True)
    if values.shape[1] >= 200 and kind in ("float32", "one value"):
        assert all(row.itemsize == 4 or row.strides == (0,) for row in rows)


def test_few_columns_of_a_large_table_are_in_memory() -> None:
    """A small table keeps the last six columns, a large one the last three, and none after ``free``."""
    for sites, kept in ((2, 6), (2**17, 3)):
        table, names = History(STATISTICS), tuple(Site(f"fc{place}", "out") for place in range(sites))
        schema = Schema(names, STATISTICS, (None,) * sites, (None,) * sites)
        for step in range(2):
            values = np.full((sites, len(STATISTICS)), float(step))
            table.add(Table(schema, values, about={"step": step}))
        for name in STATISTICS:
            table.get(name)
        assert list(table._columns) == list(STATISTICS[-kept:])
        table.free()
        assert table._columns == {}
        assert table.get("mean")[:, -1].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("number", [3, 300])
@pytest.mark.parametrize("bad", [{1}, {0, 1, 2}])
def test_the_first_row_with_a_nan(number: int, bad: set[int]) -> None:
    table = History(STATISTICS)
    for step in range(4):
        sites = {(f"fc{place}", "out"): {"nan_count": float(step == 2 and place % 3 in bad)} for place in range(number)}
        table.add(record("activations", step, sites))
    assert table.first_bad_row() == 2


_SCHEMA = Schema((Site("fc", "out"),), ("rms", "nan_count", "inf_count"), (None,), (None,))


def added(records: list[tuple[int, bool]]) -> tuple[History, dict[int, float]]:
    """Return the history of records, each with the distance to the step before and if it is bad, and their values."""
    history, step, values = History(_SCHEMA.columns), 0, {}
    for number, (further, is_bad) in enumerate(records):
        step += further
        values[step] = float(number)
        history.add(Table(_SCHEMA, np.array([[number, is_bad, 0.0]]), about={"step": step}))
    return history, values


@given(st.integers(1, 150), st.sets(st.integers(1, 149), max_size=5), st.integers(0, 149))
def test_what_stays_of_many_records(number: int, repeated: set[int], bad: int) -> None:
    """The first record, the latest, the first bad one and the one before it stay, in order and to the bit.

    An even selection of the others stays, and a record of the same step replaces the earlier one.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"_MOST_ROWS": 20, "_FEWEST_ROWS": 16, "_KEPT_AT_THE_END": 4}.items():
            patch.setattr(history_module, name, value)
        history, values = added([(2 * (each not in repeated), each == bad) for each in range(number)])
    steps = sorted(values)
    assert history.steps == sorted(set(history.steps))
    assert len(history) <= 20
    assert {steps[0], *steps[-4:]} <= set(history.steps)
    assert history.get("rms")[:, 0].tolist() == [values[step] for step in history.steps]
    around = {
        each for place, step in enumerate(steps) if values[step] == bad for each in (step, steps[max(place - 1, 0)])
    }
    assert around <= set(history.steps)
    assert set(steps[:: history._every]) <= set(history.steps)
    assert history._every <= max(1, len(steps) // 4)


def test_a_part_shares_no_row_that_is_added_later() -> None:
    """The part of a history before a step stays as it was when further records come."""
    history, _ = added([(1, False)] * 5)
    part = history.before(3)
    history.add(Table(_SCHEMA, np.array([[9.0, 1.0, 0.0]]), about={"step": 6}))
    assert (part.steps, history.steps) == ([1, 2], [1, 2, 3, 4, 5, 6])
    assert (part.first_bad_row(), history.first_bad_row()) == (None, 5)

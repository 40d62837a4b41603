"""The records of one group as arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from lightning_recorder.insight import STATISTICS
from lightning_recorder.insight.table import Floats, Table, compact
from lightning_recorder.records import table as records
from lightning_recorder.taps import Site
from tests.insight.records import record


@pytest.mark.parametrize("number", [3, 300])
def test_columns_are_those_of_the_records(number: int) -> None:
    """Statistics that all sites share, that some lack and that none has are returned as they were recorded."""
    table = Table()
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
def test_what_takes_less_memory_is_not_rounded(values: Floats, kind: str) -> None:
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
        table, names = Table(), tuple(Site(f"fc{place}", "out") for place in range(sites))
        schema = records.Schema(names, STATISTICS, (None,) * sites, (None,) * sites)
        for step in range(2):
            values = np.full((sites, len(STATISTICS)), float(step))
            table.add(records.Table(schema, values, about={"step": step}))
        for name in STATISTICS:
            table.get(name)
        assert list(table._columns) == list(STATISTICS[-kept:])
        table.free()
        assert table._columns == {}
        assert table.get("mean")[:, -1].tolist() == [0.0, 1.0]


@pytest.mark.parametrize("number", [3, 300])
@pytest.mark.parametrize("bad", [{1}, {0, 1, 2}])
def test_the_first_row_with_a_nan(number: int, bad: set[int]) -> None:
    table = Table()
    for step in range(4):
        sites = {(f"fc{place}", "out"): {"nan_count": float(step == 2 and place % 3 in bad)} for place in range(number)}
        table.add(record("activations", step, sites))
    assert table.first_bad_row() == 2

"""The records of one group as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_recorder.insight import STATISTICS
from lightning_recorder.insight.table import Table
from tests.insight.records import record


@pytest.mark.parametrize("number", [3, 300])
def test_columns_are_those_of_the_records(number: int) -> None:
    """Statistics that all sites share, that some lack and that none has are returned as they were recorded."""
    table = Table()
    records = []
    for step in range(4):
        sites = {(f"fc{place}", "out"): {"rms": 1.0 + place + step} for place in range(number)}
        sites["fc1", "out"]["mean"] = np.nan
        records.append(record("activations", step, sites))
        table.add(records[-1])
    for place, name in enumerate(STATISTICS):
        expected = np.stack([each.values[:, place] for each in records])
        assert np.array_equal(table.get(name), expected, equal_nan=True), name


@pytest.mark.parametrize("number", [3, 300])
@pytest.mark.parametrize("bad", [{1}, {0, 1, 2}])
def test_the_first_row_with_a_nan(number: int, bad: set[int]) -> None:
    table = Table()
    for step in range(4):
        sites = {(f"fc{place}", "out"): {"nan_count": float(step == 2 and place % 3 in bad)} for place in range(number)}
        table.add(record("activations", step, sites))
    assert table.first_bad_row() == 2

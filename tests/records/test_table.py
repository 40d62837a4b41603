"""Tests of the table of a record: its rows, its parts, and the sites that lack a statistic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_recorder.errors import ArgumentError
from lightning_recorder.names import Site
from lightning_recorder.records.table import SiteStatistics, Table

BINS = torch.zeros(2048, dtype=torch.int64)
BINS[5] = 3
FOUND = {
    Site("a", "out"): SiteStatistics({"rms": 1.0, "mean": 0.5}, BINS, {}, torch.float16, (2, 3)),
    Site("b", "in[0]"): SiteStatistics({"rms": 2.0}, tensors={"v": torch.ones(2)}),
    Site("c", "out"): SiteStatistics({"rms": math.nan, "more": 4.0}, BINS),
}


def same(one: SiteStatistics, other: SiteStatistics) -> bool:
    """Return True if two sites have the same statistics, dtype and shape; a NaN equals a NaN."""
    is_same = repr(dict(one.scalars)) == repr(dict(other.scalars)) and one.tensors == other.tensors
    return is_same and (one.dtype, one.shape) == (other.dtype, other.shape)


def test_a_table_has_the_statistics_of_its_sites() -> None:
    """Each site has its own statistics, and a column is NaN where a site lacks it."""
    table = Table.of(FOUND, {"step": 3})
    assert (table.columns, table.step, table.stage) == (("rms", "mean", "more"), 3, "train")
    assert all(same(table[site], seen) for site, seen in FOUND.items())
    np.testing.assert_equal(table.column("more"), [math.nan, math.nan, 4.0])
    np.testing.assert_equal(table.part(None, ("mean", "none")), [[0.5, math.nan], [math.nan] * 2, [math.nan] * 2])


def test_some_rows_are_a_table() -> None:
    """Some rows in another order keep their statistics and histograms; equal rows share their schema."""
    table = Table.of(FOUND, {"step": 0})
    part = table.in_order([Site("c", "out"), Site("a", "out")])
    assert part.sites == (Site("c", "out"), Site("a", "out"))
    assert all(same(part[site], FOUND[site]) for site in part)
    assert torch.equal(part[Site("a", "out")].bins, BINS)
    assert part.schema is table.take(np.array([2, 0])).schema
    assert table.in_order([]) is table.in_order(FOUND) is table


def test_inputs_are_apart() -> None:
    """The inputs of modules are a table of their own; those of a parameter that is called ``in`` are not."""
    outputs, inputs = Table.of(FOUND).split()
    assert inputs is not None
    assert (outputs.sites, inputs.sites) == ((Site("a", "out"), Site("c", "out")), (Site("b", "in[0]"),))
    assert outputs.split()[1] is None
    parameters = Table.of(FOUND, {"group": "parameters"})
    assert parameters.split() == (parameters, None)


def test_a_site_without_bins_has_no_histogram_in_a_file() -> None:
    """Missing bins stay missing, also in a part, and wrong ones are refused."""
    table = Table.of(FOUND)
    assert table.counts is not None
    assert table.counts.packed() == [bytes([5, 3]), None, bytes([5, 3])]
    assert table.counts.take(np.array([1, 0])).packed() == [None, bytes([5, 3])]
    with pytest.raises(ArgumentError, match=r"\[2048\] int64"):
        Table.of({Site("a", "out"): SiteStatistics({}, torch.ones(3))})

"""Tests of all default statistics in one state."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from lightning_recorder.reductions import (
    SCALAR_STATISTICS,
    ExponentHistogram,
    Histogram,
    Statistics,
    Values,
    combined,
    to_histogram,
)
from lightning_recorder.reductions import statistics as of_statistics
from lightning_recorder.reductions.base import slots_of_all
from lightning_recorder.reductions.row import PARTS
from tests.reductions.reference import assert_statistics
from tests.reductions.strategies import streams

MIXED = torch.tensor([0.0, 1.0, 2.0, 5.0, math.nan, math.inf, -math.inf, -math.inf])


def statistics(*tensors: Tensor) -> dict[str, Tensor]:
    """Return the statistics of a stream."""
    reduction = Statistics()
    for tensor in tensors:
        reduction.update(tensor)
    return reduction.compute()


def histogram_of(tensor: Tensor) -> Histogram:
    """Return the histogram that a sink gets for a tensor."""
    summary = statistics(tensor)
    return to_histogram({name: float(summary[name]) for name in SCALAR_STATISTICS}, summary["histogram"])


def test_values_by_hand() -> None:
    """Every statistic of four finite and four other values equals the value computed by hand."""
    summary = statistics(MIXED)
    assert {name: float(summary[name]) for name in SCALAR_STATISTICS} == {
        "count": 4.0,
        "mean": 2.0,
        "std": math.sqrt(3.5),
        "rms": math.sqrt(7.5),
        "min": 0.0,
        "max": 5.0,
        "zero_fraction": 0.125,
        "nan_count": 1.0,
        "inf_count": 3.0,
    }
    assert int(summary["histogram"].sum()) == 8


@settings(max_examples=200)
@given(streams)
def test_any_stream_agrees_with_the_reference(stream: list[Tensor]) -> None:
    """For every type, shape and split each statistic covers the whole stream."""
    assert_statistics(statistics(*stream), stream)


def test_a_stream_of_many_values_agrees_with_the_reference() -> None:
    """A large bfloat16 tensor, for which low-precision sums would be wrong, is reduced accurately."""
    tensor = torch.normal(3.0, 1.0, (20_000,), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert_statistics(statistics(*tensor.split(7_001)), [tensor])


def test_more_values_than_an_int_counts_by_the_passes_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**31 + 7 booleans are all counted, in pieces, by the general torch passes.

    All values are equal, so the passes over one piece of each length stand for those over the others.
    """
    monkeypatch.setattr(of_statistics, "_QUICK", ())
    count = 2**31 + 7
    tensor = torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(torch.bool)
    known: dict[int, Tensor | None] = {}

    def slots_of_piece(parts: Any, piece: Values) -> Tensor | None:
        if piece.real.untyped_storage().data_ptr() != tensor.data_ptr():
            return slots_of_all(parts, piece)
        if piece.numel not in known:
            known[piece.numel] = slots_of_all(parts, piece)
        return known[piece.numel]

    monkeypatch.setattr(combined, "slots_of_all", slots_of_piece)
    reduction = Statistics(sample=4096)
    reduction.update(tensor)
    assert reduction.state[:9].tolist() == [count, 0, 0, 0, 0, count, count, 0, 0]
    summary = reduction.compute()
    assert float(summary["histogram_fraction"]) == 4096 / count
    assert int(summary["histogram"][0]) == 4096
    assert sorted(known) == [7, 1 << 18]


def test_the_parts_are_those_reductions() -> None:
    """The state is bitwise the concatenation of the states of the parts and of the histogram."""
    whole = Statistics()
    whole.update(MIXED)
    parts = [*(part() for part in PARTS), ExponentHistogram()]
    for part in parts:
        part.update(MIXED)
    assert torch.equal(whole.state, torch.cat([part.state for part in parts]))
    assert whole.nbytes == whole.state.nbytes == 8 * whole.width


def test_the_names_of_the_scalars_are_those_of_the_summary() -> None:
    """The summary has the scalars in the listed order, as well as sum, variance and the histogram."""
    names = [name for name in statistics(MIXED) if name not in ("sum", "variance")]
    assert names == [*SCALAR_STATISTICS, "histogram"]


def test_a_histogram_for_a_sink_by_hand() -> None:
    """A sink gets edges and counts of the finite values, with their extrema, sum and sum of squares."""
    histogram = histogram_of(MIXED)
    tiny = 2.0**-126
    assert histogram.edges.tolist() == [-tiny, tiny, 1.0, 1.25, 2.0, 2.5, 5.0, 6.0]
    assert histogram.counts.tolist() == [1, 0, 1, 0, 1, 0, 1]
    assert (histogram.count, histogram.min, histogram.max) == (4, 0.0, 5.0)
    assert histogram.sum == 8.0
    assert histogram.sum_squares == pytest.approx(30.0, rel=1e-15)


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.tensor([math.nan])])
def test_a_histogram_of_nothing(tensor: Tensor) -> None:
    """Without a finite value a histogram has no counts, zero sums and no extrema."""
    histogram = histogram_of(tensor)
    assert (histogram.count, histogram.sum, histogram.sum_squares) == (0, 0.0, 0.0)
    assert np.isnan([histogram.min, histogram.max]).all()

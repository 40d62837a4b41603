"""Tests of the histograms of many sites, compared with those made one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_recorder.bins import BINS
from lightning_recorder.records import counts as counts_module
from lightning_recorder.reductions import (
    SUMMED,
    Histogram,
    SparseCounts,
    Statistics,
    TaggedHistograms,
    sums_of,
    to_histogram,
)

ENDS = (0, 3, 4, 1019, 1020, 1023, 1024, 1027, 1028, 2043, 2044, 2047)

COUNTS = st.lists(
    st.dictionaries(st.one_of(st.sampled_from(ENDS), st.integers(0, BINS - 1)), st.integers(1, 2**40), max_size=150),
    max_size=6,
)


def dense(counts: list[dict[int, int]]) -> Tensor:
    """Return the counts of several histograms, ``[histograms, 2048]``."""
    found = torch.zeros(len(counts), BINS, dtype=torch.int64)
    for row, each in enumerate(counts):
        for place, count in each.items():
            found[row, place] = count
    return found


def alone(counts: Tensor) -> Histogram:
    """Return one histogram."""
    return to_histogram({"count": 1.0, "mean": 1.0, "rms": 1.0, "min": 1.0, "max": 1.0}, counts)


def packed(counts: Tensor) -> bytes:
    """Return the pairs of gap and count of one histogram in LEB128, byte by byte."""
    found, before = bytearray(), -1
    for place in counts.nonzero().flatten().tolist():
        for number in (place - before - 1, int(counts[place])):
            while number > 127:
                found.append(number & 127 | 128)
                number >>= 7
            found.append(number)
        before = place
    return bytes(found)


@given(
    counts=COUNTS,
    order=st.randoms(use_true_random=False),
    most=st.sampled_from([1, 2, 3, 64]),
    left_out=st.integers(0, 3),
    entries=st.sampled_from([1, 20, 1 << 15]),
)
def test_many_histograms_equal_single_ones(
    counts: list[dict[int, int]], order: object, most: int, left_out: int, entries: int
) -> None:
    """Packed, coarsened and dense histograms equal those made one by one, in any order and selection of the rows.

    This holds however many entries are encoded at a time, and whether or not a selection is encoded on its own.
    """
    rows = list(range(len(counts)))
    order.shuffle(rows)  # type: ignore[attr-defined]  # a random.Random
    rows = rows[left_out:]
    expected = dense(counts)[rows]
    found = SparseCounts(dense(counts).double().numpy()).take(np.array(rows, dtype=np.int64))
    assert len(found) == len(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts_module, "_MOST_ENTRIES", entries)
        patch.setattr(counts_module, "_FEW_ROWS", 1)
        assert found.packed() == [packed(each) for each in expected]
        coarse = found.coarsened(most)
    for row, each in enumerate(expected):
        assert torch.equal(found.dense(row), each)
        one = alone(each).coarsened(most)
        assert coarse[row].total == one.count
        assert np.frombuffer(coarse[row].limits).tolist() == (one.edges[1:].tolist() if one.count else [])
        assert np.frombuffer(coarse[row].counts).tolist() == (one.counts.tolist() if one.count else [])


@pytest.mark.parametrize("seed", range(3))
def test_histograms_of_usual_sizes(seed: int) -> None:
    """If removals of edges lose the same, they are made in the order of the histogram of a single site."""
    generator = torch.Generator().manual_seed(seed)
    states = []
    for scale in (1e-3, 1.0, 50.0):
        statistics = Statistics()
        statistics.update((torch.randn(3000, generator=generator) * scale).round(decimals=2))
        states.append(statistics.compute()["histogram"])
    states.append(torch.ones(BINS, dtype=torch.float64))
    counts = torch.stack(states)
    coarse = SparseCounts(counts.numpy()).coarsened(64)
    for row, each in enumerate(counts):
        one = alone(each.long()).coarsened(64)
        assert np.frombuffer(coarse[row].limits).tolist() == one.edges[1:].tolist()
        assert np.frombuffer(coarse[row].counts).tolist() == one.counts.tolist()


def test_tagged_histograms_are_a_mapping() -> None:
    """A sink that reads one histogram after the other gets those of the sites."""
    statistics = [Statistics(), Statistics()]
    statistics[0].update(torch.tensor([1.0, -2.0, 0.0]))
    found = [{name: float(value) for name, value in each.compute().items() if value.dim() == 0} for each in statistics]
    bins = torch.stack([each.compute()["histogram"].long() for each in statistics])
    values = np.array([[each.get(name, np.nan) for name in SUMMED] for each in found])
    histograms = TaggedHistograms(["a", "b"], SparseCounts(bins.numpy()), sums_of(values))
    assert list(histograms) == ["a", "b"]
    for tag, scalars, counts in zip(histograms, found, bins, strict=True):
        assert repr(histograms[tag]) == repr(to_histogram(scalars, counts))

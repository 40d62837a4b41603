"""Tests of the text encoding of histogram counts."""

from __future__ import annotations

import base64
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder import ArgumentError, DumpError
from lightning_recorder.bins import BINS
from lightning_recorder.recordings.record_format import pack_counts, unpack_counts
from lightning_recorder.reductions import ExponentHistogram, Statistics


def bins_of(tensor: torch.Tensor) -> torch.Tensor:
    statistics = Statistics()
    statistics.update(tensor)
    return statistics.compute()["histogram"].long()


def text_of(packed: bytes) -> str:
    return base64.b64encode(zlib.compress(packed)).decode()


def test_the_bins_are_those_of_the_reduction() -> None:
    """The number of bins is that of ``ExponentHistogram``."""
    assert ExponentHistogram().width == BINS


@given(counts=st.dictionaries(st.integers(0, BINS - 1), st.integers(0, 2**63 - 1), max_size=60))
def test_any_counts_come_back(counts: dict[int, int]) -> None:
    """Unpacking restores the packed counts, up to the largest int64."""
    bins = torch.zeros(BINS, dtype=torch.int64)
    for place, count in counts.items():
        bins[place] = count
    assert torch.equal(unpack_counts(pack_counts(bins)), bins)


def test_the_largest_histogram_comes_back() -> None:
    """A histogram with the largest count in every bin, which has the longest text, is restored."""
    bins = torch.full((BINS,), 2**63 - 1)
    assert torch.equal(unpack_counts(pack_counts(bins)), bins)


def test_the_format_is_fixed() -> None:
    """The encoding is stable: gaps and counts with seven bits per byte, so that old files remain readable."""
    bins = torch.zeros(BINS, dtype=torch.int64)
    bins[[3, 4, 1000]] = torch.tensor([1, 300, 127])
    # 3, 1; 0, 300 = 44 + 2 * 128; 995 = 99 + 7 * 128, 127
    assert zlib.decompress(base64.b64decode(pack_counts(bins))) == bytes([3, 1, 0, 172, 2, 227, 7, 127])


@pytest.mark.parametrize(
    ("tensor", "most"),
    [
        (torch.zeros(100), 20),
        (torch.randn(65536, generator=torch.Generator().manual_seed(0)), 340),
        (torch.randn(65536, generator=torch.Generator().manual_seed(0)).relu(), 210),
    ],
    ids=["zeros", "normal", "relu"],
)
def test_histograms_are_small(tensor: torch.Tensor, most: int) -> None:
    """The histogram of a typical layer takes a few hundred characters instead of 16 KB."""
    assert len(pack_counts(bins_of(tensor))) <= most


@pytest.mark.parametrize(
    "bins",
    [
        torch.zeros(BINS - 1, dtype=torch.int64),
        torch.zeros(BINS, dtype=torch.int32),
        torch.zeros(BINS, dtype=torch.float64),
        torch.zeros(1, BINS, dtype=torch.int64),
        torch.full((BINS,), -1),
    ],
    ids=["short", "int32", "float64", "2d", "negative"],
)
def test_what_are_no_counts(bins: torch.Tensor) -> None:
    """Packing rejects other shapes, other dtypes and negative counts."""
    with pytest.raises(ArgumentError):
        pack_counts(bins)


@pytest.mark.parametrize(
    "text",
    [
        None,
        3,
        ["a"],
        "",
        "no base64!",
        "é",
        "AAAA",
        text_of(b"")[:-4],
        text_of(bytes([3])),
        text_of(bytes([3, 200])),
        text_of(bytes([255, 255, 1, 1])),
        text_of(bytes([255] * 9 + [1]) * 2),
        text_of(bytes([0, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1])),
        text_of(bytes(BINS * 2 + 2)),
        base64.b64encode(zlib.compress(bytes([3, 1])) + b"more").decode(),
        "A" * 10**6,
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_what_is_no_histogram(text: object) -> None:
    """Invalid, truncated, out-of-range and overflowing texts raise DumpError."""
    with pytest.raises(DumpError, match="not a histogram"):
        unpack_counts(text)


def test_a_bomb_takes_no_memory() -> None:
    """A short text that would decompress to a gigabyte is rejected after a few kilobytes."""
    import tracemalloc

    compressor = zlib.compressobj(9)
    bomb = b"".join(compressor.compress(bytes(1 << 20)) for _ in range(30)) + compressor.flush()
    text = base64.b64encode(bomb).decode()
    tracemalloc.start()
    with pytest.raises(DumpError):
        unpack_counts(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 19

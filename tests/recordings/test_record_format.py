"""Tests of the format of records and of histogram counts."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_recorder import ArgumentError, DumpError
from lightning_recorder.bins import BINS
from lightning_recorder.recordings import RecordWriter, open_recording, records_path
from lightning_recorder.records.counts import unpack_counts
from lightning_recorder.reductions import ExponentHistogram, Statistics
from tests.recordings.runs import site_of
from tests.records.packed import pack_counts


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


def test_files_of_the_first_version_are_read(tmp_path: Path) -> None:
    """A file of the first format is read to the bit, and continues in the present format."""
    records = tmp_path / "recorder" / "records"
    records.mkdir(parents=True)
    shutil.copy(Path(__file__).parent / "old" / "version_1.jsonl", records / "activations.jsonl")
    bins = torch.zeros(BINS, dtype=torch.int64)
    bins[[0, 507, 1300, 2047]] = torch.tensor([3, 1007, 2**40, 1])
    for _ in range(2):
        series = open_recording(tmp_path)["activations"]
        conv, fc = series["conv"], series["blocks.0.fc"]
        assert (series.skipped, [site.name for site in series.sites]) == (0, ["conv", "blocks.0.fc"])
        assert (series.about(7)["epoch"], series.about(7)["ranks"], conv.shape, fc.dtype) == (1, 2, (2, 3), "bfloat16")
        assert repr(conv.scalars(7)) == "{'mean': 0.8, 'max': inf, 'min': -0.0}"
        assert repr(fc.scalars(7)) == "{'mean': nan, 'max': nan, 'min': 5e-324, 'skewness': -inf}"
        assert torch.equal(conv.bins(7), bins)
        assert not fc.bins(7).any()
        assert series.of("validate", 1)[""].scalars(7) == {"mean": 1.0}
        with pytest.raises(ArgumentError, match="without a histogram"):
            series.of("validate", 1)[""].bins(7)
        writer = RecordWriter(records / "activations.jsonl")  # the second time, the file has both formats
        writer.begin(label="activations", group="activations")
        writer.write({"step": 9, "epoch": 2}, [site_of("conv", "out", {"mean": 5.0}, bins, "float32", (2, 3))])
    assert open_recording(tmp_path)["activations"].steps == [0, 7, 9]
    assert torch.equal(open_recording(tmp_path)["activations"]["conv"].bins(9), bins)


def test_statistics_apart_from_the_columns_are_read(tmp_path: Path) -> None:
    """In files of older versions, a statistic that only some sites have is apart, and the others lack it."""
    path = records_path(tmp_path / "recorder", "activations")
    writer = RecordWriter(path)
    writer.begin(label="activations", group="activations")
    writer.write({"step": 0}, [site_of(name, "out", {"rms": 1.0}) for name in ("fc", "head")])
    header, line = path.read_bytes().splitlines()
    found = {**json.loads(line), "further": {"1": {"skewness": "-inf"}}}
    path.write_bytes(b"\n".join((header, json.dumps(found).encode(), b"")))
    series = open_recording(tmp_path)["activations"]
    assert series.statistics == ["rms", "skewness"]
    assert series["fc"].scalars(0) == {"rms": 1.0}
    assert series["head"].scalars(0) == {"rms": 1.0, "skewness": -float("inf")}


def test_the_values_of_many_sites_are_packed(tmp_path: Path) -> None:
    """They take less than half of the bytes, are restored to the bit, and are read in the older form as well."""
    path = records_path(tmp_path / "recorder", "activations")
    shown = {"rms": 0.1, "min": -0.0, "max": float("inf"), "nan_count": 0.0, "ratio": float("nan")}
    sites = [site_of(f"blocks.{place}", "out", {**shown, "mean": place / 7}) for place in range(40)]
    RecordWriter(path).write({"step": 0}, sites)
    line = json.loads(path.read_text())
    numbers = zlib.decompress(base64.b64decode(line["packed"]))
    expected = [value for place in range(40) for value in (*shown.values(), place / 7)]
    assert numbers == struct.pack(f"<{len(expected)}d", *expected)
    assert "values" not in line
    assert len(line["packed"]) < len(base64.b64encode(numbers)) / 2
    older = {**line, "step": 1, "values": base64.b64encode(numbers).decode()}
    del older["packed"]
    path.write_text(f"{json.dumps(line)}\n{json.dumps(older)}\n")
    series = open_recording(tmp_path)["activations"]
    assert series.steps == [0, 1]
    for step in series.steps:
        assert [repr(value) for value in series["blocks.39"].scalars(step).values()] == list(map(repr, expected[-6:]))


@pytest.mark.parametrize("value", ["no base64!", "AAAA", 3, text_of(bytes(8)), text_of(bytes(10**6))])
def test_damaged_values_are_skipped(value: object, tmp_path: Path) -> None:
    """A line whose values cannot be decompressed, or are too many or too few, is skipped without taking much memory."""
    path = records_path(tmp_path / "recorder", "activations")
    writer = RecordWriter(path)
    for step in range(2):
        writer.write({"step": step}, [site_of(f"blocks.{place}", "out", {"rms": 1.0}) for place in range(64)])
    line, last = path.read_bytes().splitlines()
    path.write_bytes(json.dumps({**json.loads(line), "packed": value}).encode() + b"\n" + last + b"\n")
    series = open_recording(tmp_path)["activations"]
    assert (series.steps, series.skipped) == ([1], 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("values", "AAAA"),
        ("values", None),
        ("sizes", [1]),
        ("further", {"2": {"a": 1.0}}),
        ("further", {"0": {"a": "one"}}),
        ("layout", [["fc", "out", None, None]] * 2),
        ("layout", [["fc", "out"]]),
        ("layout", "no base64!"),
        ("layout", text_of(b"[")),
        ("layout", text_of(b"2")),
        ("layout", text_of(b"[" * 100_000)),
        ("layout", text_of(b'[["fc", "out", null, null]]')),
        ("columns", ["rms", "rms"]),
    ],
)
def test_a_damaged_line_is_skipped(field: str, value: object, tmp_path: Path) -> None:
    """A line whose parts do not fit together is skipped and counted."""
    path = records_path(tmp_path / "recorder", "activations")
    writer = RecordWriter(path)
    writer.begin(label="activations", group="activations")
    for step in range(2):
        writer.write({"step": step}, [site_of(name, "out", {"rms": 1.0}) for name in ("fc", "head")])
    header, line, last = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join((header, json.dumps({**json.loads(line), field: value}).encode(), last, b"")))
    series = open_recording(tmp_path)["activations"]
    assert (series.steps, series.skipped) == ([1], 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sizes", [-1]),
        ("sizes", [10**6]),
        ("sizes", ["1"]),
        ("sizes", [3]),
        ("bins", "no base64!"),
        ("bins", text_of(bytes(10**6))),
        ("bins", ""),
    ],
)
def test_damaged_histograms_of_a_line(field: str, value: object, tmp_path: Path) -> None:
    """Histograms that do not have the stated sizes raise an error, and the scalars are read."""
    path = records_path(tmp_path / "recorder", "activations")
    bins = torch.zeros(BINS, dtype=torch.int64)
    bins[3] = 4
    writer = RecordWriter(path)
    writer.write({"step": 0}, [site_of("fc", "out", {"rms": 1.0}, bins)])
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}) + "\n")
    series = open_recording(tmp_path)["activations"]
    assert series["fc"].scalars(0) == {"rms": 1.0}
    with pytest.raises(DumpError):
        series["fc"].bins(0)

"""Tests of the record writer, with each line parsed as JSON."""

from __future__ import annotations

import base64
import copy
import json
import math
import os
import pickle
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lightning_recorder
from lightning_recorder import ArgumentError, RecorderWarning
from lightning_recorder.recordings import RecordWriter, Schema, Table, open_recording, records_path
from lightning_recorder.records import file as file_module
from lightning_recorder.taps import Site
from tests.disks import files_up_to
from tests.recordings.runs import site_of


def lines(path: Path) -> list[Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="ascii").splitlines()]


def begun(path: Path) -> RecordWriter:
    writer = RecordWriter(path)
    writer.begin(label="activations", group="activations")
    return writer


def test_a_header_says_who_writes(tmp_path: Path) -> None:
    """The first line contains format, label, group, name, session, ranks, versions and time."""
    writer = RecordWriter(tmp_path / "a.jsonl")
    assert (
        writer.begin(label="gradients-slow", group="gradients", name="slow", ranks=2, versions={"lightning": "2"}) == 1
    )
    (header,) = lines(tmp_path / "a.jsonl")
    assert header.pop("time") == pytest.approx((tmp_path / "a.jsonl").stat().st_mtime, abs=60)
    versions = header.pop("versions")
    assert header == {
        "format": "lightning_recorder.records/3",
        "label": "gradients-slow",
        "group": "gradients",
        "name": "slow",
        "session": 1,
        "ranks": 2,
    }
    assert versions["torch"] == torch.__version__
    assert (versions["lightning_recorder"], versions["lightning"]) == (lightning_recorder.__version__, "2")


def test_a_record_is_a_line(tmp_path: Path) -> None:
    """A record has its columns, sites, numbers and histograms once each; a site lacks a statistic as NaN."""
    writer = begun(tmp_path / "a.jsonl")
    bins = torch.zeros(2048, dtype=torch.int64)
    bins[[5, 7]] = torch.tensor([3, 300])
    sites = [
        site_of("conv", "out", {"mean": 0.1, "max": math.inf}, bins, "float32", (2, 3)),
        site_of("", "out[1]", {"mean": -0.0, "skewness": -math.inf}),
    ]
    writer.write({"step": 3, "epoch": 1, "stage": "train", "loader": None, "flush_ms": 0.5, "time": 7.0}, sites)
    line = lines(tmp_path / "a.jsonl")[1]
    numbers = struct.unpack("<6d", base64.b64decode(line.pop("values")))
    assert [repr(number) for number in numbers] == ["0.1", "inf", "nan", "-0.0", "nan", "-inf"]
    # gap 5, count 3, gap 1, count 300 = 44 + 2 * 128
    assert zlib.decompress(base64.b64decode(line.pop("bins"))) == bytes([5, 3, 1, 172, 2])
    assert line == {
        "time": 7.0,
        "step": 3,
        "epoch": 1,
        "stage": "train",
        "loader": None,
        "flush_ms": 0.5,
        "columns": ["mean", "max", "skewness"],
        "sizes": [5, None],
        "layout": [["conv", "out", "float32", [2, 3]], ["", "out[1]", None, None]],
    }


def test_a_long_layout_is_compressed(tmp_path: Path) -> None:
    """The layout of many sites is base64 of zlib of its JSON, which is much shorter, and is read like a plain one."""
    sites = [site_of(f"blocks.{place}.linear", "out", {"rms": 1.0}, None, "float32", (8, 2)) for place in range(200)]
    begun(tmp_path / "recorder" / "records" / "a.jsonl").write({"step": 3}, sites)
    path = tmp_path / "recorder" / "records" / "a.jsonl"
    line = lines(path)[1]
    plain = [[f"blocks.{place}.linear", "out", "float32", [8, 2]] for place in range(200)]
    assert json.loads(zlib.decompress(base64.b64decode(line["layout"]))) == plain
    assert 10 * len(line["layout"]) < len(json.dumps(plain))
    series = open_recording(tmp_path)["activations"]
    assert [site.name for site in series.sites] == [name for name, *_ in plain]
    header = path.read_bytes().splitlines()[0]
    path.write_bytes(header + b"\n" + json.dumps({**line, "layout": plain}).encode() + b"\n")
    assert open_recording(tmp_path)["activations"].sites == series.sites


def test_several_records_are_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that are written together are one line each, in order, with a single system call."""
    writer = begun(tmp_path / "a.jsonl")
    written: list[bytes] = []
    write = os.write

    def watched(descriptor: int, data: bytes) -> int:
        written.append(data)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    tables = [Table.of([site_of("fc", "out", {"rms": 0.5 * step})]) for step in range(3)]
    writer.write_all(({"step": step}, table) for step, table in enumerate(tables))
    assert len(written) == 1
    assert [line["step"] for line in lines(tmp_path / "a.jsonl")[1:]] == [0, 1, 2]


def test_records_of_numbers_are_those_of_write_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that are written by a template have the fields and values of records that are written one by one."""
    monkeypatch.setattr("time.time", lambda: 1.5)
    layout = Schema((Site("loss", "out"), Site("values", "out")), ("values",), (None, None), (None, None))
    values = [(0.1, -0.0), (math.nan, math.inf), (5e-324, -math.inf)]
    rows = [(step, step // 2, struct.pack("<2d", *each)) for step, each in enumerate(values)]
    begun(tmp_path / "a.jsonl").write_numbers(layout, rows)
    begun(tmp_path / "b.jsonl").write_all(
        (
            {"step": step, "epoch": epoch, "stage": "train", "loader": None},
            Table(layout, np.frombuffer(packed, dtype="<f8").reshape(2, 1)),
        )
        for step, epoch, packed in rows
    )
    assert lines(tmp_path / "a.jsonl") == lines(tmp_path / "b.jsonl")
    assert len(lines(tmp_path / "a.jsonl")) == 4


def test_written_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    """The byte count of the writer equals the file size."""
    writer = begun(tmp_path / "a.jsonl")
    writer.write({"step": 0}, [site_of("fc", "out", {"rms": 0.5})])
    assert writer.written_bytes == (tmp_path / "a.jsonl").stat().st_size


@pytest.mark.parametrize("chunk", [1, 7, 10, 25, 1 << 20])
@pytest.mark.parametrize("torn", [b"", b'{"format": 1', b'{"form', b'{"step": 1}'])
def test_headers_are_counted_in_pieces(
    chunk: int, torn: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a file is divided, each complete header counts once; text inside of a record and a torn line do not."""
    monkeypatch.setattr(file_module, "_CHUNK", chunk)
    lines = [b'{"format": 1}', b'{"step": 0, "x": {"format": 2}}', b"", b'{"format": 3}', b'{"format": 4}']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + torn)
    assert RecordWriter(path).begin(label="a", group="activations") == 4


def test_sessions_are_counted_in_the_file(tmp_path: Path) -> None:
    """A second writer of the same file starts session 2."""
    begun(tmp_path / "a.jsonl").write({"step": 0}, [])
    assert RecordWriter(tmp_path / "a.jsonl").begin(label="activations", group="activations") == 2
    assert [line.get("session") for line in lines(tmp_path / "a.jsonl")] == [1, None, 2]


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_line_is_ended_first(cut: int, tmp_path: Path) -> None:
    """A torn line left by a killed run does not corrupt the next record."""
    path = tmp_path / "a.jsonl"
    begun(path).write({"step": 0}, [site_of("fc", "out", {"rms": 0.5})])
    path.write_bytes(path.read_bytes()[:-cut])
    RecordWriter(path).write({"step": 1}, [])
    *_, last = path.read_bytes().splitlines()
    assert json.loads(last)["step"] == 1
    assert path.read_bytes().count(b"\n") == 3


def test_a_record_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is written with a single system call, even after a torn line."""
    path = tmp_path / "a.jsonl"
    path.write_text("torn")
    written: list[bytes] = []
    write = os.write

    def watched(descriptor: int, data: bytes) -> int:
        written.append(data)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    RecordWriter(path).write({"step": 0}, [site_of(f"fc{index}", "out", {"rms": 0.5}) for index in range(2000)])
    assert len(written) == 1
    assert path.read_bytes() == b"torn" + written[0]
    assert written[0].startswith(b"\n{")


@pytest.mark.parametrize("header", [True, False])
def test_a_full_disk(header: bool, tmp_path: Path) -> None:
    """A record that does not fit on the disk is skipped with one warning, and a skipped header is written later."""
    path = tmp_path / "a.jsonl"
    writer = RecordWriter(path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with files_up_to(1000 if header else 100):
            writer.begin(label="a", group="a")
            name = "".join(map(str, range(400)))  # long, also if it is compressed
            for step in range(3):
                writer.write({"step": step}, [site_of(name, "out", {"rms": 0.5})])
        writer.write({"step": 3}, [])
    assert [line.get("step") for line in lines(path)] == [None, 3]
    assert writer.written_bytes == path.stat().st_size
    (message,) = [str(each.message) for each in warned if each.category is RecorderWarning]
    assert message.startswith(f"lightning_recorder could not write to {path}: [Errno 27] File too large. ")


def test_half_of_a_surrogate_pair(tmp_path: Path) -> None:
    """A name with a lone surrogate is restored unchanged."""
    writer = begun(tmp_path / "a.jsonl")
    writer.write({"step": 0}, [site_of("a\ud800b", "out", {"\udfff": 1.0})])
    line = lines(tmp_path / "a.jsonl")[1]
    assert (line["layout"][0][0], line["columns"]) == ("a\ud800b", ["\udfff"])


def test_a_name_with_newlines_is_one_line(tmp_path: Path) -> None:
    """A record is one line, whatever characters a name contains."""
    writer = begun(tmp_path / "a.jsonl")
    writer.write({"step": 0}, [site_of("a\nb\r\u2028\x85\0", "out\n", {"rms\n": 1.0})])
    assert len((tmp_path / "a.jsonl").read_bytes().splitlines()) == 2


def test_a_writer_can_be_copied(tmp_path: Path) -> None:
    """Copied and pickled writers append to the same file."""
    writer = begun(tmp_path / "a.jsonl")
    for each in (copy.deepcopy(writer), pickle.loads(pickle.dumps(writer))):
        each.write({"step": 1}, [])
    assert len(lines(tmp_path / "a.jsonl")) == 3


def test_bins_that_are_none(tmp_path: Path) -> None:
    """A record with invalid bins leaves the file unchanged."""
    writer = begun(tmp_path / "a.jsonl")
    before = (tmp_path / "a.jsonl").read_bytes()
    with pytest.raises(ArgumentError, match="2048"):
        writer.write({"step": 0}, [site_of("fc", "out", {"rms": 0.5}, torch.zeros(3, dtype=torch.int64))])
    assert (tmp_path / "a.jsonl").read_bytes() == before


LABELS = [
    "../../x",
    "/etc/passwd",
    "..",
    ".",
    "",
    "a/b",
    "a\\b",
    "C:x",
    "nul\0",
    "new\nline",
    "名前",
    "\ud800",
    "x" * 400,
]


@pytest.mark.parametrize("label", LABELS, ids=lambda label: ascii(label)[:20])
def test_a_label_is_no_path(label: str, tmp_path: Path) -> None:
    """The file of any label lies in the record folder and can be written."""
    path = records_path(tmp_path, label)
    assert path.parent == tmp_path / "records"
    RecordWriter(path).begin(label=label, group="activations")
    assert [each.name for each in (tmp_path / "records").iterdir()] == [path.name]
    assert lines(path)[0]["label"] == label


def test_two_labels_are_two_files() -> None:
    """Labels that differ only in capitals or in characters invalid in file names have different files."""
    labels = ["a b", "a_b", "a/b", "A_B", "a_b.", "x" * 400, "x" * 401]
    assert len({records_path("r", label).name.lower() for label in labels}) == len(labels)

"""Tests of reading lines from a growing file, and of the conversion of records to rows and data frames."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lightning_recorder import ArgumentError
from lightning_recorder.recordings import RecordWriter, open_recording, reader, records_path
from lightning_recorder.recordings.reader import Tail
from tests.recordings.runs import site_of


def test_lines_come_once(tmp_path: Path) -> None:
    """Each complete line is returned once with its offset; a torn line is returned when it is complete."""
    path = tmp_path / "a"
    reader = Tail(path)
    assert list(reader.lines()) == []
    path.write_bytes(b"one\ntw")
    assert list(reader.lines()) == [(0, b"one")]
    assert list(reader.lines()) == []
    with path.open("ab") as file:
        file.write(b"o\n\nthree\n")
    assert list(reader.lines()) == [(4, b"two"), (8, b""), (9, b"three")]
    assert reader.line_at(4) == b"two\n"


def test_a_file_that_was_written_anew(tmp_path: Path) -> None:
    """A file that is gone, or shorter than the part already read, counts as replaced."""
    path = tmp_path / "a"
    path.write_bytes(b"one\ntwo\n")
    reader = Tail(path)
    found = [reader.is_replaced]
    list(reader.lines())
    found.append(reader.is_replaced)
    path.write_bytes(b"x\n")
    found.append(reader.is_replaced)
    path.unlink()
    found.append(reader.is_replaced)
    assert found == [False, False, True, True]


@pytest.mark.parametrize("length", [15, 16, 17, 100])
def test_a_line_that_is_too_long(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An overlong line is returned as an empty line, and the lines after it are read."""
    monkeypatch.setattr(reader, "_LONGEST_LINE", 16)
    monkeypatch.setattr(reader, "_PIECE", 7)
    path = tmp_path / "a"
    path.write_bytes(b"x" * length + b"\nnext\n" + b"y" * length)
    expected = b"x" * length if length < 16 else b""
    assert list(Tail(path).lines()) == [(0, expected), (length + 1, b"next")]


ROWS = [
    [0, 0, "train", None, "fc", "out", "float32", 1.0, math.nan],
    [0, 0, "train", None, "head", "out", None, 2.0, 3.0],
    [5, 1, "validate", 1, "fc", "out", "float32", math.inf, None],
]
COLUMNS = ["step", "epoch", "stage", "loader", "module", "path", "dtype", "rms", "more"]


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """A run with one record in each of two stages."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    fc = site_of("fc", "out", {"rms": 1.0}, dtype="float32")
    writer.write({"step": 0, "epoch": 0}, [fc, site_of("head", "out", {"rms": 2.0, "more": 3.0})])
    fc = site_of("fc", "out", {"rms": math.inf}, dtype="float32")
    writer.write({"step": 5, "epoch": 1, "stage": "validate", "loader": 1}, [fc])
    return tmp_path


def test_rows(log_dir: Path) -> None:
    """There is one row per step and site of all stages, training first.

    A statistic that no site of a record has is None, and one that a site lacks is NaN.
    """
    series = open_recording(log_dir)["activations"]
    assert reader.columns_of([series.parts]) == ["rms", "more"]
    assert repr(list(reader.rows_of(series.parts, ["rms", "more"]))) == repr(ROWS)


def test_a_frame(log_dir: Path) -> None:
    """The frame has the same rows with numeric dtypes; the frame of a stage has only the rows of that stage."""
    pytest.importorskip("pandas")
    frame = open_recording(log_dir)["activations"].frame()
    assert list(frame.columns) == COLUMNS
    assert [str(frame[name].dtype) for name in ("step", "loader", "rms", "more")] == ["int64", "Int64"] + [
        "float64"
    ] * 2
    assert frame["rms"].tolist() == [1.0, 2.0, math.inf]
    assert frame["more"].isna().tolist() == [True, False, True]
    assert frame["loader"].isna().tolist() == [True, True, False]
    assert open_recording(log_dir)["activations"].of("validate").frame()["step"].tolist() == [5]


def test_no_pandas(log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If pandas is missing, the error says how to install it."""
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ArgumentError, match="a frame needs pandas: pip install pandas"):
        open_recording(log_dir)["activations"].frame()


def test_a_statistic_called_like_a_column(tmp_path: Path) -> None:
    """A statistic with the name of another column raises an error."""
    pytest.importorskip("pandas")
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.write({"step": 0}, [site_of("fc", "out", {"step": 1.0})])
    with pytest.raises(ArgumentError, match="two columns of a frame have one name"):
        open_recording(tmp_path)["activations"].frame()


@pytest.mark.parametrize(
    ("steps", "every", "kept"),
    [
        (12, 1, [6, 11, 23]),  # steps 12 to 23
        (4, 3, [6, 11, 23]),
        (1, 1, [6, 11, 16, 23]),  # a record of one step replaces no other one
        (12, 50, [6, 11, 23]),  # the interval has just been raised
    ],
)
def test_a_record_of_several_steps_replaces_those_of_an_earlier_session(
    steps: int, every: int, kept: list[int], tmp_path: Path
) -> None:
    """Only records of the steps that it covers are replaced, and none of its own session."""
    path = records_path(tmp_path / "recorder", "activations")
    usual = 3 if every == 3 else 1
    for session in ([(6, 2, usual), (11, 2, usual), (16, 2, usual)], [(23, steps, every), (35, 30, every)]):
        writer = RecordWriter(path)
        writer.begin(label="activations", group="activations")
        for step, number, interval in session:
            about = {"step": step, "steps": number, "every_n_train_steps": interval}
            writer.write(about, [site_of("fc", "out", {"mean": 1.0})])
            if step == 23:
                assert open_recording(tmp_path).run["activations"].steps == kept
    assert 23 in open_recording(tmp_path).run["activations"].steps

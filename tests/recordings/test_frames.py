"""Tests of the conversion of records to data frames."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lightning_recorder import ArgumentError
from lightning_recorder.recordings import RecordWriter, SiteRecord, frames, open_recording, records_path

ROWS = [
    [0, 0, "train", None, "fc", "out", "float32", 1.0, None],
    [0, 0, "train", None, "head", "out", None, 2.0, 3.0],
    [5, 1, "validate", 1, "fc", "out", "float32", math.inf, None],
]
COLUMNS = ["step", "epoch", "stage", "loader", "module", "path", "dtype", "rms", "more"]


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """A run with one record in each of two stages."""
    writer = RecordWriter(records_path(tmp_path / "recorder", "activations"))
    writer.begin(label="activations", group="activations")
    fc = SiteRecord("fc", "out", {"rms": 1.0}, dtype="float32")
    writer.write({"step": 0, "epoch": 0}, [fc, SiteRecord("head", "out", {"rms": 2.0, "more": 3.0})])
    fc = SiteRecord("fc", "out", {"rms": math.inf}, dtype="float32")
    writer.write({"step": 5, "epoch": 1, "stage": "validate", "loader": 1}, [fc])
    return tmp_path


def test_rows(log_dir: Path) -> None:
    """There is one row per step and site of all stages, training first; missing values are None."""
    series = open_recording(log_dir)["activations"]
    assert frames.columns_of([series.parts]) == ["rms", "more"]
    assert list(frames.rows_of(series.parts, ["rms", "more"])) == ROWS


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
    writer.write({"step": 0}, [SiteRecord("fc", "out", {"step": 1.0})])
    with pytest.raises(ArgumentError, match="two columns of a frame have one name"):
        open_recording(tmp_path)["activations"].frame()

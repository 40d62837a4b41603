"""Tests of the CSV sink, based on the logger's file as read by Python's csv module."""

from __future__ import annotations

import csv
import locale
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_recorder import ActivationRecorder, MemorySink, Outputs
from lightning_recorder.sinks import CsvSink, FilesSink, MultiSink
from tests.callbacks.models import Classifier, fit
from tests.disks import files_up_to
from tests.sinks.events import read_events
from tests.sinks.samples import ODD_TAGS, histogram, same_value


def csv_logger(folder: Path, **options: Any) -> Any:
    return CSVLogger(folder, **options)


def read_rows(logger: Any) -> list[dict[str, str]]:
    """Return the rows without empty cells; every row has a cell for each column."""
    return read_table(Path(logger.log_dir, "metrics.csv"), locale.getpreferredencoding(False))


def read_table(path: Path, encoding: str = "utf-8") -> list[dict[str, str]]:
    with path.open(newline="", encoding=encoding) as file:
        header, *rows = list(csv.reader(file))
    assert len(set(header)) == len(header)
    return [{key: cell for key, cell in zip(header, row, strict=True) if cell} for row in rows]


def test_columns_that_come_late(tmp_path: Path) -> None:
    """A new or rare column does not change the other rows, including those of the user."""
    logger = csv_logger(tmp_path, flush_logs_every_n_steps=2)
    sink = CsvSink(logger)
    for step in range(9):
        logger.log_metrics({"loss": step / 8, **({"val_loss": 0.25} if step == 4 else {})}, step=step)
        sink.write_scalars(step, {"a/mean": -step / 8, **({"a/nan_count": 1.0} if step >= 5 else {})})
        if step % 3 == 0:
            sink.flush()
    logger.finalize("success")
    rows = read_rows(logger)
    own = [row for row in rows if "loss" in row]
    assert own == [
        {"loss": str(step / 8), "step": str(step), **({"val_loss": "0.25"} if step == 4 else {})} for step in range(9)
    ]
    assert [row for row in rows if "loss" not in row] == [
        {"a/mean": str(-step / 8), "step": str(step), **({"a/nan_count": "1.0"} if step >= 5 else {})}
        for step in range(9)
    ]


def test_numbers_come_back(tmp_path: Path) -> None:
    """Each number is read back bit-exactly, including nonfinite ones."""
    values = {"a": 0.1, "b": math.nan, "c": -math.inf, "d": 5e-324, "e": np.float32(0.1).item()}
    logger = csv_logger(tmp_path)
    with CsvSink(logger) as sink:
        sink.write_scalars(3, values)
    (row,) = read_rows(logger)
    assert all(same_value(float(row[tag]), value) for tag, value in values.items())


def test_odd_tags_are_columns_of_their_own(tmp_path: Path) -> None:
    """Every tag has its own column, under its own name except for the column reserved by the logger."""
    logger = csv_logger(tmp_path)
    with CsvSink(logger) as sink:
        sink.write_scalars(7, {tag: float(place) for place, tag in enumerate(ODD_TAGS)})
    expected = {tag: str(float(place)) for place, tag in enumerate(ODD_TAGS)}
    expected["(step)"] = expected.pop("step")
    assert read_rows(logger) == [{**expected, "step": "7"}]


@pytest.mark.parametrize(
    ("encoding", "tag", "column"),
    [
        ("utf-8", "a\0b", r"a\x00b"),
        ("utf-8", "a\ud800", r"a\ud800"),
        ("ascii", "größe", r"gr\xf6\xdfe"),
        ("cp1252", "größe/層", r"größe/\u5c64"),
    ],
)
def test_tags_that_the_file_cannot_hold(
    encoding: str, tag: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character that would make the logger raise at each of the user's rows is escaped."""
    monkeypatch.setattr(locale, "getpreferredencoding", lambda do_setlocale=True: encoding)
    logger = csv_logger(tmp_path)
    sink = CsvSink(logger)
    sink.write_scalars(3, {tag: 0.5})
    sink.flush()
    logger.log_metrics({"late": 1.0}, step=4)
    logger.finalize("success")
    text = Path(logger.log_dir, "metrics.csv").read_bytes().decode("utf-8")
    assert text.splitlines() == [f"{column},late,step", "0.5,,3", ",1.0,4"]


def test_a_second_fit_appends(tmp_path: Path) -> None:
    """A second fit with the same logger keeps the rows of the first and may add columns."""
    logger = csv_logger(tmp_path)
    for step, values in ((0, {"a": 0.5}), (1, {"a": 0.25, "b": 1.0})):
        with CsvSink(logger) as sink:
            sink.write_scalars(step, values)
        logger.finalize("success")
    assert read_rows(logger) == [{"a": "0.5", "step": "0"}, {"a": "0.25", "b": "1.0", "step": "1"}]


def test_a_resume_into_the_same_version(tmp_path: Path) -> None:
    """Lightning's logger restarts its file with a warning before any sink exists; the later rows are complete."""
    first = csv_logger(tmp_path, version=0)
    with CsvSink(first) as sink:
        sink.write_scalars(0, {"a": 0.5})
    second = csv_logger(tmp_path, version=0)
    with pytest.warns(UserWarning, match="Previous log files in this directory will be deleted"):
        _ = second.experiment
    assert not Path(second.log_dir, "metrics.csv").exists()
    with CsvSink(second) as sink:
        second.log_metrics({"loss": 1.0}, step=1)
        sink.write_scalars(1, {"a": 0.25, "b": 1.0})
    assert read_rows(second) == [{"loss": "1.0", "step": "1"}, {"a": "0.25", "b": "1.0", "step": "1"}]


def test_what_it_has_no_place_for_goes_to_the_files(tmp_path: Path) -> None:
    """An unsupported kind returns False, and so reaches the fallback files."""
    sink = MultiSink([CsvSink(csv_logger(tmp_path))], fallback=FilesSink(tmp_path / "recorder"))
    assert sink.write_scalars(3, {"a": 0.5})
    assert sink.write_histograms(3, {"h": histogram()})
    assert {path.name for path in (tmp_path / "recorder").iterdir()} == {"histograms.jsonl"}


@pytest.mark.slow
def test_in_a_fit(tmp_path: Path) -> None:
    """A fit writes its numbers to a file next to the logger's, and does not change ``self.log``."""
    board, logger = TensorBoardLogger(tmp_path / "board"), csv_logger(tmp_path / "table")
    memory, model = MemorySink(), Classifier()
    outputs = Outputs(curves="all")
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=[memory], functions=False, outputs=outputs)
    fit(model, tmp_path, [recorder], logger=[logger, board])
    read: dict[str, dict[int, float]] = {}
    own = read_table(Path(logger.log_dir, "recorder", "metrics.csv"))
    for row in read_rows(logger) + own:
        step = int(row.pop("step"))
        for tag, cell in row.items():
            assert step not in read.setdefault(tag, {})
            read[tag][step] = float(cell)
    assert len(memory.scalars) == 6 * 6
    assert {tag for row in own for tag in row} == {*memory.scalars, "watch/loss", "watch/grad_norm"}
    assert {tag: read.pop(tag) for tag in memory.scalars} == memory.scalars
    assert {tag: list(read.pop(tag)) for tag in ("watch/loss", "watch/grad_norm")} == {
        "watch/loss": [1, 3, 5],
        "watch/grad_norm": [1, 3, 5],
    }
    assert read == {
        "train_loss": {step: model.losses[step].item() for step in (1, 3, 5)},
        "epoch": dict.fromkeys((1, 3, 5), 0.0),
    }
    scalars = read_events(Path(board.log_dir, "recorder")).Scalars("z_recorder/activations/head/rms")
    found = {event.step: event.value for event in scalars}
    assert found == {step: np.float32(value).item() for step, value in memory.scalars["activations/head/rms"].items()}
    # TensorBoard shows the histograms, so the files sink receives none.
    assert sorted(path.name for path in tmp_path.rglob("*.jsonl")) == ["activations.jsonl", "watch.jsonl"]


def test_a_file_of_its_own(tmp_path: Path) -> None:
    """Late columns, odd tags and any numbers are read back from a file shared by several sinks."""
    path = tmp_path / "recorder" / "metrics.csv"
    sinks = [CsvSink(path), CsvSink(str(path))]
    expected = []
    columns = {"step": "(step)", "a\0b": r"a\x00b", "a\ud800": r"a\ud800"}
    for step, tag in enumerate([*ODD_TAGS, "a\0b", "a\ud800", "größe/層"]):
        sinks[step % 2].write_scalars(step, {tag: step + 0.1, "a": math.nan})
        expected.append({columns.get(tag, tag): str(step + 0.1), "a": "nan", "step": str(step)})
    assert read_table(path) == expected
    assert [path.name for path in path.parent.iterdir()] == ["metrics.csv"]


def test_a_file_of_its_own_continues(tmp_path: Path) -> None:
    """The rows of an earlier run stay, except for an incomplete one, even if columns are added."""
    path = tmp_path / "metrics.csv"
    CsvSink(path).write_scalars(0, {"a": 0.5})
    CsvSink(path).write_scalars(1, {"a": 0.25})
    with path.open("ab") as file:
        file.write(b"2,0.1")
    CsvSink(path).write_scalars(2, {"a": 0.75})
    CsvSink(path).write_scalars(3, {"b": 1.0})
    assert [row for row in read_table(path) if row != {"step": "2", "a": "0.1"}] == [
        {"step": "0", "a": "0.5"},
        {"step": "1", "a": "0.25"},
        {"step": "2", "a": "0.75"},
        {"step": "3", "b": "1.0"},
    ]


def test_a_full_disk_leaves_whole_rows(tmp_path: Path) -> None:
    """A row or a column that does not fit is skipped with one warning, and the existing rows stay."""
    path = tmp_path / "metrics.csv"
    sink = CsvSink(path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with files_up_to(60):
            for step in range(10):
                sink.write_scalars(step, {"a": 1 / 3})
            sink.write_scalars(10, {"b" * 60: 1.0})
        sink.write_scalars(11, {"b": 1.0})
    rows = [{"step": str(step), "a": str(1 / 3)} for step in range(2)]
    assert read_table(path) == [*rows, {"step": "11", "b": "1.0"}]
    (message,) = [str(each.message) for each in warned]
    assert "File too large" in message
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]

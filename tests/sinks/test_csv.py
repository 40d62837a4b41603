"""The CSV sink: what Python's csv module reads from the logger's file."""

from __future__ import annotations

import csv
import json
import locale
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_recorder import ActivationRecorder, FilesSink, MemorySink, MultiSink
from lightning_recorder.sinks import CsvSink
from tests.callbacks.models import Classifier, fit
from tests.sinks.events import read_events
from tests.sinks.samples import ODD_TAGS, histogram, same_value


def csv_logger(folder: Path, **options: Any) -> Any:
    return CSVLogger(folder, **options)


def read_rows(logger: Any) -> list[dict[str, str]]:
    """The rows without the cells that are empty; every row has a cell for each column."""
    with Path(logger.log_dir, "metrics.csv").open(newline="", encoding=locale.getpreferredencoding(False)) as file:
        header, *rows = list(csv.reader(file))
    assert len(set(header)) == len(header)
    return [{key: cell for key, cell in zip(header, row, strict=True) if cell} for row in rows]


def test_columns_that_come_late(tmp_path: Path) -> None:
    """A column that appears late, or once, leaves every row as it was, those of the user included."""
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
    """Each number can be read to the bit, also one that is not finite."""
    values = {"a": 0.1, "b": math.nan, "c": -math.inf, "d": 5e-324, "e": np.float32(0.1).item()}
    logger = csv_logger(tmp_path)
    with CsvSink(logger) as sink:
        sink.write_scalars(3, values)
    (row,) = read_rows(logger)
    assert all(same_value(float(row[tag]), value) for tag, value in values.items())


def test_odd_tags_are_columns_of_their_own(tmp_path: Path) -> None:
    """Every tag has its column, under its own name but for the one that the logger has for itself."""
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
    """A character that would have the logger raise at each of the user's rows is written as an escape."""
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
    """A logger that goes on, as in a second fit, keeps the rows of the first, with columns new in the second."""
    logger = csv_logger(tmp_path)
    for step, values in ((0, {"a": 0.5}), (1, {"a": 0.25, "b": 1.0})):
        with CsvSink(logger) as sink:
            sink.write_scalars(step, values)
        logger.finalize("success")
    assert read_rows(logger) == [{"a": "0.5", "step": "0"}, {"a": "0.25", "b": "1.0", "step": "1"}]


def test_a_resume_into_the_same_version(tmp_path: Path) -> None:
    """Lightning's logger begins its file anew and warns, before any sink is made; what follows is in it, whole."""
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
    """A kind that is no number is answered with no, and so reaches the files beside it."""
    sink = MultiSink([CsvSink(csv_logger(tmp_path))], fallback=FilesSink(tmp_path / "recorder"))
    assert sink.write_scalars(3, {"a": 0.5})
    assert sink.write_histograms(3, {"h": histogram()})
    assert {path.name for path in (tmp_path / "recorder").iterdir()} == {"histograms.jsonl"}


@pytest.mark.slow
def test_in_a_fit(tmp_path: Path) -> None:
    """What a recorder gives beside TensorBoard is in the file, number by number, and ``self.log`` is as it was."""
    board, logger = TensorBoardLogger(tmp_path / "board"), csv_logger(tmp_path / "table")
    memory, model = MemorySink(), Classifier()
    recorder = ActivationRecorder(every_n_train_steps=1, sinks=[memory])
    fit(model, tmp_path, [recorder], logger=[logger, board])
    read: dict[str, dict[int, float]] = {}
    for row in read_rows(logger):
        step = int(row.pop("step"))
        for tag, cell in row.items():
            assert step not in read.setdefault(tag, {})
            read[tag][step] = float(cell)
    assert len(memory.scalars) == 6 * 6
    assert {tag: read.pop(tag) for tag in memory.scalars} == memory.scalars
    assert read == {
        "train_loss": {step: model.losses[step].item() for step in (1, 3, 5)},
        "epoch": dict.fromkeys((1, 3, 5), 0.0),
    }
    found = {event.step: event.value for event in read_events(Path(board.log_dir)).Scalars("activations/head/rms")}
    assert found == {step: np.float32(value).item() for step, value in memory.scalars["activations/head/rms"].items()}
    # TensorBoard shows the histograms, so that none goes to the files.
    assert [path.parent.name for path in tmp_path.rglob("*.jsonl")] == ["records"]  # nothing is in the files of sinks


def test_histograms_of_a_fit_go_to_the_files(tmp_path: Path) -> None:
    """With a CSV logger alone the histograms lie beside its file, those of each step."""
    logger, memory = csv_logger(tmp_path), MemorySink()
    fit(Classifier(), tmp_path, [ActivationRecorder("head", sinks=[memory], every_n_train_steps=3)], logger=logger)
    lines = Path(logger.log_dir, "recorder", "histograms.jsonl").read_text().splitlines()
    read = {line["step"]: line["histograms"] for line in map(json.loads, lines)}
    kept = memory.histograms["activations/head/histogram"]
    assert {step: each["activations/head/histogram"]["counts"] for step, each in read.items()} == {
        step: each.counts.tolist() for step, each in kept.items()
    }
    assert list(kept) == [0, 2, 5]

"""Tests of the sinks for loggers that accept numbers and files; the network is a stub."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from lightning_recorder.sinks import LitLoggerSink, MetricsSink
from tests.sinks.lit_logger import lit_logger
from tests.sinks.samples import ODD_TAGS, histogram, same_value


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_scalars_reach_log_metrics() -> None:
    """The logger receives the numbers by tag and the step, in a new dict."""

    class Logger:
        def __init__(self) -> None:
            self.calls: list[tuple[dict[str, float], int | None]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.calls.append((dict(metrics), step))
            metrics.clear()

    logger, scalars = Logger(), {"activations/fc/mean": 0.5, "b": 2.0}
    assert MetricsSink(logger).write_scalars(3, scalars)
    assert logger.calls == [({"activations/fc/mean": 0.5, "b": 2.0}, 3)]
    assert scalars == {"activations/fc/mean": 0.5, "b": 2.0}


def test_csv_logger(tmp_path: Path) -> None:
    """The numbers are in the row of their step in ``metrics.csv``; a column may appear late."""
    logger: Any = CSVLogger(tmp_path)
    sink = MetricsSink(logger)
    sink.write_scalars(3, {"activations/fc/mean": 0.5})
    sink.write_scalars(5, {"activations/fc/mean": 0.25, "late": 1.0})
    assert not sink.write_histograms(5, {"h": histogram()})
    logger.save()
    assert rows(logger) == [
        {"activations/fc/mean": "0.5", "late": "", "step": "3"},
        {"activations/fc/mean": "0.25", "late": "1.0", "step": "5"},
    ]


def test_flush_makes_it_readable(tmp_path: Path) -> None:
    """Flushing the sink makes a buffering logger write."""
    logger: Any = CSVLogger(tmp_path, flush_logs_every_n_steps=1000)
    sink = MetricsSink(logger)
    sink.write_scalars(3, {"a": 0.5})
    sink.flush()
    assert rows(logger) == [{"a": "0.5", "step": "3"}]


def test_the_logger_is_not_finalized(tmp_path: Path) -> None:
    """Closing the sink leaves the trainer's logger usable."""
    logger: Any = CSVLogger(tmp_path)
    with MetricsSink(logger) as sink:
        sink.write_scalars(3, {"a": 0.5})
    logger.log_metrics({"a": 0.25}, 4)
    logger.finalize("success")
    assert [row["a"] for row in rows(logger)] == ["0.5", "0.25"]


def test_scalars_are_series(tmp_path: Path) -> None:
    """Each scalar is in the series of its tag with its step; a repeated one is added as a second entry."""
    logger = lit_logger(tmp_path)
    sink = LitLoggerSink(logger)
    sink.write_scalars(3, {"activations/fc/mean": 0.1, "b": -2.0})
    sink.write_scalars(3, {"b": 0.5})
    sink.write_scalars(1, dict.fromkeys(ODD_TAGS, math.nan))
    assert logger.experiment["activations/fc/mean"].points == [(3, 0.1)]
    assert logger.experiment["b"].points == [(3, -2.0), (3, 0.5)]
    for tag in ODD_TAGS:
        ((step, value),) = logger.experiment[tag].points
        assert step == 1
        assert same_value(value, math.nan)


def test_files_are_logged_from_the_folder_of_the_run(tmp_path: Path) -> None:
    """A file is logged from its copy in the folder of the run, which stays even if the source changes."""
    logger = lit_logger(tmp_path / "logs")
    source = tmp_path / "source.svg"
    source.write_text("<svg/>")
    LitLoggerSink(logger).write_files(3, {"pictures/graph.svg": source, "b.svg": source})
    source.unlink()
    folder = Path(logger.log_dir, "recorder")
    assert logger.logged == {
        str(folder / "pictures" / "graph.svg"): b"<svg/>",
        str(folder / "b.svg"): b"<svg/>",
    }
    assert (folder / "b.svg").read_text() == "<svg/>"


def test_a_file_that_lies_there_already(tmp_path: Path) -> None:
    """A file that is already in the folder of the run is logged from there."""
    logger = lit_logger(tmp_path)
    path = Path(logger.log_dir, "recorder", "graph.svg")
    path.parent.mkdir(parents=True)
    path.write_text("<svg/>")
    assert LitLoggerSink(logger).write_files(3, {"graph.svg": path})
    assert logger.logged == {str(path): b"<svg/>"}


def test_what_it_has_no_place_for(tmp_path: Path) -> None:
    """Histograms are left to another sink."""
    logger = lit_logger(tmp_path)
    assert not LitLoggerSink(logger).write_histograms(3, {"h": histogram()})
    assert (dict(logger.experiment), logger.logged) == ({}, {})

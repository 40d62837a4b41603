"""Tests of the sink for loggers that accept only numbers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger

from lightning_recorder.sinks import MetricsSink
from tests.sinks.samples import histogram


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

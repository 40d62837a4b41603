"""Sinks that write through ``log_metrics``, which every Lightning logger has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from lightning_recorder.sinks.base import Sink
from lightning_recorder.sinks.files import copy_file, path_below

__all__ = ["LitLoggerSink", "MetricsLogger", "MetricsSink"]

_FOLDER = "recorder"  # the folder inside the folder of a run


class MetricsLogger(Protocol):
    """Any object with the ``log_metrics`` method of Lightning's loggers."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log numbers, keyed by name."""


class MetricsSink(Sink):
    """Write scalars through ``log_metrics``, which every Lightning logger has. Other kinds are not supported.

    Args:
        logger: The logger. The sink does not close it.
    """

    def __init__(self, logger: MetricsLogger) -> None:
        self._logger = logger

    def __str__(self) -> str:
        return f"{type(self).__name__}({type(self._logger).__name__})"

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        self._logger.log_metrics(dict(scalars), step)
        return True

    @override
    def flush(self) -> None:
        # A CSV logger buffers its rows until save() is called. Not every logger has this method.
        save = getattr(self._logger, "save", None)
        if callable(save):
            save()


class FileLogger(MetricsLogger, Protocol):
    """The attributes of Lightning's ``LitLogger`` that are used here."""

    @property
    def log_dir(self) -> str:
        """The folder of the run."""

    def log_file(self, path: str) -> None:
        """Upload a file."""


class LitLoggerSink(MetricsSink):
    """Write to ``LitLogger``, the logger of the Lightning platform: scalars as series, and files as uploads.

    A file is first copied to ``<log_dir>/recorder``, so that it has the same path in each run. The logger names a file
    by its path relative to the working directory. A file outside the working directory gets only its file name.

    Args:
        logger: The logger. The sink does not close it.

    Note:
        Not thread-safe, because the logger is not documented as thread-safe. An upload blocks until it is done.
    """

    _logger: FileLogger

    def __init__(self, logger: FileLogger) -> None:
        super().__init__(logger)

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        folder = Path(self._logger.log_dir) / _FOLDER
        for name, source in files.items():
            target = path_below(folder, name)
            copy_file(source, target)
            self._logger.log_file(str(target))
        return True

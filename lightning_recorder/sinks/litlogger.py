"""A sink for ``LitLogger``, the logger of the Lightning platform."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from lightning_recorder.sinks.metrics import MetricsLogger, MetricsSink
from lightning_recorder.sinks.naming import keep_file, path_below

__all__ = ["LitLoggerSink"]

_FOLDER = "recorder"


class FileLogger(MetricsLogger, Protocol):
    """The part of Lightning's ``LitLogger`` that is used here."""

    @property
    def log_dir(self) -> str:
        """The folder of the run."""

    def log_file(self, path: str) -> None:
        """Upload a file."""


class LitLoggerSink(MetricsSink):
    """Write scalars as series, and upload files that are copied to ``<log_dir>/recorder`` first.

    The logger names a file by its path relative to the working directory, or by its last component if the file is
    elsewhere. The copy below ``log_dir`` makes that path the same in each run.

    Args:
        logger: The logger. The sink does not close it.

    Note:
        Not thread-safe: the logger does not document that two threads may use it. An upload blocks until it is done.
    """

    _logger: FileLogger

    def __init__(self, logger: FileLogger) -> None:
        super().__init__(logger)

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        folder = Path(self._logger.log_dir) / _FOLDER
        for name, source in files.items():
            target = path_below(folder, name)
            keep_file(source, target)
            self._logger.log_file(str(target))
        return True

"""A sink for Lightning's logger of its own platform."""

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
    """Lightning's ``LitLogger``, as far as it is used here."""

    @property
    def log_dir(self) -> str:
        """The folder of the run."""

    def log_file(self, path: str) -> None:
        """Upload a file."""


class LitLoggerSink(MetricsSink):
    """Writes scalars as series and hands over files, which it keeps under ``<log_dir>/recorder``.

    The logger calls a file by its path below the working directory, or by its last part where it lies elsewhere; the
    copy below ``log_dir`` makes that path the same in each run.

    Args:
        logger: The logger; it stays the trainer's.

    Note:
        Not for any thread: nothing says that the logger may be used by two, and it uploads a file before it returns.
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

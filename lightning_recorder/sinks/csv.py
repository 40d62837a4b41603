"""A sink that writes scalars to a CSV file."""

from __future__ import annotations

import locale
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from lightning_recorder.sinks.csvfile import CsvFile, csv_file
from lightning_recorder.sinks.metrics import MetricsLogger, MetricsSink

__all__ = ["CsvSink"]

_STEP = "step"  # the column of the step itself


class CsvSink(MetricsSink):
    """Write scalars to a CSV file, one row per call.

    A new column may appear at any time; it is empty in the earlier rows. Characters that the encoding lacks are
    escaped. The tag ``step`` becomes the column ``(step)``. Other kinds of results are not supported.

    Args:
        target: The path of a local file, or a ``CSVLogger``. A file is written in UTF-8 and appended to after each
            call; the rows of an earlier run stay. All sinks of one path share the file. If the disk is full, rows are
            skipped with one warning. A ``CSVLogger`` receives the rows in its own file; use this if its folder is on a
            remote file system.

    Note:
        Only a sink with a file accepts writes from any thread. A row that arrives while a logger saves is lost or makes
        the training fail.
    """

    def __init__(self, target: str | Path | MetricsLogger) -> None:
        self._file: CsvFile | None = None
        if isinstance(target, (str, Path)):
            self.any_thread = True
            self.written_bytes: int | None = 0
            self._file = csv_file(target)
        else:
            super().__init__(target)

    @override
    def __str__(self) -> str:
        return type(self).__name__ if self._file is not None else super().__str__()

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        encoding = locale.getpreferredencoding(False) if self._file is None else "utf-8"
        row = {_column(tag, encoding): value for tag, value in scalars.items()}
        if self._file is None:
            return super().write_scalars(step, row)
        self.written_bytes = (self.written_bytes or 0) + self._file.add(step, row)
        return True

    @override
    def flush(self) -> None:
        if self._file is None:
            super().flush()


def _column(tag: str, encoding: str) -> str:
    """Return the column name of a tag.

    A character that the encoding lacks or that Python's CSV reader rejects would make the logger raise at every
    following row, including the user's own rows.
    """
    if tag == _STEP:
        return f"({tag})"
    text = tag.encode(encoding, "backslashreplace").decode(encoding)
    return text.replace("\0", "\\x00")  # csv.reader raises on a NUL character before Python 3.11

"""A sink that writes scalars to a CSV file."""

from __future__ import annotations

import csv
import io
import locale
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from typing_extensions import override

from lightning_recorder.disk import append, attempt
from lightning_recorder.sinks.files import SharedFiles
from lightning_recorder.sinks.metrics import MetricsLogger, MetricsSink
from lightning_recorder.temporary import write_whole

__all__ = ["CsvSink"]

_STEP = "step"  # the name of the column for the step


class CsvSink(MetricsSink):
    """Write scalars to a CSV file, one row per call.

    A new column may appear at any time. It is empty in the earlier rows. Characters that the encoding lacks are
    escaped. The tag ``step`` becomes the column ``(step)``. Other kinds of results are not supported.

    Args:
        target: The path of a local file, or a ``CSVLogger``. Each call appends a row to the file, which is written in
            UTF-8. The rows of an earlier run stay. All sinks with the same path share the file. If the disk is full,
            rows are skipped with one warning. With a ``CSVLogger``, the rows go to the logger's own file. Use this if
            the logger's folder is on a remote file system.

    Note:
        A sink with a path accepts writes from any thread. A sink with a ``CSVLogger`` accepts writes only from the
        training thread. A row that arrived while the logger saves its file would be lost or make the training fail.
    """

    def __init__(self, target: str | Path | MetricsLogger) -> None:
        self._file: _CsvFile | None = None
        if isinstance(target, (str, Path)):
            self.any_thread = True
            self.written_bytes: int | None = 0
            self._file = _FILES[target]
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

    Characters that the encoding lacks or that Python's CSV reader rejects are escaped. Unescaped, they would make the
    logger raise at every following row, including the user's own rows.
    """
    if tag == _STEP:
        return f"({tag})"
    text = tag.encode(encoding, "backslashreplace").decode(encoding)
    return text.replace("\0", "\\x00")  # csv.reader raises on a NUL character before Python 3.11


class _CsvFile:
    """Append complete rows of numbers to a CSV file that may get new columns.

    A row is written completely or not at all. The first column is ``step``. A new column is added to the existing file,
    with empty cells in the earlier rows. If the disk is full, rows are skipped with one warning.

    The first row creates the file, in UTF-8, and its folder. The rows of an earlier run stay.

    Note:
        Any thread may write. The file is not kept open. Adding a column copies the file; adding a row does not.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []
        self._lock = threading.Lock()

    def add(self, step: int, values: Mapping[str, float]) -> int:
        """Append a row. Return its size in bytes, or 0 if the row was skipped."""
        with self._lock:
            if not self._columns and not attempt(self.path, 0, self._read_columns):
                return 0
            known = set(self._columns)
            new = [name for name in (_STEP, *values) if name not in known]
            if new and not self._widen([*self._columns, *new]):
                return 0
            cells = {name: repr(float(value)) for name, value in values.items()} | {_STEP: str(step)}
            row = _line(cells.get(name, "") for name in self._columns)
            return len(row) if attempt(self.path, len(row), lambda: append(self.path, row, is_line=True)) else 0

    def _read_columns(self) -> None:
        with suppress(FileNotFoundError), self.path.open(newline="", encoding="utf-8") as file:
            self._columns = next(csv.reader(file), [])

    def _widen(self, columns: list[str]) -> bool:
        """Extend the header. ``columns`` begins with the existing columns. Return False if the disk is full."""
        header = _line(columns)
        size = self.path.stat().st_size if self.path.is_file() else 0
        if not attempt(self.path, 2 * (size + len(header)), lambda: self._copy(header, len(columns))):
            return False
        self._columns = columns
        return True

    def _copy(self, header: bytes, columns: int) -> None:
        def write(target: BinaryIO) -> None:
            target.write(header)
            self._copy_rows(target, columns)

        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, write)

    def _copy_rows(self, target: BinaryIO, columns: int) -> None:
        if not self.path.is_file():
            return
        with self.path.open(newline="", encoding="utf-8") as file:
            missing = columns - len(next(csv.reader(file), []))  # a header may contain line breaks
            for row in file:  # rows contain only numbers, so a line is a row
                if row.endswith("\n"):  # drop a row that a killed run left unfinished
                    target.write(f"{row.rstrip()}{',' * missing}\r\n".encode())


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text).writerow(cells)
    return text.getvalue().encode("utf-8")


_FILES: SharedFiles[_CsvFile] = SharedFiles(_CsvFile)

"""An append-only CSV file of numbers whose columns may grow."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

from lightning_recorder.disk import append, attempt
from lightning_recorder.temporary import write_whole

__all__ = ["CsvFile", "csv_file"]

_STEP = "step"


class CsvFile:
    """Append complete rows to a CSV file.

    A row is written completely or not at all. The first column is ``step``. A new column is added to the existing file,
    with empty cells in the earlier rows. If the disk is full, rows are skipped with one warning.

    Args:
        path: The path of the file, in UTF-8. The first row creates the file and its folder. The rows of an earlier run
            stay.

    Note:
        Any thread may write. The file is not kept open. Adding a column copies the file; adding a row does not.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []
        self._lock = threading.Lock()

    def add(self, step: int, values: Mapping[str, float]) -> int:
        """Append a row, and return its size in bytes, or 0 if the row was skipped."""
        with self._lock:
            self._columns = self._columns or self._read_columns()
            known = set(self._columns)
            new = [name for name in (_STEP, *values) if name not in known]
            if new and not self._widen([*self._columns, *new]):
                return 0
            cells = {name: repr(float(value)) for name, value in values.items()} | {_STEP: str(step)}
            row = _line(cells.get(name, "") for name in self._columns)
            return len(row) if attempt(self.path, len(row), lambda: append(self.path, row, is_line=True)) else 0

    def _read_columns(self) -> list[str]:
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                return next(csv.reader(file), [])
        except FileNotFoundError:
            return []

    def _widen(self, columns: list[str]) -> bool:
        """Extend the header to these columns, which start with the existing ones. Return False if the disk is full."""
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


_FILES: WeakValueDictionary[Path, CsvFile] = WeakValueDictionary()
_LOCK = threading.Lock()


def csv_file(path: str | Path) -> CsvFile:
    """Return the shared file of a path. The same object is returned as long as it is referenced."""
    path = Path(path).absolute()
    with _LOCK:
        file = _FILES.get(path)
        if file is None:
            file = _FILES[path] = CsvFile(path)
        return file

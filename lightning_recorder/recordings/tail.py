"""Complete lines of a file that may still grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["LONGEST_LINE", "Tail"]

LONGEST_LINE = 1 << 25  # bytes; 30,000 sites with histograms need less
_PIECE = 1 << 20


class Tail:
    """Reads a file from the point where the last read stopped.

    A last line without a newline is not returned, because it is torn or still being written. A line longer than
    :data:`LONGEST_LINE` is skipped without being held in memory, and returned as an empty line.

    Args:
        path: The file. A missing file has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """The byte offset of the first line that has not been returned yet."""

    @property
    def is_replaced(self) -> bool:
        """True if the file is shorter than the part already read or is gone, so that it must have been replaced."""
        return self.offset > 0 and (not self.path.exists() or self.path.stat().st_size < self.offset)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the byte offset and the contents, without newline, of each line completed since the last call.

        Raises:
            OSError: If the file exists but cannot be read.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            while line := file.readline(LONGEST_LINE):
                is_long = len(line) == LONGEST_LINE and not line.endswith(b"\n")
                if is_long:
                    line = _end_of_line(file)
                if not line.endswith(b"\n"):
                    return
                begin, self.offset = self.offset, file.tell()
                yield begin, b"" if is_long else line[:-1]

    def line_at(self, offset: int) -> bytes:
        """Read one line again.

        Raises:
            OSError: If the file can no longer be read.
        """
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline(LONGEST_LINE)


def _end_of_line(file: BinaryIO) -> bytes:
    """Skip to the end of a line of any length; return its last piece."""
    piece = b""
    while more := file.readline(_PIECE):
        piece = more
        if piece.endswith(b"\n"):
            break
    return piece

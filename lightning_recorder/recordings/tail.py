"""The complete lines of a file that may still grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = ["LONGEST_LINE", "Tail"]

LONGEST_LINE = 1 << 25  # bytes; 30,000 sites with histograms take less
_PIECE = 1 << 20


class Tail:
    """Reads a file from where it stopped the last time.

    A last line without a newline is not given: it is torn, or being written. A line that is longer than any of ours is
    passed over without being kept in memory, and given as an empty one.

    Args:
        path: The file; while it is not there, it has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Where the first line begins that was not given."""

    @property
    def is_replaced(self) -> bool:
        """Whether the file is shorter than what was read of it, so that it is another one now."""
        return self.offset > 0 and (not self.path.exists() or self.path.stat().st_size < self.offset)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """The lines that are complete since the last time, without their newline, and where each begins.

        Raises:
            OSError: If the file is there and cannot be read.
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
        """One line again.

        Raises:
            OSError: If the file cannot be read any more.
        """
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline(LONGEST_LINE)


def _end_of_line(file: BinaryIO) -> bytes:
    """The last piece of a line of any length."""
    piece = b""
    while more := file.readline(_PIECE):
        piece = more
        if piece.endswith(b"\n"):
            break
    return piece

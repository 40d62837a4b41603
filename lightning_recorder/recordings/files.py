"""Where the records of a run lie, and how a line is added to a file of them."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

__all__ = ["RECORDER", "RECORDS", "append", "is_inside", "records_path"]

RECORDER = "recorder"
"""The folder of a run's recordings, in its ``log_dir``."""

RECORDS = "records"
"""The folder of the files of records, inside that."""

_LONGEST_NAME = 80  # characters; file systems allow 255 bytes, of which a character may take four


def records_path(directory: str | Path, label: str) -> Path:
    """The file of records of a recorder.

    Args:
        directory: The folder of the run's recordings, ``<log_dir>/recorder``.
        label: What the recorder is called, which is data: whatever it holds, the file lies in the folder, and two
            labels have two files.

    Example:
        >>> records_path("recorder", "gradients-slow").as_posix()
        'recorder/records/gradients-slow.jsonl'
    """
    harmless = re.sub(r"[^A-Za-z0-9_.\-]", "_", label).strip(".")
    # Capitals too, since a file system may take them for small letters.
    if harmless != label or not 0 < len(label) <= _LONGEST_NAME or label != label.lower():
        digest = hashlib.sha256(label.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        harmless = f"{harmless[:_LONGEST_NAME]}-{digest}"
    return Path(directory) / RECORDS / f"{harmless}.jsonl"


def append(path: Path, line: bytes) -> int:
    """Add a line by a single write, after one that a killed run has left torn is ended.

    Args:
        path: The file; made, with its folder, if it is not there.
        line: With its newline.

    Returns:
        How many bytes were written.

    Raises:
        OSError: If not all could be written, as on a full disk. What was written of it is a torn line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Opened for each line, so that nothing is held across a fork, a copy of the callback or a move of the folder.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        is_torn = os.lseek(descriptor, 0, os.SEEK_END) > 0
        if is_torn:
            os.lseek(descriptor, -1, os.SEEK_END)
            is_torn = os.read(descriptor, 1) != b"\n"
        piece = b"\n" * is_torn + line
        written = os.write(descriptor, piece)
    finally:
        os.close(descriptor)
    if written < len(piece):
        raise OSError(f"{path} took {written} of {len(piece)} bytes; is the disk full?")
    return written


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path is that of a plain file which, links followed, lies below a folder.

    So no link leads a reader out of a run, and nothing is opened that waits for a writer.
    """
    try:
        real = path.resolve(strict=True)
        return real.is_relative_to(folder.resolve(strict=True)) and stat.S_ISREG(real.stat().st_mode)
    except (OSError, ValueError, RuntimeError):  # not there, not readable; a null byte; before 3.13 links in a circle
        return False

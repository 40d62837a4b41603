"""Paths of the record files of a run."""

from __future__ import annotations

import hashlib
import re
import stat
from pathlib import Path

__all__ = ["RECORDER", "RECORDS", "is_inside", "records_path"]

RECORDER = "recorder"
"""The name of the folder, inside ``log_dir``, that holds everything recorded for a run."""

RECORDS = "records"
"""The name of the folder, inside :data:`RECORDER`, that holds the record files."""

_LONGEST_NAME = 80  # characters; file systems allow 255 bytes, and a character can take four


def records_path(directory: str | Path, label: str) -> Path:
    """Return the path of the record file of a recorder.

    Args:
        directory: The recording folder of the run, ``<log_dir>/recorder``.
        label: The label of the recorder. It is untrusted data: whatever it contains, the file lies inside the folder,
            and different labels have different files.

    Example:
        >>> records_path("recorder", "gradients-slow").as_posix()
        'recorder/records/gradients-slow.jsonl'
    """
    harmless = re.sub(r"[^A-Za-z0-9_.\-]", "_", label).strip(".")
    # Upper-case letters get a digest too, because a file system may be case-insensitive.
    if harmless != label or not 0 < len(label) <= _LONGEST_NAME or label != label.lower():
        digest = hashlib.sha256(label.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        harmless = f"{harmless[:_LONGEST_NAME]}-{digest}"
    return Path(directory) / RECORDS / f"{harmless}.jsonl"


def is_inside(path: Path, folder: Path) -> bool:
    """Return True if a path, with links resolved, is a regular file below a folder.

    This check keeps a symbolic link from leading a reader out of a run. It also avoids opening a FIFO, which would
    block until another process writes to it.
    """
    try:
        real = path.resolve(strict=True)
        return real.is_relative_to(folder.resolve(strict=True)) and stat.S_ISREG(real.stat().st_mode)
    except (OSError, ValueError, RuntimeError):  # missing or unreadable; a null byte; a symlink loop before Python 3.13
        return False

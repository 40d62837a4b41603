"""File writes that leave a reserve of free disk space."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TypeGuard

from lightning_recorder.errors import warn

__all__ = [
    "RESERVE_BYTES",
    "UNKNOWN_BYTES",
    "append",
    "attempt",
    "begin_run",
    "fits",
    "has_room",
    "is_full",
    "raise_errors",
    "readable_size",
    "warn_of_error",
]

RESERVE_BYTES = 2**28
"""The number of bytes that this package leaves free on each disk. The environment variable below overrides it."""

UNKNOWN_BYTES = 2**20
"""The assumed size in bytes of a write whose size is not known in advance."""

_VARIABLE = "LIGHTNING_RECORDER_DISK_RESERVE"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FIXES = {
    _FULL: ". Free some space, or raise the quota or the limit of file sizes",
    (errno.EROFS, errno.EACCES, errno.EPERM): ". Make the folder writable, or choose another one",
}

_WARNED: set[int | str] = set()
_LOCK = threading.Lock()
_APPEND_LOCK = threading.Lock()


def begin_run() -> None:
    """Reset the warnings for a new run, so that each disk is reported again."""
    with _LOCK:
        _WARNED.clear()


def fits(path: str | Path, nbytes: int = UNKNOWN_BYTES) -> bool:
    """Return True if the reserve of disk space remains free after ``nbytes`` are written.

    If the free space of a disk cannot be read, the write is assumed to fit.
    """
    free = _free_bytes(_existing(path))
    return free is None or free - nbytes >= _reserve_bytes()


def has_room(path: str | Path, nbytes: int = UNKNOWN_BYTES) -> bool:
    """Call :func:`fits`. If the result is False, warn once per disk and run."""
    if fits(path, nbytes):
        return True
    folder = _existing(path)
    if _is_news(folder):
        warn(
            f"lightning_recorder skips writes to the disk of {folder}: {_size(_free_bytes(folder) or 0)} are free, the "
            f"write may need {_size(nbytes)}, and {_size(_reserve_bytes())} are reserved for the rest of the run. "
            "Training continues, and writing resumes when there is space. Free some space, or set "
            f"{_VARIABLE} to a smaller number of bytes"
        )
    return False


_raises: ContextVar[bool] = ContextVar("raises", default=False)


@contextmanager
def raise_errors(strict: bool) -> Iterator[None]:
    """Let :func:`attempt` raise errors inside this block, which surrounds all writes of a recorder with ``strict``."""
    token = _raises.set(strict)
    try:
        yield
    finally:
        _raises.reset(token)


def attempt(path: str | Path, nbytes: int, write: Callable[[], object], *, strict: bool = False) -> bool:
    """Write if the disk has room, and return True if the write succeeded.

    A failed write is skipped, too: the disk may be full after all, a network file system may be temporarily
    unavailable, or the folder may be read-only. The caller tries again with its next write. There is a single warning
    per disk and run.

    ``write`` must not leave partial output when it raises. With ``strict``, or inside :func:`raise_errors`, all errors
    except that of a full disk are raised.

    Raises:
        OSError: If ``strict``, or if the error has no ``errno`` and thus does not come from the operating system.
    """
    if not has_room(path, nbytes):
        return False
    try:
        write()
    except OSError as error:
        if error.errno is None or ((strict or _raises.get()) and not is_full(error)):
            raise
        warn_of_error(path, error)
        return False
    return True


def is_full(error: BaseException) -> TypeGuard[OSError]:
    """Return True if an error means that the disk, the quota or the file size limit is exhausted."""
    return isinstance(error, OSError) and error.errno in _FULL


def warn_of_error(path: str | Path, error: OSError) -> None:
    """Warn about an error of the operating system, once per disk and run."""
    if _is_news(_existing(path)):
        fix = next((text for numbers, text in _FIXES.items() if error.errno in numbers), "")
        warn(
            f"lightning_recorder could not write to {path}: [Errno {error.errno}] {error.strerror}. Training "
            f"continues. Records are lost until writing works again{fix}"
        )


def append(path: Path, data: bytes, *, is_line: bool = False) -> int:
    """Append bytes to a file, all or nothing. Return the number of bytes by which the file has grown.

    The file and its folder are created if necessary. With ``is_line``, an incomplete last line, which a killed run may
    leave, is terminated first.

    Raises:
        OSError: If not all bytes could be written. The file is left unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Open the file for each write, so that no descriptor is held across a fork, a copy of the callback or a move of the
    # folder.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    with _APPEND_LOCK:  # a failed write truncates the file, which must not cut off the data of another thread
        descriptor = os.open(path, flags, 0o666)
        try:
            end = os.lseek(descriptor, 0, os.SEEK_END)
            if is_line and end > 0:
                os.lseek(descriptor, -1, os.SEEK_END)
                data = data if os.read(descriptor, 1) == b"\n" else b"\n" + data
            try:
                left = data
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                os.ftruncate(descriptor, end)
                raise
        finally:
            os.close(descriptor)
    return len(data)


def _reserve_bytes() -> int:
    text = os.environ.get(_VARIABLE, "").strip()
    if not text:
        return RESERVE_BYTES
    if text.isascii() and text.isdigit():
        return int(text)
    if _is_news(_VARIABLE):
        warn(
            f"{_VARIABLE}={text!r} is not a number of bytes, so lightning_recorder leaves {_size(RESERVE_BYTES)} of "
            f"each disk free: set it to a whole number, such as {_VARIABLE}={RESERVE_BYTES}"
        )
    return RESERVE_BYTES


def _is_news(place: Path | str) -> bool:
    """Return True if the run has not warned about this setting, or about the disk of this folder, yet."""
    key: int | str = place if isinstance(place, str) else _device(place)
    with _LOCK:
        if key in _WARNED:
            return False
        _WARNED.add(key)
        return True


def _device(folder: Path) -> int | str:
    try:
        return folder.stat().st_dev
    except OSError:
        return str(folder)


def _existing(path: str | Path) -> Path:
    """Return the nearest existing folder of a path."""
    place, below = str(path), ""
    # Use strings, since path objects would take most of the time of this function. It runs for each write.
    while place != below and not os.path.isdir(place):  # noqa: PTH112 - never raises
        place, below = os.path.dirname(place), place  # noqa: PTH120
    return Path(place if place != below else "")


def _free_bytes(folder: Path) -> int | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None  # some file systems do not know their size and report 0 of 0


def readable_size(nbytes: int) -> str:
    """Format a number of bytes in a suitable decimal unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes} bytes"

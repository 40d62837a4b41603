"""Locks that keep several processes from recording into one folder."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

__all__ = ["FolderLock", "lock_folder"]

_NAME = ".lock"
_ATTEMPTS = 100

_LOCK = threading.Lock()
# A fork does not inherit its parent's locks, so the id of the process is part of the key.
_held: WeakValueDictionary[tuple[int, Path], FolderLock] = WeakValueDictionary()


class FolderLock:
    """The right of this process to write to a folder, until the last reference to this object is gone.

    Note:
        The lock is one of ``fcntl``: the operating system releases it when the process ends for any reason, forks do
        not share it, and it is valid for all machines of a network file system that has locks. On other file systems,
        and on Windows, every process gets the lock. A lock file that a killed process leaves is not locked.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._finalizer = weakref.finalize(self, _unlock, path, file, os.getpid())


def lock_folder(folder: Path) -> FolderLock | None:
    """Return the lock of a folder, which is created; ``None`` if another process has it.

    All callers in this process share the lock.

    Raises:
        OSError: If the folder or the lock file cannot be created.
    """
    key = os.getpid(), folder.resolve()
    with _LOCK:  # closing a second descriptor of the file would release the lock
        lock = _held.get(key)
        if lock is None:
            path = key[1] / _NAME
            file = _locked(path)
            if file is None:
                return None
            lock = _held[key] = FolderLock(path, file)
        return lock


def _locked(path: Path) -> BinaryIO | None:
    """Return the lock file, open and locked; ``None`` if another process has locked it."""
    for _ in range(_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:  # the process that had the lock has just removed the empty folder
            continue
        if not _try_lock(file):
            file.close()
            return None
        if _is_at(path, file):
            return file
        file.close()  # the process that had the lock has removed the file
    return None


def _try_lock(file: BinaryIO) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # the file system has no locks
        return True
    return True


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def _unlock(path: Path, file: BinaryIO, pid: int) -> None:
    """Remove the lock file, and the folder if nothing was written to it, and release the lock."""
    if os.getpid() == pid and sys.platform != "win32":
        with suppress(OSError):
            if _is_at(path, file):
                path.unlink()
            path.parent.rmdir()
    file.close()

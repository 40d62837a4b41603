"""Locks that prevent several processes from recording into one folder."""

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
# A forked process does not inherit its parent's locks, so the process id is part of the key.
_held: WeakValueDictionary[tuple[int, Path], FolderLock] = WeakValueDictionary()


class FolderLock:
    """A lock that lets this process write to a folder, until the last reference to this object is gone.

    Note:
        This is an ``fcntl`` lock. The operating system releases it when the process ends for any reason, and forked
        processes do not share it. On a network file system with locks, it is valid across machines. On file systems
        without locks, and on Windows, every process gets the lock. A killed process leaves its lock file unlocked.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._finalizer = weakref.finalize(self, _unlock, path, file, os.getpid())


def lock_folder(folder: Path) -> FolderLock | None:
    """Create a folder and return its lock; ``None`` if another process has the lock.

    All callers in this process share one lock.

    Raises:
        OSError: If the folder or the lock file cannot be created.
    """
    key = os.getpid(), folder.resolve()
    with _LOCK:  # open the file only once, since closing a second descriptor would release the lock
        lock = _held.get(key)
        if lock is None:
            path = key[1] / _NAME
            file = _locked(path)
            if file is None:
                return None
            lock = _held[key] = FolderLock(path, file)
        return lock


def _locked(path: Path) -> BinaryIO | None:
    """Open and lock the lock file, and return it; ``None`` if another process has locked it."""
    for _ in range(_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("ab")
        except FileNotFoundError:  # the process that held the lock has just removed the empty folder
            continue
        if not _try_lock(file):
            file.close()
            return None
        if _is_at(path, file):
            return file
        file.close()  # the process that held the lock has removed the file
    return None


def _try_lock(file: BinaryIO) -> bool:
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # the file system does not support locks
        return True
    return True


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False


def _unlock(path: Path, file: BinaryIO, pid: int) -> None:
    """Release the lock, and remove the lock file and, if it is empty, the folder."""
    if os.getpid() == pid and sys.platform != "win32":
        with suppress(OSError):
            if _is_at(path, file):
                path.unlink()
            path.parent.rmdir()
    file.close()

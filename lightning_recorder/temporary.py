"""Temporary files and folders that are cleaned up even if the process is killed."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from typing_extensions import Self

__all__ = ["TemporaryFolder", "copy_whole", "remove_leftovers", "write_bytes", "write_whole"]

_SUFFIX = ".tmp"
_PREFIX = ".lightning-recorder-"
# The host is part of each name, since locks are per machine on some network file systems (BeeGFS, Lustre localflock).
_HOST = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
_LOCK = "lock"
_FOREIGN_AGE_S = 24 * 3600

# Folders that each process has cleaned before its first write. Cleaning a folder again only takes the time to list it.
_cleaned: set[tuple[int, Path]] = set()
_MOST_CLEANED = 32


class TemporaryFolder:
    """A folder for temporary files.

    The folder is removed by :meth:`remove`, at the end of a ``with`` block, or when the process exits. If the process
    is killed, the next process that creates a temporary folder in the same parent folder removes it.

    Args:
        parent: The parent folder; by default the system's temporary folder, ``$TMPDIR`` or ``/tmp``.

    Raises:
        OSError: If the folder cannot be created.

    Note:
        A live process holds a lock on its folder, which the operating system releases when the process ends for any
        reason. Unlike a process id, a lock is not reused and is valid across containers. Windows has no such locks, so
        the files of a killed process remain.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        remove_leftovers(parent)
        self.path, lock = _make(parent, is_folder=True)
        self._finalizer = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Remove the folder with its contents. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically, so that it appears under its name only when it is complete.

    The data are first written under a temporary name in the same folder. Before a process writes its first file to a
    folder, it removes temporary files of killed processes from the folder.

    The folder must exist. An existing file is replaced. ``write`` is called with the temporary file, open for writing.

    Raises:
        OSError: If the file cannot be written. An existing file is left unchanged.
    """
    if (os.getpid(), path.parent) not in _cleaned:
        if len(_cleaned) >= _MOST_CLEANED:  # bounds the set, because a process may run many fits in different folders
            _cleaned.clear()
        _cleaned.add((os.getpid(), path.parent))
        remove_leftovers(path.parent)
    temporary, file = _make(path.parent)
    try:
        with file:
            write(file)
            file.flush()
            if sys.platform == "win32":
                file.close()  # Windows cannot rename an open file
            # Rename before the lock is released, so that no other process removes the file in between.
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically, as :func:`write_whole` does, and create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: file.write(data))


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file atomically, as :func:`write_whole` does.

    Raises:
        OSError: If the source cannot be read or the target cannot be written.
    """
    with source.open("rb") as original:
        write_whole(target, lambda file: shutil.copyfileobj(original, file))


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders of this user's dead processes from a folder.

    Files that a live process holds and files of other users are never removed. Files from another machine are removed
    if they are unlocked and a day old. Errors of the operating system are ignored.
    """
    with suppress(OSError):
        names = [name for name in os.listdir(folder) if name.startswith(_PREFIX) and name.endswith(_SUFFIX)]  # noqa: PTH208 - iterdir makes a Path of each of many names
        for name in names:
            with suppress(OSError):
                _remove_if_dead(folder / name)


def _remove_if_dead(path: Path) -> None:
    status = path.lstat()
    is_own = sys.platform != "win32" and status.st_uid == os.getuid()
    is_from_here = path.name.startswith(f"{_PREFIX}{_HOST}-")
    if not is_own or not (is_from_here or time.time() - status.st_mtime > _FOREIGN_AGE_S):
        return
    if stat.S_ISREG(status.st_mode):
        with path.open("r+b") as file:
            if _lock(file):
                path.unlink()
    elif stat.S_ISDIR(status.st_mode):
        try:
            with (path / _LOCK).open("r+b") as file:
                if _lock(file):
                    _remove_tree(path)
        except FileNotFoundError:  # the process was killed before it created its lock file or after it removed the file
            path.rmdir()


def _make(parent: Path, *, is_folder: bool = False) -> tuple[Path, BinaryIO]:
    """Create a temporary file, or a folder with a lock file. Return its path and the open, locked file."""
    while True:
        path = parent / f"{_PREFIX}{_HOST}-{uuid.uuid4().hex}{_SUFFIX}"
        lock = path
        if is_folder:
            path.mkdir(mode=0o700)
            lock = path / _LOCK
        try:
            file = lock.open("xb")
        except FileNotFoundError:
            if is_folder:  # another process has removed the empty folder
                continue
            raise
        if sys.platform == "win32":
            return path, file
        # On a file system without locks, rename the file, so that no process removes it as a leftover.
        if not _lock(file, wait=True):
            return path.rename(path.with_name(f".{path.name.removeprefix(_PREFIX)}")), file
        if lock.exists():
            return path, file
        file.close()  # another process removed the file before it was locked


def _lock(file: BinaryIO, *, wait: bool = False) -> bool:
    """Lock a file until it is closed. Return False on failure. With ``wait``, wait for the lock of another process."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _remove_own(path: Path, lock: BinaryIO, pid: int) -> None:
    # A forked process has a copy of this object and must not remove its parent's files.
    if os.getpid() != pid:
        return
    if sys.platform == "win32":
        lock.close()  # Windows cannot remove an open file
    with suppress(OSError):
        _remove_tree(path)
    lock.close()


def _remove_tree(folder: Path) -> None:
    """Remove a folder. Its lock is removed last, so that a partly removed folder is recognized as a leftover."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
    (folder / _LOCK).unlink()
    folder.rmdir()

"""A registry of files that several sinks write to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

__all__ = ["SharedFiles"]

File = TypeVar("File")


class SharedFiles(Generic[File]):
    """Return the same object for a path as long as that object is referenced.

    Args:
        make: A function that creates the object of a path.
    """

    def __init__(self, make: Callable[[Path], File]) -> None:
        self._make = make
        self._files: WeakValueDictionary[Path, File] = WeakValueDictionary()
        self._lock = threading.Lock()

    def __getitem__(self, path: str | Path) -> File:
        path = Path(path).absolute()
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = self._make(path)
            return file

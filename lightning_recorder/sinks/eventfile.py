"""A TensorBoard event file that stays valid when the disk fails."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from pathlib import Path
from weakref import WeakValueDictionary

from lightning_recorder.disk import append, attempt
from lightning_recorder.sinks.dashboard import Dashboard
from lightning_recorder.sinks.tfrecord_crc import framed

__all__ = ["EventFile", "event_file"]

_VERSION = b"brain.Event:2"
_COUNT = itertools.count()


class EventFile:
    """Append complete events to an event file in a folder.

    An event is written completely or not at all. If the disk is full, events are skipped with one warning. By contrast,
    the first disk error ends the writer thread of torch's ``SummaryWriter`` and leaves a partial event, at which
    TensorBoard stops reading.

    Args:
        folder: A local folder. The first event creates the folder and the file. TensorBoard follows only the newest
            file of a folder, so a folder should have one writer; :func:`event_file` ensures that.

    Note:
        Any thread may write. An event is readable as soon as it is written. The file is not kept open.
    """

    def __init__(self, folder: str | Path) -> None:
        # The names must sort in the order of creation.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_COUNT):06d}"
        self.path = Path(folder) / name
        self.dashboard = Dashboard()
        """The layout of the Custom Scalars page of the folder."""
        self._has_begun = False
        self._lock = threading.Lock()

    def add(self, event: bytes) -> int:
        """Append a serialized event, and return its size in bytes, or 0 if it was skipped."""
        record = framed(event)
        with self._lock:
            data = record if self._has_begun else framed(_version(time.time())) + record
            if not attempt(self.path, len(data), lambda: append(self.path, data)):
                return 0
            self._has_begun = True
        return len(record)

    def flush(self) -> None:
        """Do nothing: each event is readable as soon as it is written."""

    def close(self) -> None:
        """Do nothing: the file is not kept open."""


def _version(now: float) -> bytes:
    """Return the first event of a file, which has two fields: the time and the version of the format."""
    return b"\x09" + struct.pack("<d", now) + b"\x1a" + bytes([len(_VERSION)]) + _VERSION


_FILES: WeakValueDictionary[Path, EventFile] = WeakValueDictionary()
_LOCK = threading.Lock()


def event_file(folder: str | Path) -> EventFile:
    """Return the shared event file of a folder. The same object is returned as long as it is referenced."""
    folder = Path(folder).absolute()
    with _LOCK:
        file = _FILES.get(folder)
        if file is None:
            file = _FILES[folder] = EventFile(folder)
        return file

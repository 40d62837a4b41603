"""TensorBoard event files that stay valid when the disk fails."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_recorder.disk import append, attempt
from lightning_recorder.sinks.dashboard import Dashboard
from lightning_recorder.sinks.shared_files import SharedFiles

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["EVENT_FILES", "EventFile", "frame_record", "patch_crc32c"]

_ROTATION = 15  # of the masked checksum, a constant of the TFRecord format
_ADDEND = 0xA282EAD8

_VERSION = b"brain.Event:2"
_COUNT = itertools.count()


class EventFile:
    """Append complete events to an event file in a folder.

    An event is written completely or not at all. If the disk is full, events are skipped with one warning. By contrast,
    the first disk error ends the writer thread of torch's ``SummaryWriter`` and leaves a partial event, at which
    TensorBoard stops reading.

    Args:
        folder: A local folder. The first event creates the folder and the file. TensorBoard follows only the newest
            file of a folder, so a folder should have one writer; :data:`EVENT_FILES` ensures that.

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
        record = frame_record(event)
        with self._lock:
            data = record if self._has_begun else frame_record(_version(time.time())) + record
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


EVENT_FILES: SharedFiles[EventFile] = SharedFiles(EventFile)
"""The event files by folder."""


def frame_record(data: bytes) -> bytes:
    """Return data as a TFRecord: with its length and the checksums of the length and of the data."""
    from google_crc32c import value as checksum

    header = struct.pack("<Q", len(data))
    return header + _masked(checksum(header)) + data + _masked(checksum(data))


def patch_crc32c(writer: SummaryWriter) -> bool:
    """Compute the checksums of a writer with ``google_crc32c``. Return True on success.

    TensorBoard computes the checksums byte by byte in Python, in a thread that blocks the training thread: 0.1 ms per
    histogram. The resulting file is identical. This is a no-op if the library is not installed or if the writer has an
    unknown structure.
    """
    try:
        frame_record(b"")
        records: Any = writer._get_file_writer().event_writer._async_writer._writer
        file = records._writer
    except (AttributeError, ImportError):
        return False
    records.write = lambda data: file.write(frame_record(data))
    return True


def _masked(checksum: int) -> bytes:
    rotated = (checksum >> _ROTATION | checksum << (32 - _ROTATION)) + _ADDEND
    return struct.pack("<I", rotated & 0xFFFFFFFF)

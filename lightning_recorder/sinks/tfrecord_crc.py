"""Event file records of TensorBoard with checksums computed by ``google_crc32c``."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["framed", "patch_crc32c"]

_ROTATION = 15  # of the masked checksum, a constant of the TFRecord format
_ADDEND = 0xA282EAD8


def framed(data: bytes) -> bytes:
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
        framed(b"")
        records: Any = writer._get_file_writer().event_writer._async_writer._writer
        file = records._writer
    except (AttributeError, ImportError):
        return False
    records.write = lambda data: file.write(framed(data))
    return True


def _masked(checksum: int) -> bytes:
    rotated = (checksum >> _ROTATION | checksum << (32 - _ROTATION)) + _ADDEND
    return struct.pack("<I", rotated & 0xFFFFFFFF)

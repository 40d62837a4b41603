"""Quicker checksums in the event files of TensorBoard."""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["quicken_records"]

_ROTATION = 15  # of the checksum in a record, by the format of TensorFlow's records
_ADDEND = 0xA282EAD8


def quicken_records(writer: SummaryWriter) -> bool:
    """Have a library compute the checksums of what a writer puts into its event file; answers whether it does.

    TensorBoard computes them byte by byte in Python, in a thread which keeps the training thread from going on
    meanwhile: 0.1 ms for each histogram. The file is the same to the bit. Where the writer is not made as it is known
    here, or the library is not there, all stays as it was.
    """
    try:
        import google_crc32c

        records: Any = writer._get_file_writer().event_writer._async_writer._writer
        file = records._writer
    except (AttributeError, ImportError):
        return False
    records.write = partial(_write_record, file, google_crc32c.value)
    return True


def _write_record(file: Any, checksum: Any, data: bytes) -> None:
    header = struct.pack("<Q", len(data))
    file.write(header + _masked(checksum(header)) + data + _masked(checksum(data)))


def _masked(checksum: int) -> bytes:
    rotated = (checksum >> _ROTATION | checksum << (32 - _ROTATION)) + _ADDEND
    return struct.pack("<I", rotated & 0xFFFFFFFF)

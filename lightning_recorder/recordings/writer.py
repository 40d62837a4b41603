"""Writer of the records of one recorder."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_recorder.disk import append, attempt
from lightning_recorder.names import Site
from lightning_recorder.records.file import header_line, lines_of_numbers, record_line
from lightning_recorder.records.table import Schema, SiteStatistics, Table
from lightning_recorder.version import __version__

__all__ = ["RecordWriter"]

_HEADER_START = b'{"format"'
_CHUNK = 1 << 20  # bytes that are searched at a time
_LONGEST_HEADER = 1 << 16  # bytes


class RecordWriter:
    """Appends the records of one recorder to a file, one line per record.

    The format of the lines is in ``records/file.py``.

    Every number is restored to the bit, including NaN and infinities. Each line is written with a single append, so a
    run that is killed leaves at most a torn last line; the next write terminates it. Written lines survive the end of
    the process. They are not synced to disk, so a power failure may lose the last lines. If the disk is full, or
    refuses the write for another reason, the record is skipped, and a warning is issued once.

    Args:
        path: The file, as returned by :func:`records_path`. The first line creates the file and its folder.
        strict: Raise the ``OSError`` of a record that cannot be written, unless the disk is full.

    Note:
        The writer holds no open file, so it can be copied, pickled and used from any thread, by one thread at a time. A
        record of 100 sites with histograms takes 5 ms and 60 KB.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "records", "activations.jsonl")
        >>> writer = RecordWriter(path)
        >>> writer.begin(label="activations", group="activations")
        1
        >>> writer.write({"step": 0}, {Site("head", "out"): SiteStatistics({"rms": 0.5})})
        >>> len(path.read_bytes()) == writer.written_bytes
        True
    """

    def __init__(self, path: str | Path, *, strict: bool = False) -> None:
        self.path, self._strict = Path(path), strict
        self.written_bytes = 0
        """The number of bytes that this writer has written."""
        self._header = b""  # a header that did not fit on the disk; it must precede the next record

    def begin(self, *, label: str, group: str, name: str = "", ranks: int = 1, **more: Any) -> int:
        """Write a header line that marks the start of a fit or its continuation.

        Args:
            label: The label that identifies the recorder within the run, for example ``activations`` or
                ``gradients-slow``.
            group: ``activations``, ``gradients`` or ``parameters``.
            name: The name of the recorder, if the user has set one.
            ranks: The number of processes whose statistics the records combine.
            more: Further JSON-serializable metadata. ``versions`` is merged with the versions of torch, Python and this
                package.

        Returns:
            The number of the session in the file, starting at 1.
        """
        versions = {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "lightning_recorder": __version__,
            **more.pop("versions", {}),
        }
        session = 1 + _headers_in(self.path)
        about = {"label": label, "group": group, "name": name, "session": session, "ranks": ranks}
        header = header_line({**about, "time": time.time(), "versions": versions, **more})
        self._header = b"" if self._append(header) else header
        return session

    def write(
        self, about: Mapping[str, Any], sites: Mapping[Site, SiteStatistics] | Iterable[tuple[Site, SiteStatistics]]
    ) -> None:
        """Write a record.

        Args:
            about: ``step`` and optionally ``epoch``, ``stage``, ``loader`` and further JSON-serializable metadata. The
                time is added.
            sites: The statistics of the sites in execution order; a reader lists them in this order.

        Raises:
            ArgumentError: If the bins of a site are not valid counts.
        """
        self.write_all([(about, Table.of(sites))])

    def write_all(self, records: Iterable[tuple[Mapping[str, Any], Table]]) -> None:
        """Write several records with a single append. If the disk has no room for all, write the first ones.

        Args:
            records: The metadata of each record, as for :meth:`write`, and its table, in execution order.
        """
        now = time.time()
        self._append_all([record_line({"time": now, **about}, table) for about, table in records])

    def write_numbers(self, schema: Schema, rows: Iterable[tuple[int, int, bytes]]) -> None:
        """Write training records without histograms with a single append. If the disk is full, write the first ones.

        Args:
            schema: The sites and columns of all these records.
            rows: The step, the epoch, and the values, ``[sites, columns]`` little-endian float64, of each record.
        """
        self._append_all(lines_of_numbers({"time": time.time(), "stage": "train", "loader": None}, schema, rows))

    def _append_all(self, lines: list[bytes]) -> None:
        # Together, or one by one until there is no more room.
        if lines and not self._append_with_header(b"".join(lines)) and len(lines) > 1:
            all(map(self._append_with_header, lines))

    def _append_with_header(self, lines: bytes) -> bool:
        is_written = self._append(self._header + lines)
        if is_written:
            self._header = b""
        return is_written

    def _append(self, lines: bytes) -> bool:
        def write() -> None:
            self.written_bytes += append(self.path, lines, is_line=True)

        return attempt(self.path, len(lines), write, strict=self._strict)


def _headers_in(path: Path) -> int:
    """Return the number of complete header lines in a file, 0 if there is no file or if it cannot be read now."""
    start = b"\n" + _HEADER_START
    count, end = 0, b"\n"  # the end of what was read before, in which a line may begin
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                text = end + chunk
                count += text.count(start)
                end = text[-len(start) + 1 :]
            file.seek(-min(file.tell(), _LONGEST_HEADER), os.SEEK_END)
            last = file.read().rpartition(b"\n")[2]
    except OSError:
        return 0
    return count - last.startswith(_HEADER_START)  # a run was killed in the middle of a line

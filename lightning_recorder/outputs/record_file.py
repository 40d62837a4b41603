"""The file with all records of a run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from typing_extensions import override

from lightning_recorder.outputs.pipeline import RecordConsumer
from lightning_recorder.recordings import RecordWriter, SiteRecord, records_path
from lightning_recorder.statistics.sites import Record, SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["RecordFile"]

_FIELDS = (
    "step",
    "epoch",
    "stage",
    "loader",
    "steps",
    "ranks",
    "overflowed",
    "overflow_steps",
    "every_n_train_steps",
    "recording_ms",
    "flush_ms",
)


class RecordFile(RecordConsumer):
    """Append each record to the file that :func:`~lightning_recorder.open_recording` reads.

    Args:
        directory: The folder of the run's recordings.
        label: The name of the recorder in the file name.
        group: The kind of tensors that are recorded.
        name: The user-defined name of the recorder, or an empty string.
        ranks: The number of processes that record.
    """

    def __init__(self, directory: Path, label: str, *, group: str, name: str = "", ranks: int = 1) -> None:
        self._writer = RecordWriter(records_path(directory, label))
        self._begin = partial(self._writer.begin, label=label, group=group, name=name, ranks=ranks)
        self._is_backward = group == "gradients"
        self._has_begun = False
        self._header_bytes = 0  # written once, so they are no part of the bytes per record

    def __str__(self) -> str:
        return f"the file of records {self._writer.path.name}"

    @property
    @override
    def written_bytes(self) -> int:
        return self._writer.written_bytes - self._header_bytes

    @override
    def on_record(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        if not self._has_begun:  # with the first record, so that a run without any leaves no file
            self._has_begun = True
            self._begin()
            self._header_bytes = self._writer.written_bytes
        sites = record.in_order_of_execution(found, backward=self._is_backward)
        fields = {name: getattr(record, name) for name in _FIELDS}
        self._writer.write(fields, (_line(site, found[site]) for site in sites))


def _line(site: Site, seen: SiteStatistics) -> SiteRecord:
    dtype = None if seen.dtype is None else str(seen.dtype).removeprefix("torch.")
    return SiteRecord(site.name, site.path, seen.scalars, seen.bins, dtype, seen.shape)

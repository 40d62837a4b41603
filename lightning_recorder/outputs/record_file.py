"""The consumer that writes the record file of a recorder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_recorder.outputs.pipeline import RecordConsumer
from lightning_recorder.recordings import RecordWriter, records_path
from lightning_recorder.records.table import Table
from lightning_recorder.taps import Site

__all__ = ["RecordFile"]

_LEFT_OUT = ("calls", "diverged", "is_sample")  # if they are empty or False


class RecordFile(RecordConsumer):
    """Append each record to the file that :func:`~lightning_recorder.open_recording` reads."""

    takes_samples = True

    def __init__(
        self,
        directory: Path,
        label: str,
        *,
        group: str,
        name: str = "",
        ranks: int = 1,
        settings: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> None:
        self._writer = RecordWriter(records_path(directory, label), strict=strict)
        self._begin = partial(self._writer.begin, label=label, group=group, name=name, ranks=ranks)
        self._settings = {} if settings is None else settings
        self._group = group
        self._has_begun = False
        self._header_bytes = 0  # written once, so they are no part of the bytes per record
        self._held: list[tuple[dict[str, Any], Table]] = []

    def __str__(self) -> str:
        return f"the file of records {self._writer.path.name}"

    @property
    @override
    def written_bytes(self) -> int:
        return self._writer.written_bytes - self._header_bytes

    @override
    def on_record(self, found: Table) -> None:
        table = found.take(found.schema.order_of(self._group))
        fields = {**table.about, **_calls(table.about["calls"], table)}
        fields = {name: value for name, value in fields.items() if name not in _LEFT_OUT or value}
        if fields.pop("batch", None) is not None:
            fields["batch"] = table.about["batch"]
        if table.about["diverged"]:
            fields["diverged"] = sorted(map(list, table.about["diverged"]))
        self._held.append((fields, table))

    @override
    def flush(self) -> None:
        if self._held and not self._has_begun:  # with the first record, so that a run without any leaves no file
            self._has_begun = True
            self._begin(settings=dict(self._settings))
            self._header_bytes = self._writer.written_bytes
        held, self._held = self._held, []
        self._writer.write_all(held)


def _calls(calls: Mapping[Site, int], table: Table) -> dict[str, Any]:
    """Return the number of tensors of each site, and their order if it is not that of the sites."""
    if tuple(calls) == table.sites:  # the common case
        return {"calls": list(calls.values())}
    order = [table.rows[site] for site in calls if site in table]
    return {"calls": [calls.get(site, 0) for site in table.sites], "order": order} if calls else {}

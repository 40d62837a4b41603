"""Dumps of statistics as tensor files, next to checkpoints or in a folder of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import (
    ArgumentError,
    RecordingError,
    check_callable,
    check_some,
    describe_call,
    imported,
    warn,
)
from lightning_recorder.outputs.dump_folder import DumpContent, DumpFolder
from lightning_recorder.outputs.pipeline import RecordConsumer
from lightning_recorder.portable import Portable, unwrap
from lightning_recorder.statistics.sites import Record, SiteStatistics
from lightning_recorder.tags import make_tag
from lightning_recorder.taps import Site

__all__ = ["DUMP_TIMES", "Event", "StatisticsDumps", "check_dumps"]

DUMP_TIMES = ("checkpoints", "records", "epochs")
"""The times at which the statistics of a recorder can be dumped."""


class Event:
    """A condition on the statistics of a site that triggers a dump.

    Args:
        condition: A function or its import path, such as ``lambda seen: seen.abs_max > 1e4``.
        argument: The name of the argument, for messages.
        name: The name of the recorder, for messages.
        strict: Raise the errors of the function. Otherwise the first error causes a warning, and the function is not
            called again.

    Raises:
        ArgumentError: If the condition is not a function.
    """

    def __init__(
        self,
        condition: Callable[[SiteStatistics], object] | str,
        argument: str,
        *,
        name: str = "the recorder",
        strict: bool,
    ) -> None:
        found = imported(argument, condition)
        check_callable(argument, found, "seen", " of the statistics of a site")
        self._condition: Callable[[SiteStatistics], object] = found  # type: ignore[assignment]  # checked above
        self._argument, self._name = argument, name
        self._strict = strict
        self._failed = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_condition": Portable(self._condition, self._argument), "_failed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _condition=unwrap(state["_condition"]))

    def sites(self, found: Mapping[Site, SiteStatistics]) -> list[Site]:
        """Return the sites that meet the condition."""
        try:
            return [] if self._failed else [site for site, seen in found.items() if self._condition(seen)]
        except Exception as error:
            self._failed = True
            message = (
                f"{self._name}: {self._argument} {describe_call(self._condition, error)}; it is not called again, "
                "and no further dump is written because of it"
            )
            if self._strict:
                raise RecordingError(message) from error
            warn(message)
            return []


class StatisticsDumps(RecordConsumer):
    """Dump the statistics of records.

    Args:
        at: The times of the dumps, some of ``DUMP_TIMES``. Dumps at checkpoints and at the end of epochs contain the
            latest record.
        event: A condition. A record is also dumped if any of its sites meets it.
    """

    def __init__(self, at: Iterable[str] = ("checkpoints",), event: Event | None = None) -> None:
        self.at = tuple(at)
        self.folder: DumpFolder | None = None
        """The folder of the dumps."""
        self._event = event
        self._latest: tuple[Record, Mapping[Site, SiteStatistics]] | None = None

    def __str__(self) -> str:
        return "dumps"

    @property
    def has_event(self) -> bool:
        """True if records may be dumped because of their statistics."""
        return self._event is not None

    def begin(self, folder: DumpFolder) -> None:
        """Begin a run."""
        self.folder, self._latest = folder, None

    def end(self) -> None:
        """Release the folder, which may refer to the loggers of the run."""
        self.folder = self._latest = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "folder": None, "_latest": None}  # these belong to the run

    @override
    def on_record(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        if record.stage != "train" or record.overflowed or not found or self.folder is None:
            return
        self._latest = record, found
        matching = [] if self._event is None else self._event.sites(found)
        if matching:
            where = {"event": [list(site) for site in matching]}
            self.folder.write(_content(record, found, where), "event")
        elif "records" in self.at:
            self.folder.write(_content(record, found), "record")

    @override
    def end_epoch(self) -> None:
        if "epochs" in self.at and self._latest is not None and self.folder is not None:
            self.folder.write(_content(*self._latest), "epoch")

    def write_beside(self, checkpoint: Path) -> None:
        """Dump the latest record next to a checkpoint. A no-op if there is no record."""
        if "checkpoints" in self.at and self._latest is not None and self.folder is not None:
            self.folder.write_beside(_content(*self._latest), checkpoint)

    def remove_beside(self, checkpoint: Path) -> None:
        """Remove the dump next to a checkpoint."""
        if self.folder is not None:
            self.folder.remove_beside(checkpoint)


def check_dumps(value: object) -> tuple[str, ...]:
    """Return the dump times from a ``dumps`` argument.

    Raises:
        ArgumentError: If the argument is invalid.
    """
    if isinstance(value, bool):
        return ("checkpoints",) if value else ()
    try:
        return check_some("dumps", value, DUMP_TIMES)
    except ArgumentError as error:
        more = "" if str(error).endswith("?") else "; True stands for 'checkpoints', False for none"
        raise ArgumentError(f"{error}{more}") from None


def _content(
    record: Record, found: Mapping[Site, SiteStatistics], entries: Mapping[str, object] | None = None
) -> DumpContent:
    """Return the statistics of a record as tensors named ``<site>/<statistic>``."""
    tensors: dict[str, Tensor] = {}
    samples: dict[str, int] = {}
    for site, seen in found.items():
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in seen.scalars.items()}
        for statistic, tensor in {**values, **seen.tensors, "histogram": seen.bins}.items():
            tensors[make_tag("", *site, statistic)] = tensor
        samples[make_tag("", *site)] = int(seen.scalars["count"])
    return DumpContent(record.step, record.epoch, tensors, samples, entries or {})

"""Statistics in files of tensors, beside the checkpoints or on their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import ArgumentError, RecordingError, check_some, describe_error, imported, tell
from lightning_recorder.recorders.dumpfolder import DumpContent, DumpFolder
from lightning_recorder.recorders.outlet import Outlet
from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.sites import SiteStatistics
from lightning_recorder.tags import make_tag
from lightning_recorder.taps import Site

__all__ = ["DUMP_TIMES", "Event", "StatisticsDumps", "check_dump"]

DUMP_TIMES = ("checkpoints", "records", "epochs")
"""When the statistics of a recorder can be dumped."""


class Event:
    """A function of the statistics of a site that says whether they are out of the ordinary.

    Args:
        condition: The function, or its import path; ``lambda seen: seen.abs_max > 1e4``.
        argument: What messages call it.
        strict: Raise what it raises; else one warning says so, and it is not asked again.

    Raises:
        ArgumentError: If it is no function.
    """

    def __init__(self, condition: Callable[[SiteStatistics], object] | str, argument: str, *, strict: bool) -> None:
        found = imported(argument, condition)
        if not callable(found):
            raise ArgumentError(f"{argument} takes a function of the statistics of a site, got {condition!r}")
        self._condition = found
        self._argument = argument
        self._strict = strict
        self._failed = False

    def sites(self, found: Mapping[Site, SiteStatistics]) -> list[Site]:
        """Those of the sites of which it is true."""
        try:
            return [] if self._failed else [site for site, seen in found.items() if self._condition(seen)]
        except Exception as error:
            self._failed = True
            message = f"{self._argument} is not asked any more, it raised {describe_error(error)}"
            if self._strict:
                raise RecordingError(message) from error
            tell(message)
            return []


class StatisticsDumps(Outlet):
    """Dumps the statistics of records.

    Args:
        at: When: some of ``DUMP_TIMES``. At checkpoints and at the ends of epochs the dump has what was recorded last.
        event: Has a record dumped as well, if it is true of any of its sites.
    """

    def __init__(self, at: Iterable[str] = ("checkpoints",), event: Event | None = None) -> None:
        self.at = tuple(at)
        self.folder: DumpFolder | None = None
        """Where the dumps go."""
        self._event = event
        self._latest: tuple[Record, Mapping[Site, SiteStatistics]] | None = None

    def __str__(self) -> str:
        return "dumps"

    def begin(self, folder: DumpFolder) -> None:
        """Begin with a run."""
        self.folder, self._latest = folder, None

    def end(self) -> None:
        """Let go of the folder, which may know the loggers of the run."""
        self.folder = self._latest = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "folder": None, "_latest": None}  # what belongs to a run stays with it

    @override
    def take(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        if record.stage != "train" or record.overflowed or not found or self.folder is None:
            return
        self._latest = record, found
        odd = [] if self._event is None else self._event.sites(found)
        if odd:
            where = {"event": [list(site) for site in odd]}
            self.folder.write(_content(record, found, where), "event")
        elif "records" in self.at:
            self.folder.write(_content(record, found), "record")

    @override
    def end_epoch(self) -> None:
        if "epochs" in self.at and self._latest is not None and self.folder is not None:
            self.folder.write(_content(*self._latest), "epoch")

    def write_beside(self, checkpoint: Path) -> None:
        """Write what was recorded last beside a checkpoint; without a record, nothing."""
        if "checkpoints" in self.at and self._latest is not None and self.folder is not None:
            self.folder.write_beside(_content(*self._latest), checkpoint)

    def remove_beside(self, checkpoint: Path) -> None:
        """Remove the dump beside a checkpoint."""
        if self.folder is not None:
            self.folder.remove_beside(checkpoint)


def check_dump(value: object) -> tuple[str, ...]:
    """When statistics are dumped, if it is said rightly.

    Raises:
        ArgumentError: If not.
    """
    if isinstance(value, bool):
        return ("checkpoints",) if value else ()
    try:
        return check_some("dump", value, DUMP_TIMES)
    except ArgumentError as error:
        raise ArgumentError(f"{error}; True stands for 'checkpoints', False for none") from None


def _content(
    record: Record, found: Mapping[Site, SiteStatistics], about: Mapping[str, object] | None = None
) -> DumpContent:
    """The statistics of a record as tensors, by ``<site>/<statistic>``."""
    tensors: dict[str, Tensor] = {}
    samples: dict[str, int] = {}
    for site, seen in found.items():
        values = {name: torch.tensor(value, dtype=torch.float64) for name, value in seen.scalars.items()}
        for statistic, tensor in {**values, **seen.tensors, "histogram": seen.bins}.items():
            tensors[make_tag("", *site, statistic)] = tensor
        samples[make_tag("", *site)] = int(seen.scalars["count"])
    return DumpContent(record.step, record.epoch, tensors, samples, about or {})

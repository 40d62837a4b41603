"""What a recorder keeps of its records beside the loggers: files, dumps and pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_recorder.errors import check_bool, check_integer
from lightning_recorder.recorders import (
    DumpFolder,
    Event,
    Outlet,
    Plotter,
    RecordFile,
    Results,
    SiteStatistics,
    StatisticsDumps,
    check_dump,
)

__all__ = ["Keeping"]


class Keeping:
    """The arguments that say what is kept, and what comes of them in a run.

    Args:
        dump: As for :class:`~lightning_recorder.callbacks.statistics.StatisticsCallback`, like all others.
        dump_when: As above.
        max_total_bytes: As above.
        upload: As above.
        max_upload_bytes: As above.
        records: As above.
        plots: As above.
        plot_every_n_records: As above.
        max_images: As above.
        strict: As above.

    Raises:
        ArgumentError: If an argument can never work.
    """

    def __init__(
        self,
        *,
        dump: object,
        dump_when: Callable[[SiteStatistics], object] | str | None,
        max_total_bytes: int,
        upload: bool,
        max_upload_bytes: int,
        records: bool,
        plots: bool,
        plot_every_n_records: int | None,
        max_images: int,
        strict: bool,
    ) -> None:
        event = None if dump_when is None else Event(dump_when, "dump_when", strict=strict)
        self.dumps = StatisticsDumps(check_dump(dump), event)
        """What is dumped, and when."""
        for name, flag in (("upload", upload), ("records", records), ("plots", plots)):
            check_bool(name, flag)
        check_integer("max_total_bytes", max_total_bytes, 0)
        check_integer("max_upload_bytes", max_upload_bytes, 0)
        check_integer("max_images", max_images, 0)
        if plot_every_n_records is not None:
            check_integer("plot_every_n_records", plot_every_n_records, 1)
        self._max_total_bytes, self._upload, self._max_upload_bytes = max_total_bytes, upload, max_upload_bytes
        self._records, self._plots = records, plots
        self._every, self._max_images = plot_every_n_records, max_images

    def outlets(
        self,
        results: Results,
        directory: Path | None,
        *,
        group: str,
        label: str,
        name: str,
        called: str,
        ranks: int,
        shown: bool,
    ) -> list[Outlet]:
        """Who is given the records of a run.

        Args:
            results: Shows the pictures, and hands on what is uploaded.
            directory: The folder of the run's recordings, if it has one.
            group: What is recorded.
            label: What files call the recorder.
            name: Its own name.
            called: What warnings call it.
            ranks: Of how many processes the records are.
            shown: Whether there is anyone to show pictures to.
        """
        folder = DumpFolder(
            label,
            group=group,
            directory=None if directory is None else directory / "dumps",
            max_total_bytes=self._max_total_bytes,
            upload=results.keepers if self._upload else None,
            max_upload_bytes=self._max_upload_bytes,
            name=called,
            quiet=not shown,
        )
        self.dumps.begin(folder)
        found: list[Outlet] = [self.dumps]
        if self._records and directory is not None:
            found.append(RecordFile(directory, label, group=group, name=name, ranks=ranks))
        if self._plots and shown:
            tags = results.report.group
            found.append(Plotter(group, tags, every=self._every, max_images=self._max_images, show=results.show))
        return found

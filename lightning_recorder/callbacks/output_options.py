"""Outputs of a recorder in addition to the loggers: record files, dumps and pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightning_recorder.errors import check_bool, check_integer
from lightning_recorder.outputs import (
    DumpFolder,
    Event,
    Plotter,
    RecordConsumer,
    RecordFile,
    RecordPipeline,
    StatisticsDumps,
    check_dump,
)
from lightning_recorder.statistics import SiteStatistics

__all__ = ["OutputOptions"]


class OutputOptions:
    """The options for record files, dumps and pictures, which create the consumers of records for each run.

    Args:
        dump: The same as in :class:`~lightning_recorder.callbacks.statistics.StatisticsCallback`, as are all others.
        dump_when: See ``dump``.
        max_total_bytes: See ``dump``.
        upload: See ``dump``.
        max_upload_bytes: See ``dump``.
        records: See ``dump``.
        plots: See ``dump``.
        plot_every_n_records: See ``dump``.
        max_images: See ``dump``.
        name: The name of the recorder in messages.
        strict: See ``dump``.

    Raises:
        ArgumentError: If an argument is invalid.
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
        name: str,
        strict: bool,
    ) -> None:
        event = None if dump_when is None else Event(dump_when, "dump_when", name=name, strict=strict)
        self.dumps = StatisticsDumps(check_dump(dump), event)
        """The dumps of statistics and their schedule."""
        self._is_asked_for = not isinstance(dump, bool)
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

    @property
    def waits_for_checkpoints(self) -> bool:
        """True if ``dump`` was given explicitly as ``"checkpoints"`` only and no dump has been written."""
        folder = self.dumps.folder
        alone = self.dumps.at == ("checkpoints",) and not self.dumps.has_event
        return self._is_asked_for and alone and folder is not None and not (folder.written or folder.is_full)

    def consumers(
        self,
        results: RecordPipeline,
        directory: Path | None,
        *,
        group: str,
        label: str,
        name: str,
        called: str,
        ranks: int,
        shown: bool,
    ) -> list[RecordConsumer]:
        """Return the consumers that receive the records of a run.

        Args:
            results: The pipeline that shows the pictures and passes on uploads.
            directory: The folder of the run's recordings, if it has one.
            group: The kind of recording.
            label: The name of the recorder in file names.
            name: The recorder's ``name`` argument.
            called: The name of the recorder in warnings.
            ranks: The number of ranks that the records cover.
            shown: True if a sink can show pictures.
        """
        folder = DumpFolder(
            label,
            group=group,
            directory=None if directory is None else directory / "dumps",
            max_total_bytes=self._max_total_bytes,
            upload=results.artifact_sinks if self._upload else None,
            max_upload_bytes=self._max_upload_bytes,
            name=called,
            quiet=not shown,
        )
        self.dumps.begin(folder)
        found: list[RecordConsumer] = [self.dumps]
        if self._records and directory is not None:
            found.append(RecordFile(directory, label, group=group, name=name, ranks=ranks))
        if self._plots and shown:
            found.append(Plotter(group, label, every=self._every, max_images=self._max_images, show=results.show))
        return found

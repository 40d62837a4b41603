"""The interface for consumers of records other than loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from lightning_recorder.statistics.record import Record
from lightning_recorder.statistics.sites import SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["RecordConsumer"]


class RecordConsumer(ABC):
    """A consumer of records and their statistics, called in the writer thread.

    If it raises, it causes one warning and receives no further records. The run continues.
    """

    def __str__(self) -> str:
        """Return the name for warnings, such as ``"the file of records"``."""
        return type(self).__name__

    @abstractmethod
    def take(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Receive a record.

        Args:
            record: The record.
            found: The statistics of its sites in module order, possibly empty.
        """

    @property
    def written_bytes(self) -> int:
        """The number of bytes of records written to files of this consumer."""
        return 0

    def logged_bytes(self, records: int) -> int:
        """Return the estimated number of bytes passed to the loggers after this many records."""
        return 0

    def end_epoch(self) -> None:  # noqa: B027 - most have nothing to do
        """Run at the end of an epoch."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to do
        """Run at the end of the run."""

"""What is given every record of a run, beside the loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.sites import SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["Outlet"]


class Outlet(ABC):
    """Takes each record with its statistics, in the thread that writes.

    What it raises costs the run nothing but this outlet: one warning, after which it is given no more.
    """

    def __str__(self) -> str:
        """What warnings call it, as ``"the file of records"``."""
        return type(self).__name__

    @abstractmethod
    def take(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Take a record.

        Args:
            record: The record.
            found: Its statistics, in the order of the modules; may be empty.
        """

    def logged_bytes(self, records: int) -> int:
        """How many bytes it will have given to the loggers after so many records, as far as is known."""
        return 0

    def end_epoch(self) -> None:  # noqa: B027 - most have nothing to do
        """Do what is due at the end of an epoch."""

    def finish(self) -> None:  # noqa: B027 - most have nothing to do
        """Do what is due at the end of the run."""

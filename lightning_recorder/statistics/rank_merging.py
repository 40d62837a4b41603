"""A recorder that contains its errors and merges its states across ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch import device as Device

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.statistics.base import BaseStatisticsRecorder
from lightning_recorder.statistics.exchange import Exchange, Merged
from lightning_recorder.statistics.sites import Snapshot

__all__ = ["RankMergingRecorder"]


class RankMergingRecorder:
    """A recorder that contains its errors and merges its states across ranks.

    After a failure on this rank, it keeps calling the :class:`Exchange` in step with the other ranks, without any
    states.

    Args:
        recorder: The recorder that provides the tensors.
        name: The name of the recorder in warnings.
        exchange: The exchange that merges the ranks, or None if there is only one.
        rank: The rank of this process. If ranks are not merged, only rank zero records.
        strict: Raise errors.
        clock: A function that returns the time in seconds.
    """

    def __init__(
        self,
        recorder: BaseStatisticsRecorder,
        *,
        name: str = "the recorder",
        exchange: Exchange | None = None,
        rank: int = 0,
        strict: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.recorder = recorder
        self.name = name
        self.exchange = exchange
        self.strict = strict
        self.enabled = True
        """False to record nothing. May be changed between two batches."""
        self.failed = False
        """True if recording has stopped because of an error."""
        self._is_first = rank == 0
        self._clock = clock
        self._absent_ranks: set[int] = set()  # those that have caused a warning

    @property
    def is_active(self) -> bool:
        """True if this rank records the steps that are due."""
        merges = self.exchange is not None and self.exchange.is_open
        return self.enabled and not self.failed and (self._is_first or merges)

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Catch errors in a block and stop recording after the first one. Only the first error causes a warning."""
        try:
            yield
        except Exception as error:
            is_first_error = not self.failed
            self.fail()
            if self.strict:
                raise
            if is_first_error:
                warn(f"{self.name} is off for the rest of the run: {describe_error(error)}")

    def fail(self) -> None:
        """Stop recording for good."""
        self.failed = True
        with suppress(Exception):  # cleanup after a failure may fail, too
            self.recorder.remove()

    def interrupt(self) -> None:
        """Remove the hooks until the next recorded batch."""
        with self.contained():
            self.recorder.remove()

    def merged(self, *, alone: bool = False, numbers: tuple[float, ...] = (), scope: str = "") -> Merged:
        """Return the states of all ranks, or those of this rank if ranks are not merged.

        Args:
            alone: Do not communicate with other ranks, for example after a failure. Rank zero then returns its own
                states.
            numbers: See :meth:`Exchange.merge`.
            scope: See :meth:`Exchange.merge`.
        """
        exchange = None if alone else self.exchange
        if exchange is None or not exchange.is_open:
            return Merged(self._snapshot("cpu") if self._is_first else None, [list(numbers)])
        merged = exchange.merge(
            self._snapshot(exchange.device), copies=self.recorder.replicated, numbers=numbers, scope=scope
        )
        if merged.error is not None:
            with self.contained():
                raise merged.error
        new = set(merged.absent) - self._absent_ranks
        if new and self._is_first:
            warn(f"{self.name}: the records are without rank {', '.join(map(str, sorted(new)))}, which has failed")
        self._absent_ranks |= new
        return merged

    def _snapshot(self, device: Device | str) -> Snapshot | None:
        snapshot = None
        if not self.failed:
            with self.contained():
                snapshot = self.recorder.states.snapshot(self.recorder.modules, device)
        return snapshot

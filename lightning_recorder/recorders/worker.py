"""A recorder whose failures stay its own, and whose states are merged over the processes of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch import device as Device

from lightning_recorder.errors import describe_error, tell
from lightning_recorder.recorders.exchange import Exchange, Merged
from lightning_recorder.recorders.siterecorder import SiteRecorder
from lightning_recorder.recorders.sites import Snapshot

__all__ = ["Worker"]


class Worker:
    """A recorder whose failures stay its own, and whose states are merged over ranks.

    Whatever fails on this rank, it goes on calling the :class:`Exchange` as the other ranks do, and gives nothing.

    Args:
        recorder: What brings the tensors.
        name: What warnings call it.
        exchange: Merges the ranks; without one, this is the only one.
        rank: The number of this process. Where the ranks are not merged, those but the first record nothing.
        strict: Raise what fails.
        clock: Seconds.
    """

    def __init__(
        self,
        recorder: SiteRecorder,
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
        """Whether what is due is recorded; may be changed between two batches."""
        self.failed = False
        """Whether nothing more is recorded, since something went wrong."""
        self._is_first = rank == 0
        self._clock = clock
        self._told_absent: set[int] = set()

    @property
    def works(self) -> bool:
        """Whether what is due is recorded on this rank."""
        merges = self.exchange is not None and self.exchange.is_open
        return self.enabled and not self.failed and (self._is_first or merges)

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Keep what goes wrong inside, after which nothing more is recorded; what goes wrong later is no news."""
        try:
            yield
        except Exception as error:
            was_well = not self.failed
            self.fail()
            if self.strict:
                raise
            if was_well:
                tell(f"{self.name} is off for the rest of the run: {describe_error(error)}")

    def fail(self) -> None:
        """Record nothing more."""
        self.failed = True
        with suppress(Exception):  # what has failed already may fail here, too
            self.recorder.remove()

    def interrupt(self) -> None:
        """Take the hooks off until the next batch that is recorded."""
        with self.contained():
            self.recorder.remove()

    def merged(self, *, alone: bool = False, words: tuple[float, ...] = (), scope: str = "") -> Merged:
        """The states of all ranks; those of this rank where they are not merged.

        Args:
            alone: Ask no other rank, as after a failure; then the first one has its own.
            words: As for :meth:`Exchange.merge`.
            scope: As for :meth:`Exchange.merge`.
        """
        exchange = None if alone else self.exchange
        if exchange is None or not exchange.is_open:
            return Merged(self._snapshot("cpu") if self._is_first else None, [list(words)])
        merged = exchange.merge(
            self._snapshot(exchange.device), copies=self.recorder.replicated, words=words, scope=scope
        )
        if merged.error is not None:
            with self.contained():
                raise merged.error
        new = set(merged.absent) - self._told_absent
        if new and self._is_first:
            tell(f"{self.name}: the records are without rank {', '.join(map(str, sorted(new)))}, which has failed")
        self._told_absent |= new
        return merged

    def _snapshot(self, device: Device | str) -> Snapshot | None:
        snapshot = None
        if not self.failed:
            with self.contained():
                snapshot = self.recorder.states.snapshot(self.recorder.modules, device)
        return snapshot

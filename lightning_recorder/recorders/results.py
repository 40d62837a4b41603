"""What becomes of the records of a run: they are written, kept, told and laid beside checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_recorder.errors import describe_error, tell
from lightning_recorder.recorders.outlet import Outlet
from lightning_recorder.recorders.receipt import Receipt, Watched, paths_by_module
from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.report import Report
from lightning_recorder.recorders.sites import SiteStatistics
from lightning_recorder.schedule import Reduce, Sampling
from lightning_recorder.sinks import BackgroundQueue, Image, MultiSink, Sink
from lightning_recorder.taps import Site

__all__ = ["Results"]

_SOME_RECORDS = 10  # after which it is known how large they are


class Results:
    """Makes the statistics of records and writes them, in the background.

    Args:
        report: Writes them to the sink.
        name: What messages call the recorder.
        say: Takes the line that the receipt is in.
        summarize: Makes the statistics of a record.
        strict: Raise what goes wrong in an outlet.
    """

    def __init__(
        self,
        report: Report,
        *,
        name: str = "the recorder",
        say: Callable[[str], object] = tell,
        summarize: Callable[[Record], dict[Site, SiteStatistics]] = lambda record: record.snapshot.statistics(),
        strict: bool = False,
    ) -> None:
        self.report = report
        self.label = report.group
        """What files call the recorder."""
        self.sink: Sink | None = None
        """Where records are written; without one they are only kept."""
        self.directory: Path | None = None
        """The folder of the receipt, if there is one."""
        self._name = name
        self._say = say
        self._summarize = summarize
        self._strict = strict
        self.outlets: list[Outlet] = []
        """Who else is given each record."""
        self.keepers: Sink | None = None
        """Who is given files."""
        self._latest: dict[str, dict[Site, SiteStatistics]] = {}
        self._latest_step: int | None = None
        self._queue = BackgroundQueue()
        self._was_announced = False
        self._receipt: Receipt | None = None
        self._records = self._bytes = 0

    def begin(self, sink: Sink | None, directory: Path | None, label: str, *, keepers: Sink | None = None) -> None:
        """Begin with a run.

        Args:
            sink: Where its records go; bears any thread.
            directory: The folder of its recordings.
            label: What files call the recorder.
            keepers: Who is given files.
        """
        self.sink, self.directory, self.label = sink, directory, label
        self.keepers = keepers
        self.report.begin()
        self.outlets = []
        self._was_announced = False
        self._receipt, self._records, self._bytes = None, 0, 0

    def latest_of(self, stage: str) -> dict[Site, SiteStatistics]:
        """What was recorded last of a stage; where there are several loaders, as ``"validate/0"``."""
        self.wait()
        return self._latest.get(stage, {})

    @property
    def latest_step(self) -> int | None:
        """The step of what was recorded last of the training; ``None`` if nothing was."""
        self.wait()
        return self._latest_step

    def wait(self) -> None:
        """Wait until everything is written."""
        self._queue.wait()

    def replay(self) -> None:
        """Have written what sinks want to be written from this thread."""
        if isinstance(self.sink, MultiSink):
            self.sink.replay()

    def end(self) -> None:
        """Wait until everything is written, let go of the sink, and raise what went wrong."""
        self._queue.wait()
        try:
            self._finish()
            self.replay()
            self._average()
            self._queue.drain()
        finally:
            self.sink = self.keepers = self._receipt = None
            self.outlets = []

    def _finish(self) -> None:
        for outlet in list(self.outlets):
            self._contained(outlet, outlet.finish)

    def __getstate__(self) -> dict[str, Any]:
        self.wait()  # nothing is to change while it is copied
        # A sink holds open files and the trainer's loggers.
        return {**self.__dict__, "sink": None, "keepers": None, "outlets": []}

    def add(self, record: Record, about: tuple[Watched, Sampling, Reduce] | None = None) -> None:
        """Take a record.

        Args:
            record: The record.
            about: Of the first record what its receipt is made from.
        """
        self._queue.submit(partial(self._write, record, about))

    def add_scalar(self, step: int, tag: str, value: float) -> None:
        """Write a number of its own."""
        if self.sink is not None:
            self._queue.submit(partial(self.sink.write_scalars, step, {tag: value}))

    def end_epoch(self) -> None:
        """Have done what is due at the end of an epoch."""
        for outlet in self.outlets:
            self._queue.submit(partial(self._contained, outlet, outlet.end_epoch))

    def remove(self, job: Callable[[], object]) -> None:
        """Have something removed, behind all that was handed over; also where an outlet has failed."""
        self._queue.put(job)

    def submit(self, outlet: Outlet, job: Callable[[], object]) -> None:
        """Have an outlet do something behind what it was given up to now; what went wrong there is raised elsewhere."""
        self._queue.put(partial(self._contained, outlet, job))

    def show(self, step: int, images: Mapping[str, Image]) -> int | None:
        """Write pictures, from any thread; answers how many bytes that took, if the sink counts them."""
        sink = self.sink
        if sink is None:
            return None
        before = sink.written_bytes
        sink.write_images(step, images)
        after = sink.written_bytes
        return None if after is None else after - (before or 0)

    def announce(
        self, step: int, recording_ms: float, sites: list[Site], about: tuple[Watched, Sampling, Reduce]
    ) -> None:
        """Give the receipt of a step that is no record yet; its record will complete it."""
        receipt = replace(_receipt(step, paths_by_module(sites), *about), recording_ms=recording_ms)
        self._say(f"{self._name}: {receipt.summary}")
        self._was_announced = True
        self._queue.submit(partial(self._keep, receipt))

    def _write(self, record: Record, about: tuple[Watched, Sampling, Reduce] | None) -> None:
        found = self._summarize(record)
        if found and not record.overflowed:
            self._latest[record.stage + ("" if record.loader is None else f"/{record.loader}")] = found
            if record.stage == "train":
                self._latest_step = record.step
        before = None if self.sink is None else self.sink.written_bytes
        if self.sink is not None and (found or record.overflow_steps):
            self.report.write(self.sink, record, found)
        after = None if self.sink is None else self.sink.written_bytes
        written = None if after is None else after - (before or 0)
        for outlet in list(self.outlets):
            self._contained(outlet, partial(outlet.take, record, found))
        if about is not None:
            self._complete(record, found, written, about)
        if written is not None and record.stage == "train":
            self._records += 1
            self._bytes += written
            if self._records == _SOME_RECORDS:
                self._average()

    def _contained(self, outlet: Outlet, job: Callable[[], object]) -> None:
        """Do a job of an outlet; one that fails is left out from then on."""
        if outlet not in self.outlets:
            return
        try:
            job()
        except Exception as error:
            self.outlets.remove(outlet)
            if self._strict:
                raise
            tell(f"{self._name} writes no more {outlet}: {describe_error(error)}")

    def _average(self) -> None:
        """Put into the receipt how many bytes a record takes on average."""
        if self._receipt is not None and self._records:
            size = self._forecast(self._bytes / self._records, self._receipt.records_per_1000_steps)
            self._keep(replace(self._receipt, event_bytes_per_1000_steps=size))

    def _forecast(self, record_bytes: float, records: int) -> int:
        """How many bytes the loggers get with so many records."""
        return int(record_bytes * records) + sum(outlet.logged_bytes(records) for outlet in self.outlets)

    def _complete(
        self,
        record: Record,
        found: Mapping[Site, SiteStatistics],
        written: int | None,
        about: tuple[Watched, Sampling, Reduce],
    ) -> None:
        receipt = _receipt(record.step, paths_by_module(found), *about)
        receipt = replace(
            receipt,
            recording_ms=record.recording_ms,
            flush_ms=record.flush_ms,
            event_bytes_per_1000_steps=None
            if written is None
            else self._forecast(written, receipt.records_per_1000_steps),
            merged_ranks=record.ranks,
        )
        if not self._was_announced:
            self._say(f"{self._name}: {receipt.summary}")
        self._keep(receipt)
        if self.sink is not None:
            self.sink.write_text(record.step, {f"recorder/{self.label}/receipt": receipt.markdown})

    def _keep(self, receipt: Receipt) -> None:
        self._receipt = receipt
        if self.directory is not None:
            try:
                receipt.write(self.directory, self.label)
            except OSError as error:
                self.directory = None
                tell(f"{self._name} could not write its receipt: {describe_error(error)}")


def _receipt(step: int, paths: dict[str, list[str]], watched: Watched, sampling: Sampling, reduce: Reduce) -> Receipt:
    return Receipt(
        step=step,
        sites=paths,
        missing=watched.having(fired=tuple(paths)).why_not(),
        state_bytes=watched.state_bytes,
        every_n_train_steps=sampling.every_n_train_steps or 0,
        records_per_1000_steps=sampling.count_records(reduce, 1000),
    )

"""What becomes of the records of a run: they are written, kept, told and laid beside checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning_recorder.errors import describe_error, tell
from lightning_recorder.recorders.dump import StatisticsDump
from lightning_recorder.recorders.receipt import Receipt, Watched, paths_by_module
from lightning_recorder.recorders.record import Record
from lightning_recorder.recorders.report import Report
from lightning_recorder.recorders.sites import SiteStatistics
from lightning_recorder.schedule import Reduce, Sampling
from lightning_recorder.sinks import BackgroundQueue, Sink
from lightning_recorder.taps import Site

__all__ = ["Results"]

_SOME_RECORDS = 10  # after which it is known how large they are


class Results:
    """Makes the statistics of records and writes them, in the background where the sink bears it.

    Args:
        report: Writes them to the sink.
        name: What messages call the recorder.
        say: Takes the line that the receipt is in.
        summarize: Makes the statistics of a record.
    """

    def __init__(
        self,
        report: Report,
        *,
        name: str = "the recorder",
        say: Callable[[str], object] = tell,
        summarize: Callable[[Record], dict[Site, SiteStatistics]] = lambda record: record.snapshot.statistics(),
    ) -> None:
        self.report = report
        self.dump = StatisticsDump(report.group)
        """What lies beside checkpoints."""
        self.sink: Sink | None = None
        """Where records are written; without one they are only kept."""
        self.directory: Path | None = None
        """The folder of the receipt, if there is one."""
        self._name = name
        self._say = say
        self._summarize = summarize
        self._latest: dict[str, dict[Site, SiteStatistics]] = {}
        self._latest_step: int | None = None
        self._queue = BackgroundQueue()
        self._was_announced = False
        self._receipt: Receipt | None = None
        self._records = self._bytes = 0

    def begin(self, sink: Sink | None, directory: Path | None, label: str) -> None:
        """Begin with a run.

        Args:
            sink: Where its records go.
            directory: The folder of its recordings.
            label: What the receipt and the dumps call the recorder.
        """
        self.sink, self.directory = sink, directory
        self.dump = StatisticsDump(self.report.group, label)
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

    def end(self) -> None:
        """Wait until everything is written, let go of the sink, and raise what went wrong."""
        self._queue.wait()
        try:
            self._average()
            self._queue.drain()
        finally:
            self.sink = None

    def __getstate__(self) -> dict[str, Any]:
        self.wait()  # nothing is to change while it is copied
        # A sink holds open files and the trainer's loggers.
        return {**self.__dict__, "sink": None}

    def add(self, record: Record, about: tuple[Watched, Sampling, Reduce] | None = None) -> None:
        """Take a record.

        Args:
            record: The record.
            about: Of the first record what its receipt is made from.
        """
        self._do(partial(self._write, record, about))

    def add_scalar(self, step: int, tag: str, value: float) -> None:
        """Write a number of its own."""
        if self.sink is not None:
            self._do(partial(self.sink.write_scalars, step, {tag: value}))

    def announce(
        self, step: int, recording_ms: float, sites: list[Site], about: tuple[Watched, Sampling, Reduce]
    ) -> None:
        """Give the receipt of a step that is no record yet; its record will complete it."""
        receipt = replace(_receipt(step, paths_by_module(sites), *about), recording_ms=recording_ms)
        self._say(f"{self._name}: {receipt.summary}")
        self._was_announced = True
        self._do(partial(self._keep, receipt))

    def _do(self, job: Callable[[], object]) -> None:
        """Do a job in the background, or here and now if the sink wants that."""
        if self.sink is None or self.sink.any_thread:
            self._queue.submit(job)
        else:
            job()

    def _write(self, record: Record, about: tuple[Watched, Sampling, Reduce] | None) -> None:
        found = self._summarize(record)
        if found and not record.overflowed:
            self._latest[record.stage + ("" if record.loader is None else f"/{record.loader}")] = found
            if record.stage == "train":
                self._latest_step = record.step
                self.dump.keep(found, record)
        before = None if self.sink is None else self.sink.written_bytes
        if self.sink is not None and (found or record.overflow_steps):
            self.report.write(self.sink, record, found)
        after = None if self.sink is None else self.sink.written_bytes
        written = None if after is None else after - (before or 0)
        if about is not None:
            self._complete(record, found, written, about)
        if written is not None and record.stage == "train":
            self._records += 1
            self._bytes += written
            if self._records == _SOME_RECORDS:
                self._average()

    def _average(self) -> None:
        """Put into the receipt how many bytes a record takes on average."""
        if self._receipt is not None and self._records > 1:
            size = self._bytes * self._receipt.records_per_1000_steps // self._records
            self._keep(replace(self._receipt, event_bytes_per_1000_steps=size))

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
            event_bytes_per_1000_steps=None if written is None else written * receipt.records_per_1000_steps,
            merged_ranks=record.ranks,
        )
        if not self._was_announced:
            self._say(f"{self._name}: {receipt.summary}")
        self._keep(receipt)

    def _keep(self, receipt: Receipt) -> None:
        self._receipt = receipt
        if self.directory is not None:
            try:
                receipt.write(self.directory, self.dump.label)
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

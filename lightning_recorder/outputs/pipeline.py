"""The pipeline that summarizes, writes and reports the records of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.outputs.coverage import Coverage
from lightning_recorder.outputs.coverage_history import CoverageHistory
from lightning_recorder.outputs.formatter import SinkFormatter
from lightning_recorder.outputs.receipt import Change, CoverageReport, paths_by_module
from lightning_recorder.schedule import Reduce, Sampling
from lightning_recorder.sinks import BackgroundQueue, Image, MultiSink, Sink
from lightning_recorder.statistics.sites import Record, SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["RecordConsumer", "RecordPipeline"]

_SOME_RECORDS = 10  # enough records to estimate their mean size

# The arguments of a receipt.
ReceiptFacts = tuple[Coverage, Sampling, Reduce]


class RecordConsumer(ABC):
    """A consumer of records and their statistics, called in the writer thread.

    If it raises, it causes one warning and receives no further records. The run continues.
    """

    def __str__(self) -> str:
        """Return the name for warnings, such as ``"the file of records"``."""
        return type(self).__name__

    @abstractmethod
    def on_record(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
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


class RecordPipeline:
    """Compute the statistics of records and write them in the background.

    Args:
        report: The formatter that writes records to the sink.
        name: The name of the recorder in messages.
        log: A callback that receives the summary line of the receipt.
        derive: A function that adds statistics derived from those of several sites.
        strict: Raise the errors of consumers.
    """

    def __init__(
        self,
        report: SinkFormatter,
        *,
        name: str = "the recorder",
        log: Callable[[str], object] = warn,
        derive: Callable[[Mapping[Site, SiteStatistics]], dict[Site, SiteStatistics]] | None = None,
        strict: bool = False,
    ) -> None:
        self.report = report
        self.label = report.group
        """The name of the recorder in files."""
        self.sink: Sink | None = None
        """The sink for the records, or None to keep only the latest statistics."""
        self.directory: Path | None = None
        """The folder of the receipt, or None."""
        self._name = name
        self._log = log
        self._derive = derive
        self._has_warned_of_divergence = False
        self._strict = strict
        self.consumers: list[RecordConsumer] = []
        """The additional consumers of records."""
        self.artifact_sinks: Sink | None = None
        """The sink for files, or None."""
        self._latest: dict[str, dict[Site, SiteStatistics]] = {}
        self._latest_step: int | None = None
        self._queue = BackgroundQueue()
        self._is_announced = False
        self._receipt: CoverageReport | None = None
        self._coverage: CoverageHistory | None = None
        self._records = self._bytes = 0
        self.recorded: Counter[str] = Counter()
        """The number of nonempty records of each stage. Read it only after :meth:`wait`."""
        self.empty: Counter[str] = Counter()
        """The number of empty records of each stage."""
        self.note = ""
        """A text that is appended to the summary line of the receipt."""

    def begin(
        self, sink: Sink | None, directory: Path | None, label: str, *, artifact_sinks: Sink | None = None
    ) -> None:
        """Begin a run.

        Args:
            sink: The sink for the records, which must accept writes from any thread.
            directory: The folder of the run's recordings.
            label: The name of the recorder in files.
            artifact_sinks: The sink for files.
        """
        self.sink, self.directory, self.label = sink, directory, label
        self.artifact_sinks = artifact_sinks
        self.report.begin(label)
        self.consumers = []
        self._is_announced = False
        self._receipt, self._records, self._bytes, self._coverage = None, 0, 0, None
        self.recorded, self.empty, self.note = Counter(), Counter(), ""

    def latest_of(self, stage: str) -> dict[Site, SiteStatistics]:
        """Return the latest statistics of a stage such as ``"train"``; with several loaders, ``"validate/0"``."""
        self.wait()
        return self._latest.get(stage, {})

    @property
    def latest_step(self) -> int | None:
        """The step of the latest training record, or ``None`` if there is none."""
        self.wait()
        return self._latest_step

    def wait(self) -> None:
        """Wait until everything is written."""
        self._queue.wait()

    def replay(self) -> None:
        """Run the queued writes of sinks that are bound to this thread."""
        if isinstance(self.sink, MultiSink) and not self.sink.is_idle:
            self.sink.replay()

    def end(self) -> None:
        """Wait until everything is written, release the sink, and raise the first error."""
        self._queue.wait()
        try:
            self._finish()
            self._update_mean_size()
            self._finish_coverage()
            self.replay()
            self._queue.drain()
        finally:
            self.sink = self.artifact_sinks = self._receipt = self._coverage = None
            self.consumers = []

    def _finish(self) -> None:
        for consumer in list(self.consumers):
            self._contained(consumer, consumer.finish)

    def add(self, record: Record, facts: ReceiptFacts | None = None) -> None:
        """Queue a record for writing.

        Args:
            record: The record.
            facts: The arguments of the receipt, with the facts since the previous record, or ``None`` for an
                evaluation.
        """
        self._queue.submit(partial(self._write, record, facts))

    def add_scalar(self, step: int, tag: str, value: float) -> None:
        """Write a single scalar."""
        if self.sink is not None:
            self._queue.submit(partial(self.sink.write_scalars, step, {tag: value}))

    def end_epoch(self) -> None:
        """Queue the consumers' work at the end of an epoch."""
        for consumer in self.consumers:
            self._queue.submit(partial(self._contained, consumer, consumer.end_epoch))

    def remove(self, job: Callable[[], object]) -> None:
        """Queue a removal after all previous jobs. It runs even if a consumer has failed."""
        self._queue.put(job)

    def submit(self, consumer: RecordConsumer, job: Callable[[], object]) -> None:
        """Queue a job of a consumer after all previous jobs. Pending errors are not raised here."""
        self._queue.put(partial(self._contained, consumer, job))

    def show(self, step: int, images: Mapping[str, Image]) -> int | None:
        """Write images from any thread. Return the number of bytes written, or None if the sink does not count them."""
        sink = self.sink
        if sink is None:
            return None
        before = sink.written_bytes
        sink.write_images(step, images)
        after = sink.written_bytes
        return None if after is None else after - (before or 0)

    def announce(self, step: int, recording_ms: float, sites: list[Site], facts: ReceiptFacts) -> None:
        """Report the receipt of a step that is not a record yet. Its record completes the receipt."""
        receipt = replace(_make_receipt(step, sites, *facts), recording_ms=recording_ms)
        self._log(f"{self._name}: {receipt.summary}{self.note}")
        self._is_announced = True
        self._queue.submit(partial(self._write_receipt, receipt))

    def _write(self, record: Record, facts: ReceiptFacts | None) -> None:
        found = record.snapshot.statistics()
        if record.snapshot.diverged:
            self._warn_of_divergence(record, found)
        if self._derive is not None:
            found = self._derive(found)
        (self.recorded if found else self.empty)[record.stage] += 1
        if found and not record.overflowed:
            self._latest[record.stage + ("" if record.loader is None else f"/{record.loader}")] = found
            if record.stage == "train":
                self._latest_step = record.step
        before = None if self.sink is None else self.sink.written_bytes
        if self.sink is not None and (found or record.overflow_steps):
            self.report.write(self.sink, record, found)
        after = None if self.sink is None else self.sink.written_bytes
        written = None if after is None else after - (before or 0)
        for consumer in list(self.consumers):
            size = consumer.written_bytes
            self._contained(consumer, partial(consumer.on_record, record, found))
            if consumer.written_bytes > size:
                written = (written or 0) + consumer.written_bytes - size
        if facts is not None:
            self._update_coverage(record, found, written, facts)
        if written is not None and record.stage == "train":
            self._records += 1
            self._bytes += written
            if self._records == _SOME_RECORDS:
                self._update_mean_size()

    def _warn_of_divergence(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        diverged = sorted(record.snapshot.diverged & found.keys())
        if diverged and not self._has_warned_of_divergence:
            self._has_warned_of_divergence = True
            name = ".".join(filter(None, diverged[0]))
            warn(
                f"the ranks have diverged: {name!r} and {len(diverged) - 1} other parameters or gradients differ "
                f"between ranks at step {record.step}"
            )

    def _contained(self, consumer: RecordConsumer, job: Callable[[], object]) -> None:
        """Run a job of a consumer, and remove the consumer if the job fails."""
        if consumer not in self.consumers:
            return
        try:
            job()
        except Exception as error:
            self.consumers.remove(consumer)
            if self._strict:
                raise
            warn(f"{self._name} writes no more {consumer}: {describe_error(error)}")

    def _update_mean_size(self) -> None:
        """Update the receipt with the mean size of a record."""
        if self._receipt is not None and self._records:
            size = self._forecast(self._bytes / self._records, self._receipt.records_per_1000_steps)
            self._write_receipt(replace(self._receipt, event_bytes_per_1000_steps=size))

    def _forecast(self, record_bytes: float, records: int) -> int:
        """Return the estimated number of bytes written to the loggers for this many records."""
        return int(record_bytes * records) + sum(consumer.logged_bytes(records) for consumer in self.consumers)

    def _update_coverage(
        self, record: Record, found: Mapping[Site, SiteStatistics], written: int | None, facts: ReceiptFacts
    ) -> None:
        """Update the receipt with the recorded and the missing modules of a record."""
        if self._coverage is None:
            self._coverage = CoverageHistory()
            self._coverage.add(record.step, found, facts[0])
            self._write_first_receipt(record, found, written, facts)
            return
        changes = self._coverage.add(record.step, found, facts[0])
        self._log_changes(changes)
        if self._receipt is not None and (changes or _is_round(self._coverage.records)):
            self._write_receipt(self._coverage.complete(self._receipt))

    def _write_first_receipt(
        self, record: Record, found: Mapping[Site, SiteStatistics], written: int | None, facts: ReceiptFacts
    ) -> None:
        receipt = _make_receipt(record.step, found, *facts)
        receipt = replace(
            receipt,
            recording_ms=record.recording_ms,
            flush_ms=record.flush_ms,
            event_bytes_per_1000_steps=None
            if written is None
            else self._forecast(written, receipt.records_per_1000_steps),
            merged_ranks=record.ranks,
        )
        if not self._is_announced:
            self._log(f"{self._name}: {receipt.summary}{self.note}")
        self._write_receipt(receipt)
        if self.sink is not None:
            self.sink.write_text(record.step, {f"recorder/{self.label}/receipt": receipt.markdown})

    def _finish_coverage(self) -> None:
        """Update the receipt at the end of the run, and write it to the sink again if it has changed."""
        coverage, before = self._coverage, self._receipt
        if coverage is None or before is None:
            return
        self._log_changes(coverage.finish())
        receipt = coverage.complete(before)
        self._write_receipt(receipt)
        if self.sink is not None and receipt.last_step > receipt.step:
            self.sink.write_text(receipt.last_step, {f"recorder/{self.label}/receipt": receipt.markdown})

    def _log_changes(self, changes: list[Change]) -> None:
        for change in changes:
            self._log(f"{self._name}: {change.text}")

    def _write_receipt(self, receipt: CoverageReport) -> None:
        self._receipt = receipt
        if self.directory is not None:
            try:
                receipt.write(self.directory, self.label)
            except OSError as error:
                self.directory = None
                warn(f"{self._name} could not write its receipt: {describe_error(error)}")


def _is_round(records: int) -> bool:
    """Return True for 10, 20, 40, … records."""
    tens, rest = divmod(records, _SOME_RECORDS)
    return not rest and not tens & (tens - 1)


def _make_receipt(
    step: int, sites: Iterable[Site], coverage: Coverage, sampling: Sampling, reduce: Reduce
) -> CoverageReport:
    found = dict.fromkeys(sites)
    paths = paths_by_module(found)
    return CoverageReport(
        step=step,
        sites=paths,
        missing=coverage.having(fired=tuple(paths)).missing_reasons(),
        state_bytes=coverage.state_bytes,
        every_n_train_steps=sampling.every_n_train_steps or 0,
        records_per_1000_steps=sampling.count_records(reduce, 1000),
        last_step=step,
        without_gradient=tuple(coverage.without_gradients(found)),
        ran_eagerly=tuple(coverage.ran_eagerly),
    )

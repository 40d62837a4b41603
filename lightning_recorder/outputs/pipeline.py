"""The pipeline that computes and writes the statistics of the records of a run."""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from lightning_recorder.disk import fits, raise_errors
from lightning_recorder.errors import describe_error, warn
from lightning_recorder.outputs.coverage import Coverage, with_gradients
from lightning_recorder.outputs.formatter import SinkFormatter
from lightning_recorder.outputs.receipt import ReceiptFacts, ReceiptWriter
from lightning_recorder.recordings import RecordWriter, records_path
from lightning_recorder.records.table import SiteStatistics, Table
from lightning_recorder.sinks import BackgroundQueue, Image, MultiSink, Sink
from lightning_recorder.statistics.run_recorder import RunRecorder
from lightning_recorder.statistics.snapshot import Record, statistics_of
from lightning_recorder.taps import Site

__all__ = ["RecordConsumer", "RecordFile", "RecordPipeline"]


class RecordConsumer(ABC):
    """A consumer of records and their statistics, called in the writer thread.

    If a consumer raises an error, one warning is given, and the consumer receives no further records. The run
    continues.
    """

    takes_samples: ClassVar[bool] = False
    """True to receive, in addition, the records of the first batches of evaluations."""
    reports_divergence: ClassVar[bool] = False
    """True if the consumer reports ranks that differ. The pipeline then gives no warning about them."""

    def __str__(self) -> str:
        """Return the name for warnings, such as ``"the file of records"``."""
        return type(self).__name__

    @abstractmethod
    def on_record(self, found: Table) -> None:
        """Receive a record: the statistics of its sites in module order, and its facts. It may have no sites."""

    def flush(self) -> None:  # noqa: B027 - most hold nothing back
        """Write the data that :meth:`on_record` has held back. Called after one or more records, before the receipt."""

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


# The maximum time that a record waits to be written together with others. A killed process loses the waiting records.
_JOIN_S = 0.5
# The limits of the memory of waiting records. The states of a site take 16 KB.
_MOST_JOINED_BYTES = 2**23
_MOST_ARRIVING_BYTES = 2**26  # the limit for a record whose states are still being copied from a GPU
_MOST_BATCHES = 4


class _Batch:
    """Records that are written together, with their facts and, once known, their statistics."""

    def __init__(self) -> None:
        self.records: list[tuple[Record, ReceiptFacts | None, Table | None]] = []
        self.nbytes = 0
        self.thread = threading.get_ident()
        self.is_sealed = threading.Event()


class RecordPipeline:
    """Computes the statistics of records and writes them in the background."""

    def __init__(
        self,
        formatter: SinkFormatter,
        *,
        name: str = "the recorder",
        log: Callable[[str], object] = warn,
        derive: Callable[[Table], Table] | None = None,
        strict: bool = False,
    ) -> None:
        self.formatter = formatter
        self.label = formatter.group
        """The name of the recorder in files."""
        self.sink: Sink | None = None
        """The sink for the records, or None to keep only the latest statistics."""
        self.receipt = ReceiptWriter(name=name, log=log, logged_bytes=self._logged_bytes)
        """The receipt of the run."""
        self.coverage: Coverage | None = None
        """The selected modules of the run, or None before they are known."""
        self._name, self._log = name, log
        self._has_receipt = False
        self._directory: Path | None = None
        # A cache of the facts about the latest record, with the inputs of their computation. The inputs rarely change.
        self._known: tuple[Coverage | None, Mapping[str, Any], Coverage] | None = None
        self._interval: int | None = None
        self._derive = derive
        self._has_warned_of_divergence = False
        self._strict = strict
        self.consumers: list[RecordConsumer] = []
        """The additional consumers of records."""
        self.artifact_sinks: Sink | None = None
        """The sink for files, or None."""
        self._latest: dict[str, Table] = {}
        self._latest_step: int | None = None
        self._queue = BackgroundQueue(_MOST_BATCHES)
        self._lock = threading.Lock()
        self._open: _Batch | None = None  # the batch that the next record joins
        self._image_bytes = 0
        self._written_s = -math.inf  # the time at which the previous batch was written
        self.recorded: Counter[str] = Counter()
        """The number of nonempty records of each stage. Read it only after :meth:`wait`."""
        self.empty: Counter[str] = Counter()
        """The number of empty records of each stage."""
        self.settings: dict[str, Any] = {}
        """The settings of the run for the record file, as JSON values. Set them before the first record."""

    def begin(
        self, sink: Sink | None, directory: Path | None, label: str, *, artifact_sinks: Sink | None = None
    ) -> None:
        """Begin a run. ``sink`` must accept writes from any thread. ``artifact_sinks`` need not."""
        self._seal()
        self.sink, self.artifact_sinks, self.label = sink, artifact_sinks, label
        self._directory = directory
        self.formatter.begin(label)
        self.receipt.begin(sink, directory, label)
        self.consumers, self.settings = [], {}
        self.recorded, self.empty = Counter(), Counter()
        self._has_receipt, self._interval = False, None

    def latest_of(self, stage: str) -> Mapping[Site, SiteStatistics]:
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
        self._seal()
        self._queue.wait()

    def replay(self) -> None:
        """Run the queued writes of sinks that are bound to this thread."""
        if isinstance(self.sink, MultiSink) and not self.sink.is_idle:
            self.sink.replay()

    def end(self) -> None:
        """Wait until everything is written, release the sink, and raise the first error."""
        self.wait()
        try:
            for consumer in list(self.consumers):
                self._contained(consumer, consumer.finish)
            self.receipt.finish()
            if self.sink is not None:
                self.formatter.finish(self.sink)
            self.replay()
            self._queue.drain()
        finally:
            self.sink = self.artifact_sinks = self.coverage = self._known = None
            self.receipt.begin(None, None, self.label)
            self.consumers = []

    def add(self, record: Record, run: RunRecorder | None = None) -> None:
        """Queue a record for writing."""
        facts = None
        if record.stage == "train" and record.steps and run is not None and run.is_covered:
            self._has_receipt = True
            facts = self._facts(run, run.recorder.take_traces())
        nbytes, found = record.snapshot.nbytes, None
        most = _MOST_JOINED_BYTES if record.snapshot.has_arrived else _MOST_ARRIVING_BYTES
        if nbytes > most:  # reduce the states to statistics at once, because waiting records would take much memory
            found = record.snapshot.statistics()
            record.snapshot.release()
        with self._lock:
            batch = self._open
            is_new = batch is None or batch.nbytes + nbytes > _MOST_JOINED_BYTES
            if batch is None or is_new:
                if batch is not None:
                    batch.is_sealed.set()
                batch = self._open = _Batch()
            batch.records.append((record, facts, found))
            batch.nbytes += nbytes
        if is_new:
            self._queue.submit(partial(self._run, partial(self._write_batch, batch)))
        else:
            self._queue.raise_error()

    def _seal(self) -> None:
        """Close the waiting batch of records, so that it is written without delay."""
        with self._lock:
            batch, self._open = self._open, None
        if batch is not None:
            batch.is_sealed.set()

    def _submit(self, job: Callable[[], object]) -> None:
        """Queue a job after the previous records and jobs, and raise the error of an earlier job, if any."""
        self._seal()
        self._queue.submit(partial(self._run, job))

    def _put(self, job: Callable[[], object]) -> None:
        """Queue a job after the previous records and jobs."""
        self._seal()
        self._queue.put(partial(self._run, job))

    def _run(self, job: Callable[[], object]) -> None:
        with raise_errors(self._strict):
            job()

    def _facts(self, run: RunRecorder, traces: Mapping[str, Any]) -> ReceiptFacts:
        if self._known is None or self._known[0] is not self.coverage or self._known[1] != traces:
            coverage = self.coverage or Coverage(nn.Module(), {}, ())
            self._known = self.coverage, traces, coverage.having(**traces)
        return self._known[2], run.sampling, run.reduce

    def find_gradients(self) -> None:
        """Find the modules whose parameters have a gradient now, for the first receipt."""
        if not self._has_receipt and self.coverage is not None:
            trained = with_gradients(self.coverage.modules) | set(self.coverage.trained)
            self.coverage = self.coverage.having(trained=trained)

    def report_interval(self, run: RunRecorder) -> None:
        """Log the recording interval and write it as a scalar if an overhead limit has changed it."""
        limit, interval = run.sampling.max_overhead, run.every_n_train_steps
        if limit is None or interval == self._interval:
            return
        before, self._interval = self._interval, interval
        if before is not None:
            self._log(
                f"{self._name} records every {interval} steps instead of {before}, to take at most {100 * limit:g} %"
            )
        if self.sink is not None:
            scalars = {f"recorder/{self.label}/every_n_train_steps": interval}
            self._submit(partial(self.sink.write_scalars, run.last_step, scalars))

    def end_epoch(self) -> None:
        """Queue the consumers' work at the end of an epoch."""
        for consumer in self.consumers:
            self._submit(partial(self._contained, consumer, consumer.end_epoch))

    def remove(self, job: Callable[[], object]) -> None:
        """Queue a removal after all previous jobs. It runs even if a consumer has failed."""
        self._put(job)

    def submit(self, consumer: RecordConsumer, job: Callable[[], object]) -> None:
        """Queue a job of a consumer after all previous jobs. Pending errors are not raised here."""
        self._put(partial(self._contained, consumer, job))

    def show(self, step: int, images: Mapping[str, Image]) -> int | None:
        """Write images from any thread. Return the number of bytes written, or None if the sink does not count them."""
        sink = self.sink
        if sink is None:
            return None
        before = sink.written_bytes
        sink.write_images(step, images)
        after = sink.written_bytes
        if after is None:
            return None
        written = after - (before or 0)
        self._image_bytes += written
        return written

    def announce(self, step: int, recording_ms: float, run: RunRecorder) -> None:
        """Report the receipt of a step that is not a record yet. Its record completes the receipt."""
        facts = self._facts(run, run.recorder.traces())
        receipt = self.receipt.announce(step, recording_ms, run.recorder.states.sites, facts)
        self._submit(partial(self.receipt.write, receipt))

    def _write_batch(self, batch: _Batch) -> None:
        """Write the records of a batch. Writing frequent records together costs much less for each record."""
        delay_s = self._written_s + _JOIN_S - time.monotonic()
        if delay_s > 0 and not self._strict and batch.thread != threading.get_ident():
            batch.is_sealed.wait(delay_s)
        with self._lock:
            if self._open is batch:
                self._open = None
        self._complete(batch)
        if not batch.records:
            return
        before = self._written_bytes
        tables = list(self._tables(batch))
        # On a disk that is nearly full, the events of many records would take the space of the record files. Each
        # record is then written to all files before the next one.
        joins = self._directory is None or fits(self._directory, 2 * _MOST_JOINED_BYTES)
        try:
            with self.sink.joined() if joins and self.sink is not None else nullcontext():
                for found in tables:
                    self._write(found)
                    if not joins:
                        self._flush()
        finally:
            self._flush()
        written = self._written_bytes
        size = None if written is None else (written - (before or 0)) // len(batch.records)
        for (record, facts, _), found in zip(batch.records, tables, strict=True):
            if facts is not None and not record.is_sample:
                self.receipt.add(found, size, facts)
            if size is not None and record.stage == "train":
                self.receipt.add_size(size)
        self.receipt.flush()
        self._written_s = time.monotonic()

    @staticmethod
    def _complete(batch: _Batch) -> None:
        """Wait until the ranks of each record are merged. Drop the records that have no states."""
        completed = [(record.complete(), facts, found) for record, facts, found in batch.records]
        batch.records = [(record, facts, found) for record, facts, found in completed if record is not None]

    def _flush(self) -> None:
        for consumer in list(self.consumers):
            self._contained(consumer, consumer.flush)

    def _tables(self, batch: _Batch) -> Iterator[Table]:
        missing = iter(statistics_of([record.snapshot for record, _, found in batch.records if found is None]))
        for record, _, found in batch.records:
            table = (next(missing) if found is None else found).having(about=record.facts(self.formatter.group))
            record.snapshot.release()
            if record.snapshot.diverged and not any(each.reports_divergence for each in self.consumers):
                self._warn_of_divergence(table)
            yield table if self._derive is None else self._derive(table)

    def _write(self, found: Table) -> None:
        stage, loader = found.stage, found.about["loader"]
        if found.about["is_sample"]:
            for consumer in [each for each in self.consumers if each.takes_samples]:
                self._contained(consumer, partial(consumer.on_record, found))
            return
        (self.recorded if found else self.empty)[stage] += 1
        if found and not found.about["overflowed"]:
            self._latest[stage + ("" if loader is None else f"/{loader}")] = found
            if stage == "train":
                self._latest_step = found.step
        if self.sink is not None and (found or found.about["overflow_steps"]):
            self.formatter.write(self.sink, found)
        for consumer in list(self.consumers):
            self._contained(consumer, partial(consumer.on_record, found))

    @property
    def _written_bytes(self) -> int | None:
        """The size of the records in the sink and in files in bytes, without images, or None if nothing counts them."""
        of_sink = None if self.sink is None else self.sink.written_bytes
        of_consumers = sum(consumer.written_bytes for consumer in self.consumers)
        return of_consumers or None if of_sink is None else of_sink - self._image_bytes + of_consumers

    def _logged_bytes(self, records: int) -> int:
        """Return the estimated number of bytes that the consumers pass to the loggers for this many records."""
        return sum(consumer.logged_bytes(records) for consumer in self.consumers)

    def _warn_of_divergence(self, found: Table) -> None:
        diverged = sorted(found.about["diverged"] & found.keys())
        if diverged and not self._has_warned_of_divergence:
            self._has_warned_of_divergence = True
            name = ".".join(filter(None, diverged[0]))
            others = f" and {len(diverged) - 1} more differ" if len(diverged) > 1 else " differs"
            warn(f"the ranks have diverged: {name!r}{others} between ranks at step {found.step}")

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


_LEFT_OUT = ("calls", "diverged", "is_sample")  # the entries that are left out if they are empty or False


class RecordFile(RecordConsumer):
    """Append each record to the file that :func:`~lightning_recorder.open_recording` reads."""

    takes_samples = True

    def __init__(
        self,
        directory: Path,
        label: str,
        *,
        group: str,
        name: str = "",
        ranks: int = 1,
        settings: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> None:
        self._writer = RecordWriter(records_path(directory, label), strict=strict)
        self._begin = partial(self._writer.begin, label=label, group=group, name=name, ranks=ranks)
        self._settings = {} if settings is None else settings
        self._group = group
        self._has_begun = False
        self._header_bytes = 0  # the header is written once, so it does not count in the bytes per record
        self._held: list[tuple[dict[str, Any], Table]] = []

    def __str__(self) -> str:
        return f"the file of records {self._writer.path.name}"

    @property
    @override
    def written_bytes(self) -> int:
        return self._writer.written_bytes - self._header_bytes

    @override
    def on_record(self, found: Table) -> None:
        table = found.take(found.schema.order_of(self._group))
        fields = {**table.about, **_calls(table.about["calls"], table)}
        fields = {name: value for name, value in fields.items() if name not in _LEFT_OUT or value}
        if fields.pop("batch", None) is not None:
            fields["batch"] = table.about["batch"]
        if table.about["diverged"]:
            fields["diverged"] = sorted(map(list, table.about["diverged"]))
        self._held.append((fields, table))

    @override
    def flush(self) -> None:
        if self._held and not self._has_begun:  # without records, no file is created
            self._has_begun = True
            self._begin(settings=dict(self._settings))
            self._header_bytes = self._writer.written_bytes
        held, self._held = self._held, []
        self._writer.write_all(held)


def _calls(calls: Mapping[Site, int], table: Table) -> dict[str, Any]:
    """Return the number of tensors of each site, and the order of calls if it differs from the order of the sites."""
    if tuple(calls) == table.sites:  # the common case
        return {"calls": list(calls.values())}
    order = [table.rows[site] for site in calls if site in table]
    return {"calls": [calls.get(site, 0) for site in table.sites], "order": order} if calls else {}

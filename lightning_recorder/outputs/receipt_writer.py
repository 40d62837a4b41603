"""The writer of the receipt, which is updated by the records of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from lightning_recorder.errors import describe_error, warn
from lightning_recorder.outputs.coverage import Coverage
from lightning_recorder.outputs.coverage_history import CoverageHistory
from lightning_recorder.outputs.receipt import Change, CoverageReport, paths_by_module
from lightning_recorder.schedule import Reduce, Sampling
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics.sites import Record, SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["ReceiptFacts", "ReceiptWriter"]

_SOME_RECORDS = 10  # enough records to estimate their mean size

ReceiptFacts = tuple[Coverage, Sampling, Reduce]
"""The facts about the modules since the previous record, the schedule, and the steps of a record."""


class ReceiptWriter:
    """Write the receipt of a run to its folder and to a sink.

    The receipt is complete with the first record. It is written again when the recorded modules change, after 10, 20,
    40, … records, and at the end of the run.

    Args:
        name: The name of the recorder in messages.
        log: A callback that receives the summary line and the changes.
        logged_bytes: A function that estimates the number of bytes passed to the loggers for a number of records, in
            addition to the records themselves.
    """

    def __init__(self, *, name: str, log: Callable[[str], object], logged_bytes: Callable[[int], int]) -> None:
        self._name = name
        self._log = log
        self._logged_bytes = logged_bytes
        self.begin(None, None, "")

    def begin(self, sink: Sink | None, directory: Path | None, label: str) -> None:
        """Begin a run.

        Args:
            sink: The sink for the receipt, or None.
            directory: The folder of the receipt, or None.
            label: The name of the recorder in the receipt.
        """
        self.note = ""
        """A text that is appended to the summary line."""
        self._sink, self._directory, self._label = sink, directory, label
        self._receipt: CoverageReport | None = None
        self._history: CoverageHistory | None = None
        self._is_announced = False
        self._records = self._bytes = 0

    def announce(self, step: int, recording_ms: float, sites: list[Site], facts: ReceiptFacts) -> CoverageReport:
        """Log and return the receipt of a step that is not a record yet. Its record completes the receipt."""
        receipt = replace(_make_receipt(step, sites, *facts), recording_ms=recording_ms)
        self._log(f"{self._name}: {receipt.summary}{self.note}")
        self._is_announced = True
        return receipt

    def write(self, receipt: CoverageReport) -> None:
        """Write the receipt to the folder."""
        self._receipt = receipt
        if self._directory is not None:
            try:
                receipt.write(self._directory, self._label)
            except OSError as error:
                self._directory = None
                warn(f"{self._name} could not write its receipt: {describe_error(error)}")

    def add(
        self, record: Record, found: Mapping[Site, SiteStatistics], written: int | None, facts: ReceiptFacts
    ) -> None:
        """Update the receipt with the recorded and the missing modules of a record.

        Args:
            record: The record.
            found: The statistics of its sites.
            written: The number of bytes written for the record, or None if they were not counted.
            facts: The facts of the receipt.
        """
        is_first = self._history is None
        self._history = self._history or CoverageHistory()
        changes = self._history.add(record.step, found, facts[0])
        if is_first:
            self._write_first(record, found, written, facts)
            return
        self._log_changes(changes)
        if self._receipt is not None and (changes or _is_round(self._history.records)):
            self.write(self._history.complete(self._receipt))

    def _write_first(
        self, record: Record, found: Mapping[Site, SiteStatistics], written: int | None, facts: ReceiptFacts
    ) -> None:
        receipt = _make_receipt(record.step, found, *facts)
        receipt = replace(
            receipt,
            recording_ms=record.recording_ms,
            flush_ms=record.flush_ms,
            event_bytes_per_1000_steps=None if written is None else self._forecast(written, receipt),
            merged_ranks=record.ranks,
        )
        if not self._is_announced:
            self._log(f"{self._name}: {receipt.summary}{self.note}")
        self.write(receipt)
        self._write_text(record.step, receipt)

    def add_size(self, written: int) -> None:
        """Add the size of a record in bytes. After ten records, the receipt has their mean size."""
        self._records += 1
        self._bytes += written
        if self._records == _SOME_RECORDS:
            self._update_size()

    def finish(self) -> None:
        """Update the receipt at the end of the run, and write it to the sink again if there were further records."""
        self._update_size()
        if self._history is None or self._receipt is None:
            return
        self._log_changes(self._history.finish())
        receipt = self._history.complete(self._receipt)
        self.write(receipt)
        if receipt.last_step > receipt.step:
            self._write_text(receipt.last_step, receipt)

    def _update_size(self) -> None:
        if self._receipt is not None and self._records:
            size = self._forecast(self._bytes / self._records, self._receipt)
            self.write(replace(self._receipt, event_bytes_per_1000_steps=size))

    def _forecast(self, record_bytes: float, receipt: CoverageReport) -> int:
        """Return the estimated number of bytes written in 1000 steps."""
        records = receipt.records_per_1000_steps
        return int(record_bytes * records) + self._logged_bytes(records)

    def _write_text(self, step: int, receipt: CoverageReport) -> None:
        if self._sink is not None:
            self._sink.write_text(step, {f"recorder/{self._label}/receipt": receipt.markdown})

    def _log_changes(self, changes: list[Change]) -> None:
        for change in changes:
            self._log(f"{self._name}: {change.text}")


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

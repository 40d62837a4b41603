"""Write the loss and the gradient norm of every step to the records and to the loggers."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_recorder.recordings import RecordWriter, Schema, SiteStatistics, records_path
from lightning_recorder.records.file import LOGGED
from lightning_recorder.records.table import Table
from lightning_recorder.sinks import BackgroundQueue, MultiSink
from lightning_recorder.taps import Site

__all__ = ["StepSeries"]

# The maximum time that a step waits to be written together with others. A killed process loses the waiting steps.
_JOIN_S = 0.5

_Row = tuple[int, int, float, float]
_Logged = tuple[int, int, dict[str, float]]


class StepSeries:
    """Writes the loss and the gradient norm of every step.

    All steps are written to the records; the sites are ``loss`` and ``grad_norm``, with the statistic ``value``. Steps
    that Lightning logs are also written to the sink, as ``watch/loss`` and ``watch/grad_norm``. Values that the user
    logs are written to the records of the stage ``logged``, with a site for each name. A background thread writes each
    step at most half a second after it was added, together with the steps added meanwhile.
    """

    def __init__(
        self, directory: Path | None, sink: MultiSink | None, *, label: str, is_logged: Callable[[int], bool]
    ) -> None:
        self._writer = None if directory is None else RecordWriter(records_path(directory, label))
        self._sink, self._label, self._is_logged = sink, label, is_logged
        self._queue = BackgroundQueue()
        self._lock = threading.Lock()
        self._rows: list[_Row] = []
        self._logged: list[_Logged] = []  # while one of the lists is not empty, a job that writes it is queued
        self._last_logged: _Logged = (-1, 0, {})  # kept back, because more values may follow for its step
        self._is_due = threading.Event()
        self._written_s = -math.inf  # the time of the previous write
        self._has_begun = False
        self.has_logged = False
        """True if a step was written to the sink since the latest :meth:`replay`."""

    def add(self, step: int, epoch: int, loss: float, norm: float) -> None:
        """Add a step. Pass NaN for a missing value."""
        row = step, epoch, loss, norm
        with self._lock:
            if self._rows:  # a job that writes the rows is queued
                self._rows.append(row)
                return
        self._add(self._rows, row)

    def add_logged(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Add values that the user has logged at a step. They are merged with earlier values of the same step."""
        if self._writer is not None:
            before, _, known = self._last_logged
            self._last_logged = step, epoch, {**(known if before == step else {}), **values}
            self._add(self._logged, self._last_logged)

    def _add(self, rows: list[Any], row: _Row | _Logged) -> None:
        with self._lock:
            is_first = not (self._rows or self._logged)
            rows.append(row)
        if is_first:
            self._queue.submit(partial(self._write_joined, threading.get_ident()))

    def flush(self) -> None:
        """Queue all added steps for writing."""
        with self._lock:
            if self._rows or self._logged:
                self._is_due.set()

    def wait(self) -> None:
        """Write all added steps and wait until they are written."""
        self.flush()
        self._queue.wait()

    def end(self) -> None:
        """Write all added steps, also to sinks that are bound to this thread, and raise the first error."""
        self.wait()
        self.replay()
        self._queue.drain()

    def replay(self) -> None:
        """Run the queued writes of sinks that are bound to this thread."""
        self.has_logged = False
        if self._sink is not None and not self._sink.is_idle:
            self._sink.replay()

    def _write_joined(self, adding_thread: int) -> None:
        """Write the added steps when half a second has passed since the previous write, or when they are due."""
        if adding_thread != threading.get_ident():  # without a writer thread, the queue runs jobs in the adding thread
            self._is_due.wait(max(0.0, self._written_s + _JOIN_S - time.monotonic()))
        with self._lock:
            rows, logged = [*self._rows], {each[0]: each for each in self._logged}
            self._rows.clear()
            self._logged.clear()
            self._is_due.clear()
        self._write(rows, [*logged.values()])
        self._written_s = time.monotonic()

    def _write(self, rows: list[_Row], logged: list[_Logged]) -> None:
        if self._writer is not None:
            if not self._has_begun:  # the file is begun with the first step, so that a run without steps has no file
                self._has_begun = True
                self._writer.begin(label=self._label, group=self._label)
            self._writer.write_numbers(
                _SCHEMA, [(step, epoch, struct.pack("<2d", loss, norm)) for step, epoch, loss, norm in rows]
            )
            self._writer.write_all(
                (
                    {"step": step, "epoch": epoch, "stage": LOGGED, "loader": None},
                    Table.of((Site(name, "out"), SiteStatistics({"value": value})) for name, value in values.items()),
                )
                for step, epoch, values in logged
            )
        if self._sink is not None:
            for step, _, loss, norm in rows:
                if self._is_logged(step):
                    self._sink.write_scalars(step, _scalars(self._label, loss, norm))
                    self.has_logged = True


_SCHEMA = Schema((Site("loss", "out"), Site("grad_norm", "out")), ("value",), (None, None), (None, None))


def _scalars(label: str, loss: float, norm: float) -> dict[str, float]:
    values = {f"{label}/loss": loss, f"{label}/grad_norm": norm}
    return {tag: value for tag, value in values.items() if not math.isnan(value)}

"""Find and report findings while a run is recorded, and list them when the run ends."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_recorder.disk import attempt
from lightning_recorder.errors import describe_error, warn
from lightning_recorder.graph.model import Graph
from lightning_recorder.insight import (
    RULES,
    Diagnosis,
    Finding,
    RunFacts,
    RunHistory,
    examine,
    with_watched,
)
from lightning_recorder.insight.data_facts import DataFacts
from lightning_recorder.insight.finding import RANKS_DIFFER
from lightning_recorder.insight.rules.noise_scale import NOISE_SCALE
from lightning_recorder.outputs.pipeline import RecordConsumer
from lightning_recorder.outputs.receipt import write_receipt
from lightning_recorder.recordings import records_path
from lightning_recorder.recordings.diagnose import diagnose
from lightning_recorder.recordings.recording import Run
from lightning_recorder.records.file import FINDINGS, RECORDS, calls_of
from lightning_recorder.records.table import Table
from lightning_recorder.sinks import Sink
from lightning_recorder.temporary import write_bytes

__all__ = ["REPORT", "ExaminedRecords", "RunFindings"]

REPORT = "report.html"

_MOST_LISTED = 3
_SHARE = 0.02  # the maximum time for writing the report, as a share of the time of the fit
_REPORT_S = 0.5  # the time for the report of a short run, including the import of its code
_REPORT_S_PER_BYTE = 1 / 20e6  # the additional time for the report per byte of the record files
_FIRST_CHECK = 5  # the number of records of each recorder before the first check
_GROWTH = 2  # from check to check, the number of records grows by this factor, which bounds the time for checks
_LASTING = frozenset(rule.name for rule in RULES if rule.is_lasting)
_NOT_FINITE = ("nan_count", "inf_count")


class RunFindings:
    """The findings from the records of all recorders of a run.

    The records are checked after five records of each recorder, whenever their number has doubled, and soon after the
    first NaN or infinity. A finding that may be temporary is logged only after two checks in a row. When the last
    recorder has ended, the verdict and the findings are logged and written to ``findings.json``, together with a list
    of what could not be examined. An error in this class gives one warning.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        log: Callable[[str], object],
        types: Mapping[str, str],
        graph: Callable[[], Graph | None],
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._began = clock, clock()
        self._report_wanted: list[bool | None] = []
        self._run = None if directory is None else Run(directory.parent.name, directory)
        self._log, self._graph, self._strict = log, graph, strict
        self._history, self._types, self._ignored = RunHistory(), types, set[str]()
        self._lock = threading.RLock()
        self._open: set[str] = set()
        self._groups: dict[str, str] = {}
        self._steps: dict[str, int] = {}  # the last step of each recorder
        self._reasons: dict[str, Any] = {}  # the reasons why recorders have no records, in the format of a receipt
        self._waits: dict[str, Callable[[], object]] = {}
        self._are_files_complete = directory is not None
        self._continues = False
        self._has_failed = self._was_bad = False
        self._records = self._last_step = 0
        self._has_steps = False
        self._due = 0
        self._written = b""
        self._before: set[tuple[str, str, str]] = set()
        self._said: set[tuple[str, str, str]] = set()
        self._joined: set[str] = set()
        self._watched: list[Finding] = []
        self._data: DataFacts | None = None
        self._current: list[Finding] = []
        self._current_of = (0, 0)  # the numbers of records and of watched findings at the time of the last ``current``
        self._diagnosis: Diagnosis | None = None  # set when the run has ended
        self.named: frozenset[str] = frozenset()
        """The modules named by findings other than notes, as of the last check or :meth:`catch_up`."""

    def __contains__(self, label: object) -> bool:
        """Return True if a recorder with this label has begun."""
        return label in self._groups or label in self._joined

    def begin(
        self,
        label: str,
        group: str,
        *,
        has_file: bool,
        wait: Callable[[], object] = lambda: None,
        report: bool | None = None,
        ignored: Collection[str] = (),
    ) -> ExaminedRecords:
        """Begin the records of a recorder, and return the consumer that receives them.

        Args:
            label: The label of the recorder.
            group: The kind of tensors.
            has_file: True if the records of this recorder are written to a file.
            wait: A function that waits until the queued records of this recorder are written.
            report: Write ``report.html`` at the end. ``None`` writes it if writing takes a small share of the time of
                the fit. If recorders differ, True takes precedence over False, and False over ``None``.
            ignored: The names of the rules to leave out, for all recorders.
        """
        self._open.add(label)
        self._ignored.update(ignored)
        self._report_wanted.append(report)
        self._groups[label], self._waits[label] = group, wait
        self._due = _FIRST_CHECK * len(self._groups)
        self._are_files_complete &= has_file
        if self._run is not None:
            self._continues |= records_path(self._run.directory, label).exists()
        return ExaminedRecords(self, label, group)

    def join(self, label: str) -> None:
        """Begin a recorder that reports its own findings and has no records."""
        self._open.add(label)
        self._joined.add(label)

    def catch_up(self) -> None:
        """Examine the queued records of all recorders, so that recorders that end first know all findings.

        Must be called after the training, from a thread that writes no records.
        """
        for label in self._open & self._waits.keys():
            self._waits[label]()
        self.named = frozenset(each.layer for each in self.current()) - {""}

    def current(self) -> list[Finding]:
        """Return the findings so far, without notes. Return an empty list after an error."""
        with self._lock:
            if self._current_of != (self._records, len(self._watched)):  # cached, since all recorders ask at the end
                self._current = []
                self._contained(lambda: self._current.extend(self._examined().bad))
                self._current_of = self._records, len(self._watched)
            return list(self._current)

    def set_data(self, data: DataFacts) -> None:
        """Set the facts about the samples of the batches."""
        with self._lock:
            self._data = data
            self._current_of = (0, 0)

    def report(self, finding: Finding) -> None:
        """Add a finding that is not derived from records, and log it. An earlier finding of its kind is replaced."""
        with self._lock:
            self._contained(partial(self._report, finding))

    def _report(self, finding: Finding) -> None:
        if finding.rule in self._ignored:
            return
        known = {_key(each): place for place, each in enumerate(self._watched)}
        self._last_step = max(self._last_step, finding.last_step)
        if _key(finding) in known:
            place = known[_key(finding)]
            is_worse = self._watched[place].is_note and not finding.is_note
            self._watched[place] = finding
            self._current_of = (0, 0)
            if is_worse:
                self._say(finding, finding.last_step)
            return
        self._watched.append(finding)
        self.named |= {finding.layer} - {""}
        if not finding.is_note:
            self._say(finding, finding.last_step)
        self._write(self._examined())

    def note_step(self) -> None:
        """Record that a step was trained, so that the fit ends with a verdict even if nothing is recorded."""
        self._has_steps = True

    def add(self, record: Table) -> None:
        """Examine a record. Called in the writer threads."""
        with self._lock:
            self._contained(partial(self._add, record))

    def end(self, label: str, sink: Sink | None, why: str = "") -> bool:
        """End the records of a recorder. After the last recorder, report the findings and return True.

        ``why`` is the reason why the recorder has no records, or no records after some step. It is kept in the receipt
        of the run.
        """
        with self._lock:
            self._open.discard(label)
            if why:
                self._contained(partial(self._keep_reason, label, why))
            if self._open:
                return False
            is_report_due = self._is_report_due()  # decided now, so that the time of the examination does not count
            self._contained(partial(self._finish, sink))
            report = self._write_report() if is_report_due else None
            if self._diagnosis is not None:
                self._log(self._conclusion(self._diagnosis, report))
            if self._run is not None:
                self._run = Run(self._run.name, self._run.directory)  # frees the records that were read
            return True

    def _keep_reason(self, label: str, why: str) -> None:
        self._reasons[label] = {"ended": why}
        if self._run is not None:
            write_receipt(self._run.directory, label, {**self._coverage()[label], "ended": why})

    def _coverage(self) -> dict[str, Any]:
        """Return the receipt, with an entry for each recorder."""
        known = (None if self._run is None else self._run.receipt) or {}
        return {**{label: {} for label in self._groups}, **self._reasons, **known}

    def _contained(self, job: Callable[[], object]) -> None:
        if self._has_failed:
            return
        try:
            job()
        except Exception as error:
            self._has_failed = True
            if self._strict:
                raise
            warn(f"records are no longer examined for findings: {describe_error(error)}")

    def _add(self, record: Table) -> None:
        self._history.add(record)
        step = record.step
        is_in_step = self._is_in_step(record.recorder, step)
        self._records += 1
        self._last_step = max(self._last_step, step)
        if not self._was_bad and bool((record.part(None, _NOT_FINITE) > 0).any()):
            # Check soon, but after the other recorders' records of this step, which may be needed to name the module.
            self._was_bad = True
            self._due = min(self._due, self._records + len(self._groups))
        if self._records >= self._due and (is_in_step or self._records >= 2 * self._due):
            self._due = int(self._records * _GROWTH) + 1
            self._check()

    def _is_in_step(self, recorder: str, step: int) -> bool:
        """Return True if the records of all recorders have reached about the same step.

        Recorders write several records together, so one recorder may be ahead of the others.
        """
        others = [self._steps.get(label, -1) for label in self._open - self._joined if label != recorder]
        before = self._steps.get(recorder, -1)
        self._steps[recorder] = max(before, step)
        return not others or (before <= min(others) and step >= max(others))

    def _check(self) -> None:
        found = self._examined()
        bad = found.bad
        self.named = frozenset(each.layer for each in bad) - {""}
        for each in bad:
            if _key(each) in self._before or each.rule in _LASTING:
                self._say(each, self._last_step)
        self._before = set(map(_key, bad))
        self._write(found)

    def _say(self, finding: Finding, step: int) -> None:
        """Log a finding once."""
        # If ranks differ, the watch and the records may name different parameters. Only the first finding is logged.
        key = (finding.rule, "", "") if finding.rule == RANKS_DIFFER else _key(finding)
        if key not in self._said:
            self._said.add(key)
            self._log(f"Found at step {step}: {finding.line}")

    def _examined(self) -> Diagnosis:
        # The graph and the receipt change during the run, so they are read again. Until a resumed run has a graph, the
        # graph in its folder is used.
        run, graph = self._run, self._graph()
        if run is not None and graph is not None:
            run.set_graph(graph)
        elif run is not None:
            graph = run.graph
        facts = RunFacts(self._coverage(), self._types, self._ignored, self._watched, self._data)
        return examine(self._history, graph, facts)

    def _finish(self, sink: Sink | None) -> None:
        # Examine the files instead of the history in two cases. After a resumption, only the files have the earlier
        # records. With several recorders of one group, only the files have a fixed order.
        has_several = len(set(self._groups.values())) < len(self._groups)
        run = self._run
        in_files = run is not None and self._are_files_complete and (self._continues or has_several)
        found = self._examined()
        if run is not None and in_files:
            read = diagnose(run, self._ignored)
            found = Diagnosis(with_watched(read.findings, self._watched), read.gaps)
        if not found.bad and not (self._records or self._has_steps or self._watched):
            return  # no step was trained, and the recorders report this
        self._diagnosis = found
        self._write(found)
        if sink is not None and (found.bad or found.open):
            sink.write_text(self._last_step, {"recorder/findings": _markdown(found)})

    def _conclusion(self, found: Diagnosis, report: Path | None) -> str:
        """Return the last message of a fit: the findings or a healthy verdict, and the commands to see more."""
        run, see = self._run, []
        if run is not None:
            path = shlex.quote(_shown(run.log_dir))
            has_files = next((run.directory / RECORDS).glob("*.jsonl"), None) is not None
            commands = [name for name, is_useful in (("doctor", found.bad or found.open), ("view", True)) if is_useful]
            commands = commands if has_files else []
            see = [f"run {' or '.join(f'`lightning-recorder {each} {path}`' for each in commands)}"] if commands else []
        if report is not None:
            see.append(f"open {_shown(report)}")
        first = {"healthy": "Healthy: no findings", "no findings": "No findings, but not everything was examined"}
        more = len(found.bad) - _MOST_LISTED
        lines = [each.line for each in found.bad[:_MOST_LISTED]]
        lines += [f"and {more} more"] if more > 0 else []
        lines += [each.line for each in found.findings if each.rule == NOISE_SCALE]
        lines += [] if found.bad else [each.line for each in found.open]  # `doctor` prints them below the findings
        why = "" if report is not None else self._why_no_report()
        lines += [f"{REPORT} is not written, because {why}"] if why else []
        title = "; ".join(filter(None, [first.get(found.verdict, found.verdict), ", or ".join(see)]))
        return "\n".join([title, *(f"  {line}" for line in lines)])

    def _write_report(self) -> Path | None:
        """Write the page of the run, and return its path. Called when the files of the recorders are complete."""
        run = self._run
        if run is None:
            return None
        try:
            from lightning_recorder.page import page_data, page_html

            run.refresh()
            known = None if self._diagnosis is None else {run.name: self._diagnosis}
            html = page_html(page_data({run.name: run}, known=known), f"{run.name} · lightning_recorder").encode()
            path = run.directory / REPORT
            is_written = attempt(path, len(html), partial(write_bytes, path, html))
        except Exception as error:
            if self._strict:
                raise
            warn(f"{REPORT} was not written: {describe_error(error)}")
            return None
        return path if is_written else None

    def _is_report_due(self) -> bool:
        if self._run is None or not self._records or not self._are_files_complete:
            return False
        asked = [each for each in self._report_wanted if each is not None]
        return any(asked) if asked else _report_s(self._run) <= _SHARE * (self._clock() - self._began)

    def _why_no_report(self) -> str:
        """Return the reason why a requested page is not written, or an empty string if there is nothing to say."""
        if not any(self._report_wanted) or self._run is None or not self._records or self._are_files_complete:
            return ""
        return "a recorder has records=False; remove this setting to get it"

    def _write(self, found: Diagnosis) -> None:
        if self._run is not None:
            path = self._run.directory / FINDINGS
            data = (json.dumps(found.to_json(), indent=1) + "\n").encode()
            if data != self._written and attempt(path, len(data), partial(write_bytes, path, data)):
                self._written = data


class ExaminedRecords(RecordConsumer):
    """Passes the records of one recorder to the findings of the run."""

    takes_samples = True
    reports_divergence = True

    def __init__(self, findings: RunFindings, label: str, group: str) -> None:
        self._findings, self._label, self._group = findings, label, group

    def __str__(self) -> str:
        return "findings"

    @override
    def on_record(self, found: Table) -> None:
        if found.stage == "train":
            self._findings.note_step()
        if not found or found.about["overflowed"] or found.about["loader"] not in (None, 0):
            return
        table = found.take(found.schema.order_of(self._group))
        table = table.having(about={**found.about, "group": self._group, "recorder": self._label})
        self._findings.add(table.in_order(calls_of(table)))  # the order of calls may differ from the first record


def _report_s(run: Run) -> float:
    """Return the estimated time for writing the page, in seconds."""
    graph = run.directory / "graph.json"
    size = sum(path.stat().st_size for path in (run.directory / RECORDS).glob("*.jsonl"))
    size += 4 * graph.stat().st_size if graph.exists() else 0  # the graph takes longer to read per byte
    return _REPORT_S + size * _REPORT_S_PER_BYTE


def _key(finding: Finding) -> tuple[str, str, str]:
    return finding.rule, finding.module, finding.path


def _shown(path: Path) -> str:
    """Return the path relative to the current folder if the path is inside this folder."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _markdown(found: Diagnosis) -> str:
    parts = [f"**{each.line}**\n\n{each.why}\n\nNext: {each.next}" for each in found.bad]
    parts += [f"{each.line}." for each in found.open]
    return "\n\n".join(parts).encode("utf-8", "replace").decode()

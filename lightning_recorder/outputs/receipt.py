"""The receipt of a run: the recorded and the missing modules, the changes during the run, and the costs."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from lightning_recorder.disk import attempt, readable_size
from lightning_recorder.errors import DumpError
from lightning_recorder.names import is_batch
from lightning_recorder.outputs.coverage import Coverage
from lightning_recorder.records.table import Table
from lightning_recorder.schedule import Reduce, Sampling
from lightning_recorder.sinks import Sink
from lightning_recorder.taps import Site
from lightning_recorder.temporary import write_bytes
from lightning_recorder.untrusted import read_json

__all__ = [
    "RECEIPT",
    "CoverageReport",
    "PresenceHistory",
    "ReceiptFacts",
    "ReceiptWriter",
    "write_receipt",
]

RECEIPT = "receipt.json"

_LOCK = threading.Lock()
_FEW_NAMES = 3  # the maximum number of names in a summary

Unit = TypeVar("Unit", bound=Hashable)

_FEWEST = 3  # the minimum number of records without a unit before a change is reported
_LONG_RUN = 20  # a longer stretch of consecutive records with a unit counts as this many records
_UNLIKELY, _UNLIKELY_AT_END = 1e-4, 1e-3

_GRAD = ".grad"


@dataclass
class _Presence:
    """The presence of a unit in the records, which are numbered from 0."""

    first_step: int
    last_step: int
    first: int
    since: int
    """The first record of the current stretch with or without the unit."""
    seen: int = 0
    """The number of records with the unit before the current stretch."""
    longest_gap: int = 0
    longest_run: int = 0
    is_present: bool = True
    has_stopped: bool = False
    """True if the unit has already been reported as stopped."""


class PresenceHistory(Generic[Unit]):
    """Tracks the presence of units, such as modules, in the records of a run.

    A unit has *started* late if at least 3 records came before its first one.

    The gap of a unit is the number of records since its last one. A unit has *stopped* if the gap is at least 3 records
    and longer than each earlier gap. The gap must also be longer than each earlier stretch of consecutive records with
    the unit, where a stretch counts as at most 20 records. Finally, the gap must be unlikely: if the unit occurred at
    random with its observed frequency, the probability of such a gap would be below 0.01 %. Branches that alternate or
    are taken at random therefore do not count as stopped. At the end of the run, the condition on stretches is dropped,
    and the limit of the probability is 0.1 %.

    Each unit starts late or stops at most once.

    Example:
        >>> coverage = PresenceHistory()
        >>> [coverage.update(step, ["a", "b"]) for step in range(5)][-1]
        ([], [])
        >>> [step for step in range(5, 50) if coverage.update(step, ["a"])[1] == ["b"]]
        [15]
        >>> coverage.steps("b")
        (0, 4)
    """

    def __init__(self) -> None:
        self.records = 0
        self.last_step = 0
        """The step of the latest record."""
        self._units: dict[Unit, _Presence] = {}
        self._present: dict[Unit, None] = {}
        self._absent: dict[Unit, None] = {}  # units that were seen before, and are not reported as stopped

    def update(self, step: int, seen: Iterable[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Add the units of a record. Return the units that have started late, and the units that have stopped."""
        number, self.records = self.records, self.records + 1
        before, self._present = self._present, dict.fromkeys(seen)
        new = [unit for unit in self._present if unit not in before]
        started = [unit for unit in new if self._begin(unit, step, number)]
        for unit in before:
            if unit not in self._present:
                self._leave(unit, number)
        self.last_step = step
        stopped = [unit for unit in self._absent if self._has_stopped(self._units[unit])]
        for unit in stopped:
            del self._absent[unit]
            self._units[unit].has_stopped = True
        return started, stopped

    @property
    def is_steady(self) -> bool:
        """True if another record with the same units changes nothing but the number of records."""
        return self.records > 0 and not self._absent

    def repeat(self, step: int) -> None:
        """Add a record with the same units as the previous one; see :attr:`is_steady`."""
        self.records += 1
        self.last_step = step

    def finish(self) -> list[Unit]:
        """Return the units that count as stopped when the run ends."""
        stopped = [unit for unit in self._absent if self._has_stopped(self._units[unit], at_end=True)]
        self._absent.clear()
        return stopped

    def steps(self, unit: Unit) -> tuple[int, int]:
        """Return the first and the last step at which a unit was recorded."""
        presence = self._units[unit]
        return presence.first_step, self.last_step if presence.is_present else presence.last_step

    def __contains__(self, unit: object) -> bool:
        return unit in self._units

    def _begin(self, unit: Unit, step: int, number: int) -> bool:
        """Begin a stretch with a unit. Return True if the unit has started late."""
        presence = self._units.get(unit)
        if presence is None:
            self._units[unit] = _Presence(step, step, number, number)
            return number >= _FEWEST
        self._absent.pop(unit, None)
        presence.longest_gap = max(presence.longest_gap, number - presence.since)
        presence.since, presence.is_present = number, True
        return False

    def _leave(self, unit: Unit, number: int) -> None:
        presence = self._units[unit]
        run = number - presence.since
        presence.seen += run
        presence.longest_run = max(presence.longest_run, run)
        presence.since, presence.is_present, presence.last_step = number, False, self.last_step
        if not presence.has_stopped:
            self._absent[unit] = None

    def _has_stopped(self, presence: _Presence, *, at_end: bool = False) -> bool:
        gap = self.records - presence.since
        if gap < _FEWEST or gap <= presence.longest_gap:
            return False
        if not at_end and gap <= min(presence.longest_run, _LONG_RUN):
            return False
        missed = presence.since - presence.first - presence.seen
        return _chance(presence.seen, missed, gap) < (_UNLIKELY_AT_END if at_end else _UNLIKELY)


def _chance(seen: int, missed: int, gap: int) -> float:
    """Return the probability of ``gap`` records in a row without a unit after ``seen`` hits and ``missed`` misses.

    The rate is unknown and has a uniform prior, so this is a ratio of two beta functions.
    """
    return math.exp(_log_beta(seen + 1, missed + 1 + gap) - _log_beta(seen + 1, missed + 1))


def _log_beta(a: int, b: int) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@dataclass(frozen=True)
class Change:
    """A change in the set of recorded modules or parameters, reported once.

    Args:
        step: The recorded step at which the change was noticed.
        kind: ``"stopped"`` or ``"started"``.
        names: The modules or parameters.
        why: The reason.
        text: The change as a sentence.
    """

    step: int
    kind: str
    names: tuple[str, ...]
    why: str
    text: str


@dataclass(frozen=True)
class CoverageReport:
    """A summary of the recorded modules of a run so far, and of the costs of recording."""

    step: int  # the first recorded step
    sites: Mapping[str, list[str]]  # the paths of the recorded tensors by module name
    missing: Mapping[str, str]  # the reasons for missing records by module name, the most important reasons first
    state_bytes: int  # the size of the states on the devices of one rank, in bytes
    every_n_train_steps: int  # the recording interval, in steps
    records_per_1000_steps: int  # the number of records in 1000 steps at this interval
    recording_ms: float = 0.0  # the time that the training thread spent in the hooks of the first step, in milliseconds
    flush_ms: float = 0.0  # the time of that thread for copying, merging and queueing the results, in milliseconds
    # The time that each option takes in the hooks of a recorded step, in milliseconds on the host. The keys are option
    # names of :func:`~lightning_recorder.default_recorders` or names of reductions in ``extra``. The time is the mean
    # over all records but the first, which takes longer. In the file, it is updated after 10, 20, 40, … records and at
    # the end.
    option_ms: Mapping[str, float] = field(default_factory=dict)
    # The number of bytes that this recorder adds to files: the TensorBoard event file, the record file, the CSV file
    # and the images, but not the dumps. The loss and the gradient norm of every step are not counted: a
    # :class:`~lightning_recorder.StepWatch` writes them once for all recorders, about 0.3 MB per 1000 steps. The
    # estimate is based on the size of the first record. In the file, it is updated with the mean size after ten records
    # and at the end. ``None`` before the first record, and if no sink counts its bytes.
    event_bytes_per_1000_steps: int | None = None
    merged_ranks: int = 1  # the number of processes merged in the record
    last_step: int = 0  # the last recorded step
    # the first and the last recorded step by module name
    steps: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    without_gradient: Sequence[str] = ()  # the parameters that had no gradient in any recorded step
    changes: Sequence[Change] = ()  # the changes since the first recorded step
    ran_eagerly: Collection[str] = ()  # the names of the compiled functions that ran eagerly in recorded steps
    types: Mapping[str, str] = field(default_factory=dict)  # the class names of the modules
    # How compiled modules were recorded: ``"inside"`` their compiled code, or ``"eager"``. If the recorder chose
    # ``"eager"`` itself, a colon and the reason follow. Empty without compiled modules.
    compiled: str = ""
    functions: Sequence[str] = ()  # the names in ``sites`` that are torch functions and not modules
    # the part of the model in which torch functions could not be recorded, with the reason; empty if there is none
    unseen_functions: str = ""

    @property
    def summary(self) -> str:
        """The receipt as one line."""
        modules = len(self.sites) - len(self.functions)
        total = modules + len(self.missing)
        functions = f", and {len(self.functions)} function{'s' * (len(self.functions) != 1)}" if self.functions else ""
        size = self.event_bytes_per_1000_steps
        files = "" if size is None else f", {readable_size(size)} of files per 1,000 steps"
        ranks = f" by {self.merged_ranks} ranks" if self.merged_ranks > 1 else ""
        spent_ms = self.recording_ms + self.flush_ms
        parts = ", ".join(f"{name} {spent:.1f}" for name, spent in self.option_ms.items())
        options = f" ({parts})" if parts and self.last_step == self.step else ""
        costs = f"{readable_size(self.state_bytes)} reserved for statistics, {spent_ms:.1f} ms in step {self.step}"
        return f"{modules} of {total} modules recorded{ranks}{self._missing()}{functions}; {costs}{options}{files}"

    def _missing(self) -> str:
        gradients = f", without a gradient: {_first_few(self.without_gradient)}" if self.without_gradient else ""
        if not self.missing:
            return gradients
        return f"{gradients}, not " + _first_few(
            [f"{name or '(root)'} ({why.partition(':')[0]})" for name, why in self.missing.items()]
        )

    @property
    def markdown(self) -> str:
        """The receipt as Markdown with all modules, for loggers that show text."""
        rows = [
            f"| {_cell(name)} | {', '.join(map(_cell, paths))} | {self._span(name)} |"
            for name, paths in self.sites.items()
        ]
        rows += [f"| {_cell(name)} | {why} | |" for name, why in self.missing.items()]
        changes = [line for change in self.changes for line in ("", f"Step {change.step}: {change.text}.")]
        if len(self.without_gradient) > _FEW_NAMES:
            changes += ["", f"Without a gradient: {', '.join(map(_cell, self.without_gradient))}."]
        for name, spent in self.option_ms.items():
            changes += ["", f"{_cell(name)} takes {spent:.2f} ms in a recorded step."]
        way, _, why = self.compiled.partition(": ")
        if way == "inside":
            changes += ["", "Compiled modules were recorded inside their compiled code."]
        elif why:
            changes += ["", f"Compiled modules were not recorded inside their compiled code: {why}."]
        if self.unseen_functions:
            changes += ["", f"No torch functions were recorded in {self.unseen_functions}."]
        if self.ran_eagerly:
            changes += ["", f"Ran eagerly instead of compiled: {', '.join(map(_cell, self.ran_eagerly))}."]
        text = "\n".join([f"{self.summary}.", *changes, "", "| module | recorded | steps |", "|---|---|---|", *rows])
        return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be encoded

    def _span(self, name: str) -> str:
        first, last = self.steps.get(name, (self.step, self.step))
        return f"{first}" if first == last else f"{first} to {last}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data. Each module has a ``fired`` flag, its class and its first and last recorded step."""
        data = {**vars(self), "changes": list(map(asdict, self.changes))}  # ``asdict`` of everything takes milliseconds
        steps, types = data.pop("steps"), data.pop("types")
        data["modules"] = {
            **{
                name: {
                    "fired": True,
                    "sites": paths,
                    **dict(zip(("first_step", "last_step"), steps.get(name, ()), strict=False)),
                }
                for name, paths in data.pop("sites").items()
            },
            **{name: {"fired": False, "why": why} for name, why in data.pop("missing").items()},
        }
        for name, module in data["modules"].items():
            if name in types:
                module["type"] = types[name]
        return data

    def write(self, directory: Path, label: str) -> None:
        """Write the receipt under its label to the folder's ``receipt.json``. Entries of other labels stay."""
        write_receipt(directory, label, self.to_json())


def write_receipt(directory: Path, label: str, entry: Mapping[str, Any]) -> None:
    """Write an entry under its label to the folder's ``receipt.json``. Entries of other labels stay."""
    with _LOCK:
        path = directory / RECEIPT
        try:
            others = read_json(path)
        except (OSError, DumpError):
            others = {}
        text = _readable({**(others if isinstance(others, dict) else {}), label: entry}, depth=3) + "\n"
        attempt(path, len(text), partial(write_bytes, path, text.encode()))


def _readable(data: Any, depth: int) -> str:
    """Return JSON with a line for each entry down to a depth. Faster than ``json.dumps`` with an indent."""
    if not depth or not data or not isinstance(data, dict):
        return json.dumps(data)
    entries = [f"{json.dumps(str(key))}: {_readable(each, depth - 1)}" for key, each in data.items()]
    return "{\n" + ",\n".join(entries) + "\n}"


def _cell(text: str) -> str:
    """Return a module name as the text of a table cell."""
    return "`" + (text or "(root)").replace("`", "'").replace("|", "¦").replace("\n", " ") + "`"


class CoverageHistory:
    """Keeps a receipt up to date over the records of a run, and reports each change once.

    A change means that a module has stopped or started late, as defined by :class:`PresenceHistory`. If the gradients
    of parameters are recorded, a change means instead that the gradient of a parameter has stopped or started late.
    """

    def __init__(self) -> None:
        self._coverage = Coverage(nn.Module(), {}, ())
        self._found: Iterable[Site] = ()
        self._sites: dict[Site, None] = {}
        self._modules: PresenceHistory[str] = PresenceHistory()
        self._gradients: PresenceHistory[Site] = PresenceHistory()
        self._called: set[str] = set()
        self._changes: list[Change] = []

    @property
    def records(self) -> int:
        """The number of records."""
        return self._modules.records

    def add(self, step: int, found: Iterable[Site], coverage: Coverage) -> list[Change]:
        """Add a record.

        Returns:
            The changes to report.
        """
        histories = (self._modules, self._gradients)
        is_same = coverage is self._coverage and found is self._found
        if is_same and all(each.is_steady for each in histories):
            for each in histories:
                each.repeat(step)
            return []
        self._coverage, self._found = coverage, found
        self._called.update(coverage.called)
        sites = dict.fromkeys(site for site in found if not is_batch(*site))
        self._sites.update(sites)
        started, stopped = self._modules.update(step, (site.name for site in sites))
        with_gradient = [Site(name, path.removesuffix(_GRAD)) for name, path in sites if path.endswith(_GRAD)]
        late, lost = self._gradients.update(step, with_gradient if self._has_gradients else ())
        if self._has_gradients:
            return self._gradients_changed(step, late, lost)
        return self._modules_changed(step, started, stopped)

    def finish(self) -> list[Change]:
        """Return the changes to report when the run ends."""
        step = self._modules.last_step
        if self._has_gradients:
            return self._gradients_changed(step, [], self._gradients.finish())
        return self._modules_changed(step, [], self._modules.finish())

    def complete(self, receipt: CoverageReport) -> CoverageReport:
        """Return the receipt with the current facts."""
        by_module = _paths_by_module(self._sites)
        order = [name for name in self._coverage.modules if name in by_module]
        coverage = self._coverage.having(fired=tuple(by_module), called=frozenset(self._called))
        return replace(
            receipt,
            sites={name: by_module[name] for name in dict.fromkeys([*order, *by_module])},
            missing=coverage.missing_reasons(),
            last_step=self._modules.last_step,
            steps={name: self._modules.steps(name) for name in by_module},
            without_gradient=tuple(coverage.without_gradients(self._sites)),
            changes=tuple(self._changes),
            functions=self._coverage.functions_in(by_module),
            unseen_functions=coverage.unseen_functions or receipt.unseen_functions,
        )

    @property
    def _has_gradients(self) -> bool:
        return "gradients" in self._coverage.parts

    def _modules_changed(self, step: int, started: list[str], stopped: list[str]) -> list[Change]:
        coverage = self._coverage
        gone = {
            name: (coverage.stop_reason(name), self._modules.steps(name)[1])
            for name in stopped
            if name in coverage.modules and name not in coverage.failed  # a failed module has already caused a warning
        }
        return self._make_changes(step, started, gone, "record", "modules")

    def _gradients_changed(self, step: int, started: list[Site], stopped: list[Site]) -> list[Change]:
        coverage = self._coverage
        gone = {
            _dotted(site): (coverage.gradient_stop_reason(*site), self._gradients.steps(site)[1])
            for site in stopped
            if site.name in coverage.modules and site.name not in coverage.failed
        }
        return self._make_changes(step, list(map(_dotted, started)), gone, "gradient", "parameters")

    def _make_changes(
        self, step: int, started: list[str], gone: dict[str, tuple[str, int]], what: str, noun: str
    ) -> list[Change]:
        """Return one change for each group of modules or parameters that changed in the same way."""
        changes = []
        if started:
            why = f"the {self.records - 1} records before have none"
            text = f"first {what} of {_listed(started, noun)} at step {step}, {why}"
            changes.append(Change(step, "started", tuple(started), why, text))
        groups: dict[tuple[str, int], list[str]] = {}
        for name, since in gone.items():
            groups.setdefault(since, []).append(name)
        for (why, last), names in groups.items():
            text = f"no {what} of {_listed(names, noun)} after step {last}: {why}"
            changes.append(Change(step, "stopped", tuple(names), why, text))
        self._changes += changes
        return changes


def _dotted(site: Site) -> str:
    return ".".join(filter(None, site))


def _paths_by_module(sites: Iterable[Site]) -> dict[str, list[str]]:
    """Return the paths of the sites by module name, without the tensors of batches."""
    found: dict[str, list[str]] = {}
    for name, path in sites:
        if not is_batch(name, path):
            found.setdefault(name, []).append(path)
    return found


def _listed(names: Sequence[str], noun: str) -> str:
    """Return a text with a few names of modules or parameters, or their number if many have a common parent.

    Example:
        >>> _listed(["decoder.0", "decoder.1"], "modules")
        'decoder.0 and decoder.1'
        >>> _listed([f"decoder.{number}.fc" for number in range(12)], "modules")
        '12 modules of decoder.*'
        >>> _listed(["a.0", "a.1", "b.0", "b.1"], "modules")
        'a.0, a.1, b.0 and 1 more'
    """
    if len(names) > _FEW_NAMES:
        parts = [name.split(".") for name in names]
        common = ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
        if common:
            return f"{len(names)} {noun} of {common}.*"
        return _first_few(names)
    named = [name or "(root)" for name in names]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


def _first_few(texts: Sequence[str]) -> str:
    """Join the first few texts, followed by the number of the remaining ones."""
    more = len(texts) - _FEW_NAMES
    return ", ".join(texts[:_FEW_NAMES]) + (f" and {more} more" if more > 0 else "")


_SOME_RECORDS = 10  # enough records to estimate their mean size

ReceiptFacts = tuple[Coverage, Sampling, Reduce]
"""The facts about the modules since the previous record, the schedule, and the steps that a record merges."""


class ReceiptWriter:
    """Writes the receipt of a run to its folder and to a sink.

    The receipt is complete with the first record. It is written again when the recorded modules change, after 10, 20,
    40, … records, and at the end of the run.

    ``logged_bytes`` is a function of the number of records. It returns the estimated number of bytes that the loggers
    receive in addition to these records.
    """

    def __init__(self, *, name: str, log: Callable[[str], object], logged_bytes: Callable[[int], int]) -> None:
        self._name = name
        self._log = log
        self._logged_bytes = logged_bytes
        self.begin(None, None, "")

    def begin(self, sink: Sink | None, directory: Path | None, label: str) -> None:
        """Begin a run."""
        self.note = ""
        """A text that is appended to the summary line."""
        self._sink, self._directory, self._label = sink, directory, label
        self._receipt: CoverageReport | None = None
        self._history: CoverageHistory | None = None
        self._is_announced = False
        self._is_stale = False  # True if the file is older than the receipt
        self._records = self._bytes = 0
        self._spent: Counter[str] = Counter()  # the milliseconds of each option in the records after the first

    def announce(self, step: int, recording_ms: float, sites: list[Site], facts: ReceiptFacts) -> CoverageReport:
        """Log and return the receipt of a step whose record is not complete yet. The record completes the receipt."""
        receipt = replace(_make_receipt(step, sites, *facts), recording_ms=recording_ms)
        self._log(f"{self._name}: {receipt.summary}{self.note}")
        self._is_announced = True
        return receipt

    def write(self, receipt: CoverageReport) -> None:
        """Write the receipt to the folder."""
        self._receipt, self._is_stale = receipt, False
        if self._directory is not None:
            receipt.write(self._directory, self._label)

    def add(self, found: Table, written: int | None, facts: ReceiptFacts) -> None:
        """Update the receipt with a record. ``written`` is the size of the record in bytes, or None if not counted."""
        is_first = self._history is None
        self._history = self._history or CoverageHistory()
        changes = self._history.add(found.step, found.sites, facts[0])
        if is_first:
            self._write_first_few(found, written, facts)
            return
        self._spent.update(found.about.get("option_ms", {}))
        self._log_changes(changes)
        if self._receipt is not None and (changes or _is_round(self._history.records)):
            self._change(self._complete(self._history, self._receipt))

    def flush(self) -> None:
        """Write the receipt if added records have changed it."""
        if self._receipt is not None and self._is_stale:
            self.write(self._receipt)

    def _change(self, receipt: CoverageReport) -> None:
        self._receipt, self._is_stale = receipt, True

    def _write_first_few(self, found: Table, written: int | None, facts: ReceiptFacts) -> None:
        receipt = _make_receipt(found.step, found, *facts)
        receipt = replace(
            receipt,
            recording_ms=found.about["recording_ms"],
            flush_ms=found.about["flush_ms"],
            option_ms=found.about.get("option_ms", {}),
            event_bytes_per_1000_steps=None if written is None else self._forecast(written, receipt),
            merged_ranks=found.about["ranks"],
        )
        if not self._is_announced:
            self._log(f"{self._name}: {receipt.summary}{self.note}")
        self.write(receipt)
        self._write_text(found.step, receipt)

    def add_size(self, written: int) -> None:
        """Add the size of a record in bytes. After ten records, the receipt has their mean size."""
        self._records += 1
        self._bytes += written
        if self._records == _SOME_RECORDS:
            self._update_size()

    def finish(self) -> None:
        """Update the receipt at the end of the run, and write it to the sink again if records followed the first."""
        self._update_size()
        if self._history is None or self._receipt is None:
            self.flush()
            return
        self._log_changes(self._history.finish())
        receipt = self._complete(self._history, self._receipt)
        self.write(receipt)
        if receipt.last_step > receipt.step:
            self._write_text(receipt.last_step, receipt)

    def _complete(self, history: CoverageHistory, receipt: CoverageReport) -> CoverageReport:
        """Return the receipt with the current facts."""
        later = history.records - 1
        if later:
            receipt = replace(receipt, option_ms={name: spent / later for name, spent in self._spent.items()})
        return history.complete(receipt)

    def _update_size(self) -> None:
        if self._receipt is not None and self._records:
            size = self._forecast(self._bytes / self._records, self._receipt)
            self._change(replace(self._receipt, event_bytes_per_1000_steps=size))

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
    paths = _paths_by_module(found)
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
        types=coverage.types,
        compiled=coverage.compiled,
        functions=coverage.functions_in(paths),
        unseen_functions=coverage.unseen_functions,
    )

"""The modules recorded over a run, and the detection of changes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import nn

from lightning_recorder.names import is_batch
from lightning_recorder.outputs.coverage import Coverage
from lightning_recorder.taps import Site

if TYPE_CHECKING:
    from lightning_recorder.outputs.receipt import CoverageReport

__all__ = ["FEW_NAMES", "Change", "CoverageHistory", "PresenceHistory", "first_few", "paths_by_module"]

Unit = TypeVar("Unit", bound=Hashable)

_FEWEST = 3  # the minimum number of records without a unit before a change is reported
_LONG_RUN = 20  # records; after a longer unbroken run, the wait before a report stays the same
_UNLIKELY, _UNLIKELY_AT_END = 1e-4, 1e-3

_GRAD = ".grad"

FEW_NAMES = 3
"""The number of names in a summary."""


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
    """True if the stop has already been returned."""


class PresenceHistory(Generic[Unit]):
    """Track the presence of units, such as modules, in the records of a run.

    A unit has *started* late if at least 3 records came before its first one.

    A unit has *stopped* if its current gap, the number of latest records without it, meets all of these conditions. The
    gap is at least 3 records, longer than its longest gap before, and longer than its longest unbroken run of records
    before (counted as 20 if it is longer). If the unit occurred at random with its observed frequency, the probability
    of such a gap would be below 0.01 %. So branches that alternate or are taken at random do not count as stopped. At
    the end of the run, the unbroken run is ignored, and the probability is 0.1 %.

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
        self._absent: dict[Unit, None] = {}  # seen before, and not reported as stopped

    def update(self, step: int, seen: Iterable[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Add the units of a record. Return the units that have started late and those that have stopped."""
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


class CoverageHistory:
    """Keep a receipt up to date over the records of a run, and report each change once.

    A change means that the recording of a module has stopped or started late, as defined by
    :class:`PresenceHistory`. If the gradients of parameters are recorded, it means that the gradient of a parameter has
    stopped or started late.
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

        Args:
            step: The step of the record.
            found: The sites with statistics in the record.
            coverage: The facts about the modules since the previous record.

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
        by_module = paths_by_module(self._sites)
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
        """Group the modules or parameters that changed in the same way into one change each."""
        changes = []
        if started:
            why = f"the {self.records - 1} records before have none"
            text = f"first {what} of {listed(started, noun)} at step {step}, {why}"
            changes.append(Change(step, "started", tuple(started), why, text))
        groups: dict[tuple[str, int], list[str]] = {}
        for name, since in gone.items():
            groups.setdefault(since, []).append(name)
        for (why, last), names in groups.items():
            text = f"no {what} of {listed(names, noun)} after step {last}: {why}"
            changes.append(Change(step, "stopped", tuple(names), why, text))
        self._changes += changes
        return changes


def _dotted(site: Site) -> str:
    return ".".join(filter(None, site))


def paths_by_module(sites: Iterable[Site]) -> dict[str, list[str]]:
    """Return the paths of the sites by module name, without the tensors of batches."""
    found: dict[str, list[str]] = {}
    for name, path in sites:
        if not is_batch(name, path):
            found.setdefault(name, []).append(path)
    return found


def listed(names: Sequence[str], noun: str) -> str:
    """List a few modules or parameters by name, or the number of many that share a parent module.

    Example:
        >>> listed(["decoder.0", "decoder.1"], "modules")
        'decoder.0 and decoder.1'
        >>> listed([f"decoder.{number}.fc" for number in range(12)], "modules")
        '12 modules of decoder.*'
        >>> listed(["a.0", "a.1", "b.0", "b.1"], "modules")
        'a.0, a.1, b.0 and 1 more'
    """
    if len(names) > FEW_NAMES:
        parts = [name.split(".") for name in names]
        common = ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
        if common:
            return f"{len(names)} {noun} of {common}.*"
        return first_few(names)
    named = [name or "(root)" for name in names]
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


def first_few(texts: Sequence[str]) -> str:
    """Join the first texts and the number of the others."""
    more = len(texts) - FEW_NAMES
    return ", ".join(texts[:FEW_NAMES]) + (f" and {more} more" if more > 0 else "")

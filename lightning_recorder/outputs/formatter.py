"""The formatter that turns a record into tagged sink values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.insight.finding import recorded
from lightning_recorder.names import split_call
from lightning_recorder.outputs.tag_budget import COMPARED, TagBudget
from lightning_recorder.records.table import Schema, Table
from lightning_recorder.records.tags import make_tag, numbered
from lightning_recorder.reductions import SUMMED, TaggedHistograms, sums_of
from lightning_recorder.reductions.row import DEFAULT_STATISTICS
from lightning_recorder.sinks import RankedScalars, Sink
from lightning_recorder.statistics.snapshot import SETTINGS, SHOWN_STATISTICS
from lightning_recorder.taps import Site

__all__ = ["SinkFormatter"]

_ON_REQUEST = frozenset((*SHOWN_STATISTICS, *SETTINGS))  # all others are those of extra reductions

_BAD = ("nan_count", "inf_count")
_RATIO = "update_ratio"


class _Plan(NamedTuple):
    """The tags of a record, and the places of their values in its table."""

    schema: Schema
    lacking: NDArray[np.bool_] | None
    shown: NDArray[np.int64]
    scalar_tags: Sequence[str]
    scalar_places: tuple[NDArray[np.int64], NDArray[np.int64]]
    """The rows and the columns of their values."""
    tags: Mapping[Site, str]
    """A tag of each site that is shown: its own or, if it has none, that of the site with the curve of its module."""
    histogram_tags: Sequence[str]
    candidates: tuple[Site, ...]
    """The sites among which the budget chooses."""
    rows: NDArray[np.int64]
    """Their rows."""
    size: int
    """The number of sites that the budget showed."""

    def fits(self, found: Table, budget: TagBudget | None) -> bool:
        """Return True if a table has the same sites and statistics and the budget shows the same sites."""
        if self.schema is not found.schema or (budget is not None and budget.size != self.size):
            return False
        if self.lacking is None or found.lacking is None:
            return self.lacking is found.lacking
        return np.array_equal(self.lacking, found.lacking)


def _is_main(site: Site, sites: Collection[Site]) -> bool:
    """Return True for outputs, parameters and their gradients, and False for updates and states of the optimizer."""
    of, _, last = site.path.rpartition(".")
    return last == "grad" or Site(site.name, of) not in sites


def _module_of(site: Site) -> str:
    """Return the module of a site, with the number of its call."""
    return site.name + split_call(site.path)[1]


_DENSE = 16  # records; twice as many are written without a gap


class SinkFormatter:
    """Write records to a sink.

    The tags are ``<group>/<module>/<statistic>``. The group of an evaluation ends with its stage, as in
    ``activations_validate``. With several data loaders, the tag ends with ``/dataloader_idx_<n>``, as in ``self.log``.

    By default, each module has one curve: the ``rms`` of its first output, or the ``update_ratio`` of its largest
    parameter. Beyond 400 modules, a selection of them has. The counts of NaN and infinities of a site that is shown are
    written from the first record on in which it has any.

    Args:
        group: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        statistics: The scalars to show. Scalars of extra reductions are always shown.
        curves: ``"main"`` shows one curve for each module instead of the default statistics of all sites; other
            statistics were chosen by the user and are shown nevertheless. ``"all"`` shows all.
        histograms: True to write histograms: those of the first 32 records of each stage, and then of fewer and fewer,
            16 each time the number of records doubles. TensorBoard shows at most 51 of them, and histograms are most of
            its file.
        budget: A limit on the number of tags, which chooses the sites to write.
        numbered: Begin the name of each module in a tag with its position in the order of execution, as in
            ``activations/017_blocks.2.fc/rms``, because TensorBoard sorts tags.
    """

    def __init__(
        self,
        group: str,
        statistics: Sequence[str],
        *,
        curves: Literal["main", "all"] = "main",
        histograms: bool = True,
        budget: TagBudget | None = None,
        numbered: bool = False,
    ) -> None:
        self.group = group
        self._label = group
        self._budget = budget
        self._numbers: dict[str, str] | None = {} if numbered else None
        self.statistics = tuple(statistics)
        self._has_main_curves = curves == "main" and self.statistics == DEFAULT_STATISTICS
        self.histograms = histograms
        self.nonfinite: set[Site] = set()
        """The sites that have had NaN or infinities."""
        self.named: Callable[[], Set[str]] = frozenset
        """Returns the modules that findings name so far, which are shown first."""
        self._plans: dict[tuple[str, int | None, bool], _Plan] = {}
        self._records: Counter[tuple[str, int | None]] = Counter()
        self._latest: tuple[Table, _Plan] | None = None  # the latest training record

    def begin(self, label: str) -> None:
        """Begin a run.

        Args:
            label: The first part of the tags that contain no module.
        """
        self._label, self.named, self._latest = label, frozenset, None
        self._plans.clear()
        self._records.clear()
        if self._numbers is not None:
            self._numbers = {}
        if self._budget is not None:
            self._budget.clear()

    def _is_due(self, key: tuple[str, int | None]) -> bool:
        """Return True if the histograms of a record of a stage and a loader are to be written."""
        before = self._records[key]
        self._records[key] += 1
        return before % (1 << max(0, (before // _DENSE).bit_length() - 1)) == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the modules that are shown and their numbers, for a checkpoint."""
        shown = {} if self._budget is None else self._budget.state_dict()
        return {**shown, "numbers": dict(self._numbers)} if self._numbers else shown

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the modules that are shown and their numbers from a checkpoint."""
        if self._numbers is not None:
            self._numbers = dict(state.get("numbers", {}))
        if self._budget is not None:
            self._budget.load_state_dict(state)

    def write(self, sink: Sink, found: Table) -> None:
        """Write a record."""
        if found.about["overflowed"]:
            self._write_overflow(sink, found)
            return
        scalars, plan = self._scalars(found)
        if found.about["overflow_steps"]:
            scalars[f"{self._label}/overflow_steps"] = float(found.about["overflow_steps"])
        if scalars:
            sink.write_scalars(found.step, scalars)
        stage, has_sites = found.stage, bool(found)
        if self.histograms and has_sites and found.counts is not None and self._is_due((stage, found.about["loader"])):
            counts, sums = found.counts.take(plan.shown), sums_of(found.part(plan.shown, SUMMED))
            sink.write_histograms(found.step, TaggedHistograms(plan.histogram_tags, counts, sums))
        if stage == "train" and has_sites:
            self._latest = found, plan

    def finish(self, sink: Sink) -> None:
        """Show the modules that findings name at the end of a run.

        Those that are not shown yet have the values of the latest training record.
        """
        latest, self._latest = self._latest, None
        if latest is None or not self.named():
            return
        found, plan = latest
        scalars, _ = self._scalars(found)
        if isinstance(scalars, RankedScalars):
            shown = set(plan.scalar_tags)
            new = [(tag, value) for tag, value in scalars.items() if tag not in shown]
            sink.write_scalars(found.step, RankedScalars(new, scalars.degrees, scalars.named))

    def _scalars(self, found: Table) -> tuple[dict[str, float], _Plan]:
        """Return the scalars of a record, ranked if some modules are left out or named by findings."""
        names = self.named()
        if self._budget is not None:
            self._budget.named = names
        plan = self._plan(found)
        pairs = zip(plan.scalar_tags, found.numbers[plan.scalar_places].tolist(), strict=True)
        names = set(recorded(names, (site.name for site in plan.tags)).values()) if names else names
        named = list(dict.fromkeys(tag for site, tag in plan.tags.items() if site.name in names)) if names else []
        if self._budget is not None and not self._budget.is_complete:
            # The sites that are shown are too few to compare them with each other alone.
            degrees = self._budget.degrees
            known: dict[str, float] = {}
            for site, tag in plan.tags.items():
                if site in degrees:
                    known[tag] = max(degrees[site], known.get(tag, 0.0))
            return RankedScalars(pairs, known, named), plan
        return (RankedScalars(pairs, None, named) if named else dict(pairs)), plan

    def _plan(self, found: Table) -> _Plan:
        """Return the tags of a record. They are the same in nearly all records of a stage."""
        is_new = self._note_nonfinite(found)
        key, budget = (found.stage, found.about["loader"], self._is_brief), self._budget
        plan = self._plans.get(key)
        unusual = None
        if plan is not None and plan.fits(found, budget) and not is_new:
            if budget is None or budget.is_complete:
                return plan
            unusual = budget.unusual(plan.candidates, found.part(plan.rows, COMPARED))
            if not budget.may_show(unusual):
                return plan
        shown = self._select(found, unusual)
        self._plans[key] = plan = self._new_plan(found, shown)
        return plan

    def _note_nonfinite(self, found: Table) -> bool:
        """Note the sites with NaN or infinities. Return True if there is a new one."""
        bad = np.flatnonzero(sum(found.column(name) for name in _BAD)) if len(found) else ()
        before = len(self.nonfinite)
        self.nonfinite.update(found.sites[row] for row in bad)
        return len(self.nonfinite) > before

    def _new_plan(self, found: Table, shown: NDArray[np.int64]) -> _Plan:
        self._number(found.schema)
        tags: dict[str, tuple[int, int]] = {}
        leading = self._leading(found, shown.tolist())
        for row in shown.tolist():
            site = found.sites[row]
            bad = [name for name in _BAD if name in found.columns] if site in self.nonfinite else ()
            for name in dict.fromkeys((*self._curves(found, row, leading), *bad)):
                tags[self._tag(found, self.group, site, name)] = row, found.columns.index(name)
        for row, name in self._curves_of_modules(found):
            tags[self._tag(found, self.group, found.sites[row], name)] = row, found.columns.index(name)
        # A histogram has the tag of its site, so that the page shows it next to the site's scalars.
        histograms = [self._tag(found, self.group, found.sites[row], "histogram") for row in shown]
        rows = np.array(self._candidates(found), dtype=np.int64)
        size = 0 if self._budget is None else self._budget.size
        sites = tuple(found.sites[row] for row in rows)
        places = np.array(list(tags.values()), dtype=np.int64).reshape(-1, 2)
        by_row = {row: tag for tag, (row, _) in tags.items()}
        by_site = {}
        for row in sorted({*shown.tolist(), *by_row}):
            first = row if row in by_row else leading.get(self._whole_of(found.sites[row]))
            if first in by_row:
                by_site[found.sites[row]] = by_row[first]
        scalars = tuple(tags), (places[:, 0], places[:, 1]), by_site
        return _Plan(found.schema, found.lacking, shown, *scalars, histograms, sites, rows, size)

    def _candidates(self, found: Table) -> list[int]:
        """Return the rows of the sites that may be shown. Inputs of losses are in the records alone."""
        rows = found.schema.losses[0].tolist()
        return [row for row in rows if not self._is_brief or _is_main(found.sites[row], found)]

    def _number(self, schema: Schema) -> None:
        """Number the modules that have no number yet, in the order of execution."""
        if self._numbers is None:
            return
        order = schema.order_of(self.group)
        names = dict.fromkeys(schema.sites[row].name for row in order.tolist())
        new = [name for name in names if name not in self._numbers]
        first = len(self._numbers)
        digits = max(3, len(str(first + len(new) - 1)))
        self._numbers |= {name: numbered(name, first + place, digits) for place, name in enumerate(new)}

    def _select(self, found: Table, unusual: Mapping[str, float] | None) -> NDArray[np.int64]:
        """Return the rows of the sites that are shown."""
        if self._budget is None or not found:
            return found.schema.losses[0]
        sites, tags = found.without_bins(), self._count_tags(found)
        self._budget.shorten({site: sites[site] for site in tags}, tags.__getitem__)
        self._budget.has_curve_of_each = bool(self._curves_of_modules(found))
        tags = self._count_tags(found)  # there may be fewer candidates now
        chosen = self._budget.select({site: sites[site] for site in tags}, tags.__getitem__, unusual)
        return np.array([row for site, row in found.rows.items() if site in chosen], dtype=np.int64)

    @property
    def _is_brief(self) -> bool:
        return self._budget is not None and self._budget.is_brief

    @property
    def _main_statistics(self) -> tuple[str, ...]:
        """The statistics to show: those that the user asked for, or the main ones in a brief selection."""
        if not self._is_brief or self.statistics != DEFAULT_STATISTICS:
            return self.statistics
        return ("rms",) if self._is_of_parameters else ("rms", "zero_fraction")

    def _count_tags(self, found: Table) -> dict[Site, int]:
        """Return the number of tags of each site that may be shown, if its values are finite."""
        rows = self._candidates(found)
        leading = self._leading(found, rows)
        return {found.sites[row]: len(self._curves(found, row, leading)) + self.histograms for row in rows}

    def _curves(self, found: Table, row: int, leading: Mapping[str, int]) -> list[str]:
        """Return the statistics to show of the site in a row whose values are finite."""
        names, main = found.names_of(row), self._main_statistics
        further = [name for name in names if name not in _ON_REQUEST]
        if self._has_main_curves:
            is_leading = leading[self._whole_of(found.sites[row])] == row
            main = self._main_curve(found, row) if is_leading else ()
            further = [name for name in further if name != _RATIO]
        # The statistics across ranks need several ranks.
        return list(dict.fromkeys([*(name for name in main if name in names), *further]))

    def _main_curve(self, found: Table, row: int) -> tuple[str, ...]:
        """Return the statistic that is the curve of the site in a row, if it has it."""
        names = found.names_of(row)
        return tuple(name for name in (_RATIO if _RATIO in names else "rms",) if name in names)

    def _curves_of_modules(self, found: Table) -> list[tuple[int, str]]:
        """Return the rows and statistics of one curve of each module, if a selection leaves room for them."""
        if self._budget is None or not self._is_brief:
            return []
        leading = self._leading(found, self._candidates(found), _module_of).values()
        rows = leading if self._budget.has_room_for_curves(len(leading)) else ()
        return [(row, name) for row in rows for name in self._main_curve(found, row)]

    def _leading(
        self, found: Table, rows: Iterable[int], whole_of: Callable[[Site], str] | None = None
    ) -> dict[str, int]:
        """Return the row, among some, with the curve of each module, or of what else has one."""
        if not self._has_main_curves:
            return {}
        whole_of = whole_of or self._whole_of
        best: dict[str, int] = {}
        ranks = {row: self._rank(found, row) for row in rows}
        for row, rank in ranks.items():
            first = best.setdefault(whole_of(found.sites[row]), row)
            if rank > ranks[first]:
                best[whole_of(found.sites[row])] = row
        return best

    def _rank(self, found: Table, row: int) -> tuple[int, ...]:
        """Return the rank of a site among those of its module: the whole output, or the largest parameter, leads."""
        path, shape = found.sites[row].path, found.schema.shapes[row]
        if not self._is_of_parameters:
            inner, _ = split_call(path)
            return inner == "out", inner.startswith("out")
        _, dot, part = path.rpartition(".")
        return _RATIO in found.names_of(row), not dot, part == "grad", 0 if shape is None else math.prod(shape)

    def _whole_of(self, site: Site) -> str:
        """Return what has one curve: a call of a module or, if parameters are chosen one by one, a parameter."""
        if self._budget is not None and self._budget.is_brief and self._is_of_parameters:
            return self._budget.key(site)
        return _module_of(site)

    @property
    def _is_of_parameters(self) -> bool:
        return self.group.startswith("parameters")

    def _write_overflow(self, sink: Sink, found: Table) -> None:
        """Write the overflow locations of a step that the optimizer skipped. Its other statistics are meaningless."""
        scalars = {f"{self._label}/overflow_steps": float(found.about["overflow_steps"])}
        for site, seen in found.without_bins().items():
            if any(seen.scalars[name] for name in _BAD):
                group = f"{self.group}_overflow"
                scalars.update({self._tag(found, group, site, name): seen.scalars[name] for name in _BAD})
        sink.write_scalars(found.step, scalars)

    def _tag(self, found: Table, group: str, site: Site, statistic: str) -> str:
        stage = "" if found.stage == "train" else f"_{found.stage}"
        name = site.name if self._numbers is None else self._numbers.get(site.name, site.name)
        return make_tag(group + stage, name, site.path, statistic, found.about["loader"])

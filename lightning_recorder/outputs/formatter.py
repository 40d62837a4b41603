"""Convert records into tagged values for sinks."""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import warn
from lightning_recorder.insight.finding import recorded
from lightning_recorder.insight.unusual import standing_out, unusualness
from lightning_recorder.names import split_call
from lightning_recorder.records.table import Floats, Schema, SiteStatistics, Table
from lightning_recorder.records.tags import make_tag, numbered
from lightning_recorder.reductions import SUMMED, TaggedHistograms, sums_of
from lightning_recorder.reductions.row import DEFAULT_STATISTICS
from lightning_recorder.sinks import RankedScalars, Sink
from lightning_recorder.statistics.snapshot import SETTINGS, SHOWN_STATISTICS
from lightning_recorder.taps import Site

__all__ = ["COMPARED", "SinkFormatter", "TagBudget"]

COMPARED = ("rms", "min", "max", "zero_fraction", "nan_count", "inf_count", "update_ratio")
"""The statistics by which modules are compared."""

_RESERVE = 4  # a quarter of the tags is reserved for modules that become unusual later
_BY_FAR = 2.0  # twice the degree at which a module stands out
_REMEMBERED = 8  # the number of records that are compared with the latest one

# By default, everything is shown if a recorder has at most this number of tags. With more tags, a page would be slow
# and hide the user's own metrics, so only a selection is shown. Heat maps and record files have the rest.
_WHOLE = 400
_SELECTION = 75


class TagBudget:
    """Chooses whole modules so that the tags of all their sites do not exceed a limit.

    Modules that findings name are chosen first. Modules with unusual statistics follow (see
    :func:`~lightning_recorder.insight.unusual.unusualness`): with values that are not finite, with nearly all zeros, or
    with a scale far from neighboring modules, equal modules or their own past. The remaining modules are chosen evenly
    over the model. A quarter of the tags is reserved for modules that become unusual in a later record. A module that
    is shown once stays shown.

    Args:
        max_tags: The maximum number of tags. By default, all modules are shown if they have at most 400 tags. With more
            tags, :attr:`is_brief` becomes True: at most 75 tags of the main statistics are shown, and parameters are
            chosen individually instead of with their modules.
        name: The name of the recorder in messages.
        stages: The number of stages that have their own tags.
        log: A callback for the message that only a selection is shown. Called only if ``max_tags`` was not given.
    """

    def __init__(
        self, max_tags: int | None, name: str = "the recorder", *, stages: int = 1, log: Callable[[str], object] = warn
    ) -> None:
        self.max_tags = _WHOLE if max_tags is None else max_tags
        self.is_brief = False
        """True if only the main statistics are shown, because there are too many tags and no limit was given."""
        self._is_given = max_tags is not None
        self._log, self._name, self._stages = log, name, max(1, stages)
        self._past: deque[tuple[tuple[Site, ...], Floats]] = deque(maxlen=_REMEMBERED)
        self._sites: dict[Site, int] = {}  # the shown sites with their numbers of tags
        self._shown: set[str] = set()
        self._left_out: set[str] = set()
        self._refused: dict[str, bool] = {}
        """The unusual modules whose tags exceeded the limit. True if a module was allowed the whole reserve."""
        self._has_warned = False
        self.degrees: dict[Site, float] = {}
        """The degrees of the sites that stand out, from the latest call of :meth:`unusual`."""
        self.named: Set[str] = frozenset()
        """The modules that findings name. They are chosen first."""
        self.has_curve_of_each = False
        """True if each module has a curve, even if the module is not chosen. Only messages depend on this."""

    def clear(self) -> None:
        """Discard the choice before another run."""
        self._sites.clear()
        self._shown.clear()
        self._left_out.clear()
        self._refused.clear()
        self._past.clear()
        self.degrees, self.named = {}, frozenset()
        self._has_warned = False
        if not self._is_given:
            self.max_tags, self.is_brief = _WHOLE, False

    def shorten(self, found: Mapping[Site, object], tags_of: Callable[[Site], int]) -> None:
        """Set :attr:`is_brief` if no limit was given and the sites of a record have too many tags."""
        if self._is_given or self.is_brief or self._sites.keys() >= found.keys():  # the last condition usually holds
            return
        if self._stages * sum(map(tags_of, found)) > _WHOLE:
            self.is_brief, self.max_tags = True, _SELECTION
            shown = [*self._sites]
            self._sites.clear()
            self._shown.clear()
            self._left_out |= {self.key(site) for site in shown}

    def has_room_for_curves(self, modules: int) -> bool:
        """Return True if each of this number of modules may have a curve in addition to a brief selection."""
        return self.is_brief and self._stages * modules <= _WHOLE

    def key(self, site: Site) -> str:
        """Return the name of the unit that is shown as a whole: the module, or with :attr:`is_brief` the parameter.

        A parameter has the form ``fc weight``.
        """
        path = site.path.removesuffix(".grad")
        return f"{site.name} {path}" if self.is_brief and not path.startswith("out") else site.name

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, for a checkpoint."""
        shown = [[*site, tags] for site, tags in list(self._sites.items())]  # a copy: another thread may add sites
        return {"shown": shown, "left_out": sorted(self._left_out)} if self._left_out else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the choice from a checkpoint."""
        self.clear()
        self._sites.update((Site(name, path), tags) for name, path, tags in state.get("shown", ()))
        if not self._is_given and state.get("left_out"):
            self.is_brief, self.max_tags = True, _SELECTION
        self._shown.update(self.key(site) for site in self._sites)
        self._left_out.update(state.get("left_out", ()))
        self._has_warned = bool(self._left_out)

    def select(
        self,
        found: Mapping[Site, SiteStatistics],
        tags_of: Callable[[Site], int],
        unusual: Mapping[str, float] | None = None,
    ) -> Collection[Site]:
        """Return the sites of the chosen modules, as a collection with constant look-up time."""
        modules: dict[str, list[Site]] = {}
        for site in found:
            modules.setdefault(self.key(site) if self.is_brief else site.name, []).append(site)
        tags = {site: self._stages * tags_of(site) for site in found}
        for name, sites in modules.items():
            if name in self._shown:  # the module may have new sites
                self._add(sites, tags)
        new = [name for name in modules if name not in self._shown and name not in self._left_out]
        if (
            not self._left_out
            and self._used + sum(tags[site] for name in new for site in modules[name]) <= self.max_tags
        ):
            for name in new:
                self._show(modules[name], tags)
            return found
        if unusual is None:
            if isinstance(found, Table):  # creating objects for thousands of sites would trigger the garbage collector
                values = found.part(None, COMPARED)
            else:
                values = np.array([[seen.scalars.get(name, np.nan) for name in COMPARED] for seen in found.values()])
            unusual = self.unusual(tuple(found), values)
        self._choose(new, modules, unusual, tags)
        self._warn_once()
        return dict.fromkeys(site for site in found if site in self._sites)

    def unusual(self, sites: tuple[Site, ...], values: Floats) -> dict[str, float]:
        """Return the degrees of modules with unusual statistics, the largest first. Call this once for each record."""
        steps = [before for known, before in self._past if known == sites] + [values]
        self._past.append((sites, values))
        table = np.stack(steps, axis=-1)
        columns = {name: table[:, column] for column, name in enumerate(COMPARED)}
        degrees = unusualness(sites, columns, is_latest=True)
        if self.named:
            names = set(recorded(self.named, (site.name for site in sites)).values())
            degrees[[place for place, site in enumerate(sites) if site.name in names]] = np.inf
        self.degrees = {sites[place]: float(degrees[place]) for place in standing_out(degrees)}
        most: dict[str, float] = {}
        for site, degree in self.degrees.items():
            most.setdefault(self.key(site), degree)
        return most

    def may_show(self, unusual: Mapping[str, float]) -> bool:
        """Return False if each of these modules is already shown or did not fit before."""
        return any(
            name not in self._shown and not self._refused.get(name, degree < _BY_FAR and name in self._refused)
            for name, degree in unusual.items()
        )

    @property
    def size(self) -> int:
        """The number of shown sites."""
        return len(self._sites)

    @property
    def is_complete(self) -> bool:
        """True if no module has been left out."""
        return not self._left_out

    @property
    def _used(self) -> int:
        return sum(self._sites.values())

    def _choose(
        self, new: list[str], modules: Mapping[str, list[Site]], unusual: Mapping[str, float], tags: Mapping[Site, int]
    ) -> None:
        """Choose among the new modules, and show the modules that have become unusual."""
        cost = {name: sum(tags[site] for site in sites) for name, sites in modules.items()}
        is_first = not self._shown and not self._left_out
        without_reserve = self.max_tags - self.max_tags // _RESERVE
        room = (without_reserve if is_first else self.max_tags) - self._used
        self._refused.clear()  # the number of tags of a module may have changed
        for name, degree in unusual.items():
            # Half of the reserve of a brief selection is kept for modules that stand out by far.
            kept = self.max_tags // _RESERVE // 2 if self.is_brief and degree < _BY_FAR and not is_first else 0
            if name not in self._shown and cost[name] <= room - kept:
                self._show(modules[name], tags)
                room -= cost[name]
            elif not is_first:
                self._refused[name] = not kept
        rest = [name for name in new if name not in self._shown]
        room = without_reserve - self._used
        for name in _evenly_spaced(rest, [cost[name] for name in rest], room):
            self._show(modules[name], tags)
        self._left_out |= modules.keys() - self._shown

    def _show(self, sites: Iterable[Site], tags: Mapping[Site, int]) -> None:
        for site in sites:
            self._sites[site] = tags[site]
            self._shown.add(self.key(site))
            self._left_out.discard(self.key(site))

    def _add(self, sites: Iterable[Site], tags: Mapping[Site, int]) -> None:
        """Show new sites of modules that are already shown, as far as the limit allows."""
        for site in sites:
            more = tags[site] - self._sites.get(site, 0)
            if more > 0 and (site in self._sites or not self._left_out or self._used + more <= self.max_tags):
                self._sites[site] = tags[site]

    def _warn_once(self) -> None:
        if self._left_out and not self._has_warned:
            self._has_warned = True
            if self.is_brief:
                what = "parameters" if any(" " in key for key in self._left_out) else "modules"
                what = "tensors" if any(re.search(r" in\b", key) for key in self._left_out) else what  # inputs
                each = "a curve of each module, and histograms of" if self.has_curve_of_each else "curves of"
                self._log(
                    f"{self._name} shows {each} {len(self._shown)} of {len(self._shown) + len(self._left_out)} {what}: "
                    "those with unusual statistics, and the others evenly spread. The heat maps and "
                    "<log_dir>/recorder/records have all of them, and Outputs(max_tags=…) shows more curves"
                )
                return
            if not self._shown:
                warn(
                    f"{self._name} shows no module in the loggers, because each has more than max_tags={self.max_tags} "
                    "tags. <log_dir>/recorder/records and open_recording have all modules. Show fewer statistics, or "
                    "raise max_tags"
                )
                return
            warn(
                f"{self._name} shows {len(self._shown)} of {len(self._shown) + len(self._left_out)} modules in the "
                f"loggers, because all of them have more than max_tags={self.max_tags} tags: those with unusual "
                "statistics, and the others evenly spread. A module that becomes unusual later is shown from then on. "
                "<log_dir>/recorder/records and open_recording have all modules. To show more, select fewer modules, "
                "show fewer statistics, or raise max_tags"
            )


def _evenly_spaced(names: Sequence[str], costs: Sequence[int], room: int) -> list[str]:
    """Return as many evenly spaced modules as fit into the remaining number of tags."""
    for count in range(min(len(names), max(0, room) // max(1, min(costs, default=1))), 0, -1):
        places = [place * len(names) // count for place in range(count)]
        if sum(costs[place] for place in places) <= room:
            return [names[place] for place in places]
    return []


_ON_REQUEST = frozenset((*SHOWN_STATISTICS, *SETTINGS))  # all other statistics come from extra reductions

_BAD = ("nan_count", "inf_count")
_RATIO = "update_ratio"


class _Plan(NamedTuple):
    """The tags of a record, and the indices of their values in the table."""

    schema: Schema
    lacking: NDArray[np.bool_] | None
    shown: NDArray[np.int64]
    scalar_tags: Sequence[str]
    scalar_places: tuple[NDArray[np.int64], NDArray[np.int64]]
    """The rows and the columns of the scalars in the table."""
    tags: Mapping[Site, str]
    """A tag of each shown site. A site without its own tag has the tag of the curve of its module."""
    histogram_tags: Sequence[str]
    candidates: tuple[Site, ...]
    """The sites among which the budget chooses."""
    rows: NDArray[np.int64]
    """The rows of the candidates in the table."""
    size: int
    """The number of sites that the budget showed."""

    def fits(self, found: Table, budget: TagBudget | None) -> bool:
        """Return True if a table has the same sites and statistics, and the budget shows the same sites as before."""
        if self.schema is not found.schema or (budget is not None and budget.size != self.size):
            return False
        if self.lacking is None or found.lacking is None:
            return self.lacking is found.lacking
        return np.array_equal(self.lacking, found.lacking)


def _is_main(site: Site, sites: Collection[Site]) -> bool:
    """Return True for outputs, parameters and their gradients, and False for updates and optimizer states."""
    of, _, last = site.path.rpartition(".")
    return last == "grad" or Site(site.name, of) not in sites


def _module_of(site: Site) -> str:
    """Return the module of a site, including the number of the call."""
    return site.name + split_call(site.path)[1]


_DENSE = 16  # the number of histograms per doubling of the number of records; the first 32 records all have histograms


class SinkFormatter:
    """Writes records to a sink.

    The tags are ``<group>/<module>/<statistic>``. The group of an evaluation ends with its stage, as in
    ``activations_validate``. With several data loaders, the tag ends with ``/dataloader_idx_<n>``, as in ``self.log``.

    By default, each module has one curve: the ``rms`` of its first output, or the ``update_ratio`` of its largest
    parameter. With more than 400 modules, only a selection of modules has a curve. The counts of NaN and infinities of
    a shown site are written once the site has a NaN or an infinity.

    Args:
        group: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        statistics: The scalars to show. Scalars of extra reductions are always shown.
        curves: ``"main"`` shows one curve for each module instead of the default statistics of all sites. Statistics
            that the user chose are shown in any case. ``"all"`` shows all statistics.
        histograms: True to write histograms for the first 32 records of each stage, and then less often: for 16 records
            per doubling of the number of records. TensorBoard shows at most 51 histograms of a tag, and histograms take
            most of the space of its file.
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
        self.group = self._label = group
        self._is_of_parameters = group.startswith("parameters")
        self._budget, self.histograms, self.statistics = budget, histograms, tuple(statistics)
        self._numbers: dict[str, str] | None = {} if numbered else None
        self._has_main_curves = curves == "main" and self.statistics == DEFAULT_STATISTICS
        self.nonfinite: set[Site] = set()
        """The sites that have had NaN or infinities in any record."""
        self.named: Callable[[], Set[str]] = frozenset
        """A function that returns the modules named by findings so far. These modules are shown first."""
        self._plans: dict[tuple[str, int | None, bool], _Plan] = {}
        self._records: Counter[tuple[str, int | None]] = Counter()
        self._latest: tuple[Table, _Plan] | None = None  # the latest training record

    def begin(self, label: str) -> None:
        """Begin a run. The tags that contain no module begin with ``label``."""
        self._label, self.named, self._latest = label, frozenset, None
        self._plans.clear()
        self._records.clear()
        if self._numbers is not None:
            self._numbers = {}
        if self._budget is not None:
            self._budget.clear()

    def _is_due(self, key: tuple[str, int | None]) -> bool:
        """Return True if the histograms of the next record of this stage and loader are written."""
        before = self._records[key]
        self._records[key] += 1
        return before % (1 << max(0, (before // _DENSE).bit_length() - 1)) == 0

    def state_dict(self) -> dict[str, Any]:
        """Return the shown modules and the numbers of modules, for a checkpoint."""
        shown = {} if self._budget is None else self._budget.state_dict()
        return {**shown, "numbers": dict(self._numbers)} if self._numbers else shown

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the shown modules and the numbers of modules from a checkpoint."""
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
        """Show all modules that findings name at the end of a run.

        Modules that were not shown before get only the values of the latest training record.
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
        """Return the scalars of a record and its plan. They are ranked if modules are left out or in findings."""
        names = self.named()
        if self._budget is not None:
            self._budget.named = names
        plan = self._plan(found)
        pairs = zip(plan.scalar_tags, found.numbers[plan.scalar_places].tolist(), strict=True)
        names = set(recorded(names, (site.name for site in plan.tags)).values()) if names else names
        named = list(dict.fromkeys(tag for site, tag in plan.tags.items() if site.name in names)) if names else []
        if self._budget is not None and not self._budget.is_complete:
            # The shown sites are too few to be compared only with each other, so pass the degrees from all sites.
            degrees = self._budget.degrees
            known: dict[str, float] = {}
            for site, tag in plan.tags.items():
                if site in degrees:
                    known[tag] = max(degrees[site], known.get(tag, 0.0))
            return RankedScalars(pairs, known, named), plan
        return (RankedScalars(pairs, None, named) if named else dict(pairs)), plan

    def _plan(self, found: Table) -> _Plan:
        """Return the tags of a record. Nearly all records of a stage have the same tags, so they are cached."""
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
        """Add the sites with NaN or infinities to :attr:`nonfinite`. Return True if there is a new one."""
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
        """Return the rows of the sites that may be shown. The inputs of losses are never shown, only recorded."""
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
        """Return the rows of the shown sites."""
        if self._budget is None or not found:
            return found.schema.losses[0]
        tags, was_brief = self._count_tags(found), self._is_brief
        self._budget.shorten(tags, tags.__getitem__)
        self._budget.has_curve_of_each = bool(self._curves_of_modules(found))
        if self._is_brief is not was_brief:  # there are fewer candidates now
            tags = self._count_tags(found)
        some = found.having(counts=None).take(np.array(self._candidates(found), dtype=np.int64))
        chosen = self._budget.select(some, tags.__getitem__, unusual)
        return np.array([row for site, row in found.rows.items() if site in chosen], dtype=np.int64)

    @property
    def _is_brief(self) -> bool:
        return self._budget is not None and self._budget.is_brief

    @property
    def _main_statistics(self) -> tuple[str, ...]:
        """The statistics to show: the requested ones, or the main statistics in a brief selection."""
        if not self._is_brief or self.statistics != DEFAULT_STATISTICS:
            return self.statistics
        return ("rms",) if self._is_of_parameters else ("rms", "zero_fraction")

    def _count_tags(self, found: Table) -> dict[Site, int]:
        """Return the number of tags of each site that may be shown, assuming that its values are finite."""
        rows = self._candidates(found)
        leading = self._leading(found, rows)
        return {found.sites[row]: len(self._curves(found, row, leading)) + self.histograms for row in rows}

    def _curves(self, found: Table, row: int, leading: Mapping[str, int]) -> list[str]:
        """Return the statistics to show for the site in a row, assuming that its values are finite."""
        names, main = found.names_of(row), self._main_statistics
        further = [name for name in names if name not in _ON_REQUEST]
        if self._has_main_curves:
            is_leading = leading[self._whole_of(found.sites[row])] == row
            main = self._main_curve(found, row) if is_leading else ()
            further = [name for name in further if name != _RATIO]
        # A requested statistic across ranks is missing in ``names`` if there is only one rank.
        return list(dict.fromkeys([*(name for name in main if name in names), *further]))

    def _main_curve(self, found: Table, row: int) -> tuple[str, ...]:
        """Return the statistic for the curve of the site in a row; empty if the site lacks this statistic."""
        names = found.names_of(row)
        return tuple(name for name in (_RATIO if _RATIO in names else "rms",) if name in names)

    def _curves_of_modules(self, found: Table) -> list[tuple[int, str]]:
        """Return the row and the statistic of one curve for each module, if the number of tags allows these curves."""
        if self._budget is None or not self._is_brief:
            return []
        leading = self._leading(found, self._candidates(found), _module_of).values()
        rows = leading if self._budget.has_room_for_curves(len(leading)) else ()
        return [(row, name) for row in rows for name in self._main_curve(found, row)]

    def _leading(
        self, found: Table, rows: Iterable[int], whole_of: Callable[[Site], str] | None = None
    ) -> dict[str, int]:
        """Return, for each module or other unit with a curve, the row of the site that the curve shows."""
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
        """Return a sort key of a site within its module. The whole output, or the largest parameter, ranks first."""
        path, shape = found.sites[row].path, found.schema.shapes[row]
        if not self._is_of_parameters:
            inner, _ = split_call(path)
            return inner == "out", inner.startswith("out")
        _, dot, part = path.rpartition(".")
        return _RATIO in found.names_of(row), not dot, part == "grad", 0 if shape is None else math.prod(shape)

    def _whole_of(self, site: Site) -> str:
        """Return the unit that has one curve: a module call, or a parameter if parameters are chosen individually."""
        if self._budget is not None and self._budget.is_brief and self._is_of_parameters:
            return self._budget.key(site)
        return _module_of(site)

    def _write_overflow(self, sink: Sink, found: Table) -> None:
        """Write the counts of NaN and infinities of a skipped optimizer step. Its other statistics have no meaning."""
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

"""The formatter that turns a record into tagged sink values, within a limit on the number of tags."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import warn
from lightning_recorder.insight.unusual import standing_out, unusualness
from lightning_recorder.names import make_tag
from lightning_recorder.reductions import SUMMED, TaggedHistograms, sums_of
from lightning_recorder.reductions.row import DEFAULT_STATISTICS
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics.snapshot import Record
from lightning_recorder.statistics.table import SETTINGS, SHOWN_STATISTICS, SiteStatistics, StatisticsTable, TableSchema
from lightning_recorder.taps import Site

__all__ = ["SinkFormatter", "TagBudget"]

_RESERVE = 4  # a quarter of the tags is reserved for modules that become unusual later
_ON_REQUEST = frozenset((*SHOWN_STATISTICS, *SETTINGS))  # all others are those of extra reductions
_COMPARED = ("rms", "min", "max", "zero_fraction", "nan_count", "inf_count", "update_ratio")
_BY_FAR = 2.0  # twice the degree from which on a module stands out
_REMEMBERED = 8  # records that are compared with the latest one

# By default, everything is shown if a recorder has at most this number of tags. Otherwise a page is slow and the user's
# own metrics are lost in it, so that only a selection is shown: the heat maps and the record files have the rest.
_WHOLE = 400
_SELECTION = 75


class TagBudget:
    """Choose whole modules so that the tags of all their sites do not exceed a limit.

    Modules with unusual statistics come first (see :func:`~lightning_recorder.insight.unusual.unusualness`): values
    that are not finite, nearly all zeros, or a size far from that of the neighboring or equal modules or from their own
    past. The others are spread evenly over the model. A quarter of the tags is reserved for modules that become unusual
    in a later record, which are shown from that record on. A module that is shown stays shown.

    Args:
        max_tags: The maximum number of tags. By default, all modules are shown if they have at most 400 tags. Otherwise
            the budget :attr:`is_brief`: at most 75 tags of the main statistics are shown, and parameters are chosen
            one by one instead of with their modules.
        name: The name of the recorder in messages.
        stages: The number of stages with tags of their own.
        log: A callback that receives the message that only a selection is shown, if ``max_tags`` was not given.
    """

    def __init__(
        self,
        max_tags: int | None,
        name: str = "the recorder",
        *,
        stages: int = 1,
        log: Callable[[str], object] = warn,
    ) -> None:
        self.max_tags = _WHOLE if max_tags is None else max_tags
        self.is_brief = False
        """True if only the main statistics are shown, because there are too many tags and no limit was given."""
        self._is_given = max_tags is not None
        self._log = log
        self._past: deque[tuple[tuple[Site, ...], np.ndarray[Any, Any]]] = deque(maxlen=_REMEMBERED)
        self._name = name
        self._stages = max(1, stages)
        self._sites: dict[Site, int] = {}  # the shown sites with their number of tags
        self._shown: set[str] = set()
        self._left_out: set[str] = set()
        self._has_warned = False

    def clear(self) -> None:
        """Discard the choice, for another run."""
        self._sites.clear()
        self._shown.clear()
        self._left_out.clear()
        self._past.clear()
        self._has_warned = False
        if not self._is_given:
            self.max_tags, self.is_brief = _WHOLE, False

    def shorten(self, found: Mapping[Site, SiteStatistics], tags_of: Callable[[SiteStatistics], int]) -> None:
        """Become brief if no limit was given and the sites of a record have too many tags."""
        if self._is_given or self.is_brief or self._sites.keys() >= found.keys():  # the last in nearly all records
            return
        if self._stages * sum(map(tags_of, found.values())) > _WHOLE:
            self.is_brief, self.max_tags = True, _SELECTION
            shown = [*self._sites]
            self._sites.clear()
            self._shown.clear()
            self._left_out |= {self._key(site) for site in shown}

    def _key(self, site: Site) -> str:
        """Return the name of the module or, in a brief selection, that of the parameter, as ``fc weight``."""
        path = site.path.removesuffix(".grad")
        return f"{site.name} {path}" if self.is_brief and not path.startswith("out") else site.name

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, for a checkpoint."""
        shown = [[*site, tags] for site, tags in list(self._sites.items())]  # copied, another thread may add sites
        return {"shown": shown, "left_out": sorted(self._left_out)} if self._left_out else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the choice from a checkpoint."""
        self.clear()
        self._sites.update((Site(name, path), tags) for name, path, tags in state.get("shown", ()))
        if not self._is_given and state.get("left_out"):
            self.is_brief, self.max_tags = True, _SELECTION
        self._shown.update(self._key(site) for site in self._sites)
        self._left_out.update(state.get("left_out", ()))
        self._has_warned = bool(self._left_out)

    def select(
        self, found: Mapping[Site, SiteStatistics], tags_of: Callable[[SiteStatistics], int]
    ) -> Mapping[Site, SiteStatistics]:
        """Return the sites of the chosen modules.

        Args:
            found: All sites of a record.
            tags_of: A function that returns the number of tags for the statistics of a site.
        """
        modules: dict[str, list[Site]] = {}
        for site in found:
            modules.setdefault(self._key(site) if self.is_brief else site.name, []).append(site)
        tags = {site: self._stages * tags_of(seen) for site, seen in found.items()}
        for name, sites in modules.items():
            if name in self._shown:  # it may have new sites
                self._add(sites, tags)
        new = [name for name in modules if name not in self._shown and name not in self._left_out]
        if (
            not self._left_out
            and self._used + sum(tags[site] for name in new for site in modules[name]) <= self.max_tags
        ):
            for name in new:
                self._show(modules[name], tags)
            return found
        self._choose(new, modules, found, tags)
        self._warn_once()
        return {site: seen for site, seen in found.items() if site in self._sites}

    @property
    def is_complete(self) -> bool:
        """True if no module has been left out."""
        return not self._left_out

    @property
    def _used(self) -> int:
        return sum(self._sites.values())

    def _choose(
        self,
        new: list[str],
        modules: Mapping[str, list[Site]],
        found: Mapping[Site, SiteStatistics],
        tags: Mapping[Site, int],
    ) -> None:
        """Choose among the new modules, and show the modules that have become unusual."""
        cost = {name: sum(tags[site] for site in sites) for name, sites in modules.items()}
        unusual = self._unusual(found)
        is_first = not self._shown and not self._left_out
        without_reserve = self.max_tags - self.max_tags // _RESERVE
        room = (without_reserve if is_first else self.max_tags) - self._used
        for name, degree in unusual.items():
            # Half of the reserve of a short selection waits for modules that stand out by far.
            kept = self.max_tags // _RESERVE // 2 if self.is_brief and degree < _BY_FAR and not is_first else 0
            if name not in self._shown and cost[name] <= room - kept:
                self._show(modules[name], tags)
                room -= cost[name]
        rest = [name for name in new if name not in self._shown]
        room = without_reserve - self._used
        for name in _evenly_spaced(rest, [cost[name] for name in rest], room):
            self._show(modules[name], tags)
        self._left_out |= modules.keys() - self._shown

    def _show(self, sites: Iterable[Site], tags: Mapping[Site, int]) -> None:
        for site in sites:
            self._sites[site] = tags[site]
            self._shown.add(self._key(site))
            self._left_out.discard(self._key(site))

    def _add(self, sites: Iterable[Site], tags: Mapping[Site, int]) -> None:
        """Show new sites of modules that are already shown, as far as the limit allows."""
        for site in sites:
            more = tags[site] - self._sites.get(site, 0)
            if more > 0 and (site in self._sites or not self._left_out or self._used + more <= self.max_tags):
                self._sites[site] = tags[site]

    def _unusual(self, found: Mapping[Site, SiteStatistics]) -> dict[str, float]:
        """Return the degrees of the modules with unusual statistics, the most unusual first."""
        sites = tuple(found)
        latest = np.array([[seen.scalars.get(name, np.nan) for name in _COMPARED] for seen in found.values()])
        steps = [values for known, values in self._past if known == sites] + [latest]
        self._past.append((sites, latest))
        table = np.stack(steps, axis=-1)
        degrees = unusualness(sites, {name: table[:, column] for column, name in enumerate(_COMPARED)})
        most: dict[str, float] = {}
        for place in standing_out(degrees):
            most.setdefault(self._key(sites[place]), float(degrees[place]))
        return most

    def _warn_once(self) -> None:
        if self._left_out and not self._has_warned:
            self._has_warned = True
            if self.is_brief:
                what = "parameters" if any(" " in key for key in self._left_out) else "modules"
                self._log(
                    f"{self._name} shows {len(self._shown)} of {len(self._shown) + len(self._left_out)} {what} as "
                    "curves: those with unusual statistics, and the others evenly spread. The heat maps and "
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
    """Return evenly spaced modules, as many as fit into the room."""
    for count in range(min(len(names), max(0, room) // max(1, min(costs, default=1))), 0, -1):
        places = [place * len(names) // count for place in range(count)]
        if sum(costs[place] for place in places) <= room:
            return [names[place] for place in places]
    return []


_BAD = ("nan_count", "inf_count")


class _Plan(NamedTuple):
    """The tags of a record, and the places of their values in its table."""

    schema: TableSchema
    shown: NDArray[np.int64]
    scalars: Mapping[str, tuple[int, int]]
    histogram_tags: Sequence[str]


def _is_main(site: Site, sites: Collection[Site]) -> bool:
    """Return True for outputs, parameters and their gradients, and False for updates and states of the optimizer."""
    of, _, last = site.path.rpartition(".")
    return last == "grad" or Site(site.name, of) not in sites


class SinkFormatter:
    """Write records to a sink.

    The tags are ``<group>/<module>/<statistic>``. The group of an evaluation ends with its stage, as in
    ``activations_validate``. With several data loaders, the tag ends with ``/dataloader_idx_<n>``, as in ``self.log``.
    The counts of NaN and infinities are written from the first record on in which a site has any.

    Args:
        group: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        statistics: The scalars to show. Scalars of extra reductions are always shown.
        histograms: True to write histograms.
        budget: A limit on the number of tags, which chooses the sites to write.
        numbered: Begin the name of each module in a tag with its position in the order of execution, as in
            ``activations/017_blocks.2.fc/rms``, because TensorBoard sorts tags.
    """

    def __init__(
        self,
        group: str,
        statistics: Sequence[str],
        *,
        histograms: bool = True,
        budget: TagBudget | None = None,
        numbered: bool = False,
    ) -> None:
        self.group = group
        self._label = group
        self._budget = budget
        self._numbers: dict[str, str] | None = {} if numbered else None
        self.statistics = tuple(statistics)
        self.histograms = histograms
        self.nonfinite: set[Site] = set()
        """The sites that have had NaN or infinities."""
        self._plans: dict[tuple[str, int | None, bool], _Plan] = {}

    def begin(self, label: str) -> None:
        """Begin a run.

        Args:
            label: The first part of the tags that contain no module.
        """
        self._label = label
        self._plans.clear()
        if self._numbers is not None:
            self._numbers = {}
        if self._budget is not None:
            self._budget.clear()

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

    def write(self, sink: Sink, record: Record, found: StatisticsTable) -> None:
        """Write a record."""
        if record.overflowed:
            self._write_overflow(sink, record, found)
            return
        plan = self._plan(record, found)
        numbers = found.numbers.tolist()
        scalars = {tag: numbers[row][column] for tag, (row, column) in plan.scalars.items()}
        if record.overflow_steps:
            scalars[f"{self._label}/overflow_steps"] = float(record.overflow_steps)
        if scalars:
            sink.write_scalars(record.step, scalars)
        if self.histograms and found:
            counts, sums = found.counts.take(plan.shown), sums_of(found.part(plan.shown, SUMMED))
            sink.write_histograms(record.step, TaggedHistograms(plan.histogram_tags, counts, sums))

    def _plan(self, record: Record, found: StatisticsTable) -> _Plan:
        """Return the tags of a record. They are the same in nearly all records of a stage."""
        is_new = self._note_nonfinite(found)
        key, schema = (record.stage, record.loader, self._is_brief), found.schema
        plan = self._plans.get(key)
        is_known = plan is not None and plan.schema is schema and found.lacking is None and not is_new
        if plan is not None and is_known and (self._budget is None or self._budget.is_complete):
            return plan
        shown = self._select(found)
        if plan is None or not is_known or not np.array_equal(plan.shown, shown):
            plan = self._plans[key] = self._new_plan(record, found, shown)
        return plan

    def _note_nonfinite(self, found: StatisticsTable) -> bool:
        """Note the sites with NaN or infinities. Return True if there is a new one."""
        bad = np.flatnonzero(sum(found.column(name) for name in _BAD)) if len(found) else ()
        before = len(self.nonfinite)
        self.nonfinite.update(found.sites[row] for row in bad)
        return len(self.nonfinite) > before

    def _new_plan(self, record: Record, found: StatisticsTable, shown: NDArray[np.int64]) -> _Plan:
        self._number(found.schema)
        tags: dict[str, tuple[int, int]] = {}
        for row in shown.tolist():
            site = found.sites[row]
            names = found.names_of(row)
            further = [name for name in names if name not in _ON_REQUEST]
            wanted = [*self._main_statistics, *(_BAD if site in self.nonfinite else ()), *further]
            for name in dict.fromkeys(wanted):
                if name in names:  # the statistics across ranks need several ranks
                    tags[self._tag(record, self.group, site, name)] = row, found.columns.index(name)
        # A histogram has the tag of its site, so that the page shows it next to the site's scalars.
        histograms = [self._tag(record, self.group, found.sites[row], "histogram") for row in shown]
        return _Plan(found.schema, shown, tags, histograms)

    def _number(self, schema: TableSchema) -> None:
        """Number the modules that have no number yet, in the order of execution."""
        if self._numbers is None:
            return
        order = schema.backward if self.group.startswith("gradients") else schema.forward
        names = dict.fromkeys(schema.sites[row].name for row in order.tolist())
        new = [name for name in names if name not in self._numbers]
        first = len(self._numbers)
        digits = max(3, len(str(first + len(new) - 1)))
        self._numbers |= {name: f"{first + place:0{digits}}_{name}" for place, name in enumerate(new)}

    def _select(self, found: StatisticsTable) -> NDArray[np.int64]:
        """Return the rows of the sites that are shown."""
        if self._budget is None or not found:
            return np.arange(len(found))
        sites = found.without_bins()
        self._budget.shorten(sites, self._count_tags)
        if self._is_brief:
            sites = {site: seen for site, seen in sites.items() if _is_main(site, found)}
        chosen = self._budget.select(sites, self._count_tags)
        return np.array([row for site, row in found.rows.items() if site in chosen], dtype=np.int64)

    @property
    def _is_brief(self) -> bool:
        return self._budget is not None and self._budget.is_brief

    @property
    def _main_statistics(self) -> tuple[str, ...]:
        """The statistics to show: those that the user asked for, or the main ones in a brief selection."""
        if not self._is_brief or self.statistics != DEFAULT_STATISTICS:
            return self.statistics
        return ("rms",) if self.group.startswith("parameters") else ("rms", "zero_fraction")

    def _count_tags(self, seen: SiteStatistics) -> int:
        """Return the number of tags of a site whose values are finite."""
        further = [name for name in seen.scalars if name not in _ON_REQUEST]
        return len({*(name for name in self._main_statistics if name in seen.scalars), *further}) + self.histograms

    def _write_overflow(self, sink: Sink, record: Record, found: StatisticsTable) -> None:
        """Write the overflow locations of a step that the optimizer skipped. Its other statistics are meaningless."""
        scalars = {f"{self._label}/overflow_steps": float(record.overflow_steps)}
        for site, seen in found.without_bins().items():
            if any(seen.scalars[name] for name in _BAD):
                group = f"{self.group}_overflow"
                scalars.update({self._tag(record, group, site, name): seen.scalars[name] for name in _BAD})
        sink.write_scalars(record.step, scalars)

    def _tag(self, record: Record, group: str, site: Site, statistic: str) -> str:
        stage = "" if record.stage == "train" else f"_{record.stage}"
        loader = "" if record.loader is None else f"/dataloader_idx_{record.loader}"
        name = site.name if self._numbers is None else self._numbers.get(site.name, site.name)
        return make_tag(group + stage, name, site.path, statistic) + loader

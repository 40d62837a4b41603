"""The formatter that turns a record into tagged sink values, within a limit on the number of tags."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_recorder.errors import warn
from lightning_recorder.names import make_tag
from lightning_recorder.reductions import TaggedHistograms, sums_of
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics.sites import SHOWN_STATISTICS, Record, SiteStatistics
from lightning_recorder.statistics.table import StatisticsTable, TableSchema
from lightning_recorder.taps import Site

__all__ = ["SinkFormatter", "TagBudget"]

_RESERVE = 4  # a quarter of the tags is reserved for modules that become unusual later
_MOSTLY_ZERO = 0.9
_SIZES = ("rms", "abs_max", "update_ratio")
# A size is unusual if its distance from the median, in powers of ten, exceeds this value and this multiple of the
# median distance. In a healthy network, the weights differ by a power of ten or more.
_LEAST_DISTANCE, _TIMES_MEDIAN_DISTANCE = 1.5, 6.0
_FEWEST = 4  # the minimum number of sizes for a meaningful median


class TagBudget:
    """Choose whole modules so that the tags of all their sites do not exceed a limit.

    Modules with unusual statistics come first: values that are not finite, nearly all zeros, or a size far from that of
    the other modules. The others are spread evenly over the model. A quarter of the tags is reserved for modules that
    become unusual in a later record, which are shown from that record on. A module that is shown stays shown.

    Args:
        max_tags: The maximum number of tags.
        name: The name of the recorder in the warning.
        stages: The number of stages with tags of their own.
        by_path: Compare a site only with sites of the same path, such as ``weight.grad``, because weights and their
            gradients differ in size.
    """

    def __init__(self, max_tags: int, name: str = "the recorder", *, stages: int = 1, by_path: bool = False) -> None:
        self.max_tags = max_tags
        self._name = name
        self._stages = max(1, stages)
        self._by_path = by_path
        self._sites: dict[Site, int] = {}  # the shown sites with their number of tags
        self._shown: set[str] = set()
        self._left_out: set[str] = set()
        self._has_warned = False

    def clear(self) -> None:
        """Discard the choice, for another run."""
        self._sites.clear()
        self._shown.clear()
        self._left_out.clear()
        self._has_warned = False

    def state_dict(self) -> dict[str, Any]:
        """Return the choice, for a checkpoint."""
        shown = [[*site, tags] for site, tags in list(self._sites.items())]  # copied, another thread may add sites
        return {"shown": shown, "left_out": sorted(self._left_out)} if self._left_out else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the choice from a checkpoint."""
        self.clear()
        self._sites.update((Site(name, path), tags) for name, path, tags in state.get("shown", ()))
        self._shown.update(site.name for site in self._sites)
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
            modules.setdefault(site.name, []).append(site)
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
        for name in unusual:
            if name not in self._shown and cost[name] <= room:
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
            self._shown.add(site.name)
            self._left_out.discard(site.name)

    def _add(self, sites: Iterable[Site], tags: Mapping[Site, int]) -> None:
        """Show new sites of modules that are already shown, as far as the limit allows."""
        for site in sites:
            more = tags[site] - self._sites.get(site, 0)
            if more > 0 and (site in self._sites or not self._left_out or self._used + more <= self.max_tags):
                self._sites[site] = tags[site]

    def _unusual(self, found: Mapping[Site, SiteStatistics]) -> list[str]:
        """Return the modules with unusual statistics, the most unusual first."""
        kinds: dict[str, list[Site]] = defaultdict(list)
        for site in found:
            kinds[site.path if self._by_path else ""].append(site)
        degrees: dict[str, float] = {}
        for sites in kinds.values():
            for site, degree in zip(sites, _outlier_degrees([found[site] for site in sites]), strict=True):
                degrees[site.name] = max(degree, degrees.get(site.name, 0.0))
        return sorted((name for name, degree in degrees.items() if degree >= 1), key=lambda name: -degrees[name])

    def _warn_once(self) -> None:
        if self._left_out and not self._has_warned:
            self._has_warned = True
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


def _outlier_degrees(sites: Sequence[SiteStatistics]) -> list[float]:
    """Return a degree for each of the comparable sites. A site is unusual if its degree is at least 1."""
    degrees = [math.inf if seen.scalars["nan_count"] or seen.scalars["inf_count"] else 0.0 for seen in sites]
    empty = [seen.scalars["zero_fraction"] >= _MOSTLY_ZERO for seen in sites]
    if 2 * sum(empty) <= len(sites) or len(sites) < _FEWEST:  # the majority is not unusual: new biases are zero
        degrees = [max(degree, float(is_empty)) for degree, is_empty in zip(degrees, empty, strict=True)]
    for size in _SIZES:
        logs = [_log10(seen, size) for seen in sites]
        known = [each for each in logs if each is not None]
        if len(known) < _FEWEST:
            continue
        middle = median(known)
        far = max(_LEAST_DISTANCE, _TIMES_MEDIAN_DISTANCE * median(abs(each - middle) for each in known))
        for place, each in enumerate(logs):
            if each is not None:
                degrees[place] = max(degrees[place], abs(each - middle) / far)
    return degrees


def _log10(seen: SiteStatistics, size: str) -> float | None:
    """Return the common logarithm of a size, or None if the size is missing, zero or not finite."""
    value = seen.abs_max if size == "abs_max" else seen.scalars.get(size, 0.0)
    return math.log10(value) if 0 < value < math.inf else None


_BAD = ("nan_count", "inf_count")


class _Plan(NamedTuple):
    """The tags of a record, and the places of their values in its table."""

    schema: TableSchema
    shown: NDArray[np.int64]
    scalars: Mapping[str, tuple[int, int]]
    histogram_tags: Sequence[str]


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
    """

    def __init__(
        self, group: str, statistics: Sequence[str], *, histograms: bool = True, budget: TagBudget | None = None
    ) -> None:
        self.group = group
        self._label = group
        self._budget = budget
        self.statistics = tuple(statistics)
        self.histograms = histograms
        self.nonfinite: set[Site] = set()
        """The sites that have had NaN or infinities."""
        self._plans: dict[tuple[str, int | None], _Plan] = {}

    def begin(self, label: str) -> None:
        """Begin a run.

        Args:
            label: The first part of the tags that contain no module.
        """
        self._label = label
        self._plans.clear()
        if self._budget is not None:
            self._budget.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the modules that are shown, for a checkpoint."""
        return {} if self._budget is None else self._budget.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the modules that are shown from a checkpoint."""
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
            names = found.columns
            sums = [sums_of(dict(zip(names, numbers[row], strict=True))) for row in plan.shown.tolist()]
            counts = found.counts.take(plan.shown)
            sink.write_histograms(record.step, TaggedHistograms(plan.histogram_tags, counts, sums))

    def _plan(self, record: Record, found: StatisticsTable) -> _Plan:
        """Return the tags of a record. They are the same in nearly all records of a stage."""
        is_new = self._note_nonfinite(found)
        key, schema = (record.stage, record.loader), found.schema
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
        tags: dict[str, tuple[int, int]] = {}
        for row in shown.tolist():
            site = found.sites[row]
            names = found.names_of(row)
            further = [name for name in names if name not in SHOWN_STATISTICS]
            wanted = [*self.statistics, *(_BAD if site in self.nonfinite else ()), *further]
            for name in dict.fromkeys(wanted):
                if name in names:  # the statistics across ranks need several ranks
                    tags[self._tag(record, self.group, site, name)] = row, found.columns.index(name)
        # A histogram has the tag of its site, so that the page shows it next to the site's scalars.
        histograms = [self._tag(record, self.group, found.sites[row], "histogram") for row in shown]
        return _Plan(found.schema, shown, tags, histograms)

    def _select(self, found: StatisticsTable) -> NDArray[np.int64]:
        """Return the rows of the sites that are shown."""
        if self._budget is None or not found:
            return np.arange(len(found))
        chosen = self._budget.select(found.without_bins(), self._count_tags)
        return np.array([row for site, row in found.rows.items() if site in chosen], dtype=np.int64)

    def _count_tags(self, seen: SiteStatistics) -> int:
        """Return the number of tags of a site whose values are finite."""
        further = [name for name in seen.scalars if name not in SHOWN_STATISTICS]
        return len({*(name for name in self.statistics if name in seen.scalars), *further}) + self.histograms

    def _write_overflow(self, sink: Sink, record: Record, found: StatisticsTable) -> None:
        """Write the overflow locations of a step that the optimizer skipped. Its other statistics are meaningless."""
        scalars = {f"{self._label}/overflow_steps": float(record.overflow_steps)}
        for site, seen in found.without_bins().items():
            if any(seen.scalars[name] for name in _BAD):
                group = f"{self.group}_overflow"
                scalars.update({self._tag(record, group, site, name): seen.scalars[name] for name in _BAD})
        sink.write_scalars(record.step, scalars)

    @staticmethod
    def _tag(record: Record, group: str, site: Site, statistic: str) -> str:
        stage = "" if record.stage == "train" else f"_{record.stage}"
        loader = "" if record.loader is None else f"/dataloader_idx_{record.loader}"
        return make_tag(group + stage, *site, statistic) + loader

"""The formatter that turns a record into tagged sink values, within a limit on the number of tags."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from lightning_recorder.errors import warn
from lightning_recorder.names import is_input, make_tag
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics.sites import SHOWN_STATISTICS, Record, SiteStatistics
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
            kinds[site.path if self._by_path else "in" if is_input(site.path) else ""].append(site)
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

    def begin(self, label: str) -> None:
        """Begin a run.

        Args:
            label: The first part of the tags that contain no module.
        """
        self._label = label
        if self._budget is not None:
            self._budget.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the modules that are shown, for a checkpoint."""
        return {} if self._budget is None else self._budget.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the modules that are shown from a checkpoint."""
        if self._budget is not None:
            self._budget.load_state_dict(state)

    def write(self, sink: Sink, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Write a record."""
        if record.overflowed:
            self._write_overflow(sink, record, found)
            return
        found = self._select(found)
        scalars: dict[str, float] = {}
        for site, seen in found.items():
            if any(seen.scalars[name] for name in _BAD):
                self.nonfinite.add(site)
            further = [name for name in seen.scalars if name not in SHOWN_STATISTICS]
            shown = [*self.statistics, *(_BAD if site in self.nonfinite else ()), *further]
            scalars.update(self._scalars(record, self.group, site, seen, shown))
        if record.overflow_steps:
            scalars[f"{self._label}/overflow_steps"] = float(record.overflow_steps)
        if scalars:
            sink.write_scalars(record.step, scalars)
        if self.histograms and found:
            # A histogram has the tag of its site, so that the page shows it next to the site's scalars.
            histograms = {
                self._tag(record, self.group, site, "histogram"): seen.histogram for site, seen in found.items()
            }
            sink.write_histograms(record.step, histograms)

    def _select(self, found: Mapping[Site, SiteStatistics]) -> Mapping[Site, SiteStatistics]:
        if self._budget is None or not found:
            return found
        return self._budget.select(found, self._count_tags)

    def _count_tags(self, seen: SiteStatistics) -> int:
        """Return the number of tags of a site whose values are finite."""
        further = [name for name in seen.scalars if name not in SHOWN_STATISTICS]
        return len({*(name for name in self.statistics if name in seen.scalars), *further}) + self.histograms

    def _write_overflow(self, sink: Sink, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Write the overflow locations of a step that the optimizer skipped. Its other statistics are meaningless."""
        scalars = {f"{self._label}/overflow_steps": float(record.overflow_steps)}
        for site, seen in found.items():
            if any(seen.scalars[name] for name in _BAD):
                scalars.update(self._scalars(record, f"{self.group}_overflow", site, seen, _BAD))
        sink.write_scalars(record.step, scalars)

    def _scalars(
        self, record: Record, group: str, site: Site, seen: SiteStatistics, names: Iterable[str]
    ) -> dict[str, float]:
        return {
            self._tag(record, group, site, name): seen.scalars[name]
            for name in dict.fromkeys(names)
            if name in seen.scalars  # the statistics across ranks need several ranks
        }

    @staticmethod
    def _tag(record: Record, group: str, site: Site, statistic: str) -> str:
        stage = "" if record.stage == "train" else f"_{record.stage}"
        loader = "" if record.loader is None else f"/dataloader_idx_{record.loader}"
        return make_tag(group + stage, *site, statistic) + loader

"""The formatter that turns a record into tagged sink values, within a limit on the number of tags."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from lightning_recorder.errors import warn
from lightning_recorder.insight.unusual import standing_out, unusualness
from lightning_recorder.names import make_tag
from lightning_recorder.reductions.row import DEFAULT_STATISTICS
from lightning_recorder.sinks import Sink
from lightning_recorder.statistics.sites import SHOWN_STATISTICS, Record, SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["SinkFormatter", "TagBudget"]

_RESERVE = 4  # a quarter of the tags is reserved for modules that become unusual later
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
        self.statistics = self._shown = tuple(statistics)
        self.histograms = histograms
        self.nonfinite: set[Site] = set()
        """The sites that have had NaN or infinities."""

    def begin(self, label: str) -> None:
        """Begin a run.

        Args:
            label: The first part of the tags that contain no module.
        """
        self._label = label
        self._shown = self.statistics
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

    def write(self, sink: Sink, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Write a record."""
        if record.overflowed:
            self._write_overflow(sink, record, found)
            return
        if self._numbers is not None:
            self._number(record, found)
        found = self._select(found)
        scalars: dict[str, float] = {}
        for site, seen in found.items():
            if any(seen.scalars[name] for name in _BAD):
                self.nonfinite.add(site)
            further = [name for name in seen.scalars if name not in SHOWN_STATISTICS]
            shown = [*self._shown, *(_BAD if site in self.nonfinite else ()), *further]
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

    def _number(self, record: Record, found: Mapping[Site, SiteStatistics]) -> None:
        """Number the modules that have no number yet, in the order of execution."""
        if self._numbers is None or all(site.name in self._numbers for site in found):
            return
        sites = record.in_order_of_execution(found, backward=self.group.startswith("gradients"))
        names = [name for name in dict.fromkeys(site.name for site in sites) if name not in self._numbers]
        first = len(self._numbers)
        digits = max(3, len(str(first + len(names) - 1)))
        self._numbers |= {name: f"{first + place:0{digits}}_{name}" for place, name in enumerate(names)}

    def _select(self, found: Mapping[Site, SiteStatistics]) -> Mapping[Site, SiteStatistics]:
        if self._budget is None or not found:
            return found
        self._budget.shorten(found, self._count_tags)
        if self._budget.is_brief:
            self._shown = self._main_statistics()
            found = {site: seen for site, seen in found.items() if _is_main(site, found)}
        return self._budget.select(found, self._count_tags)

    def _main_statistics(self) -> tuple[str, ...]:
        """Return the statistics to show: those that the user asked for, or the main ones in a brief selection."""
        if self._budget is None or not self._budget.is_brief or self.statistics != DEFAULT_STATISTICS:
            return self.statistics
        return ("rms",) if self.group.startswith("parameters") else ("rms", "zero_fraction")

    def _count_tags(self, seen: SiteStatistics) -> int:
        """Return the number of tags of a site whose values are finite."""
        further = [name for name in seen.scalars if name not in SHOWN_STATISTICS]
        return len({*(name for name in self._shown if name in seen.scalars), *further}) + self.histograms

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

    def _tag(self, record: Record, group: str, site: Site, statistic: str) -> str:
        stage = "" if record.stage == "train" else f"_{record.stage}"
        loader = "" if record.loader is None else f"/dataloader_idx_{record.loader}"
        name = site.name if self._numbers is None else self._numbers.get(site.name, site.name)
        return make_tag(group + stage, name, site.path, statistic) + loader

"""The limit on the number of tags of a recorder, which chooses the modules to show."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from lightning_recorder.errors import warn
from lightning_recorder.insight.finding import recorded
from lightning_recorder.insight.unusual import standing_out, unusualness
from lightning_recorder.records.table import Floats, SiteStatistics
from lightning_recorder.taps import Site

__all__ = ["COMPARED", "TagBudget"]

COMPARED = ("rms", "min", "max", "zero_fraction", "nan_count", "inf_count", "update_ratio")
"""The statistics by which modules are compared."""

_RESERVE = 4  # a quarter of the tags is reserved for modules that become unusual later
_BY_FAR = 2.0  # twice the degree from which on a module stands out
_REMEMBERED = 8  # records that are compared with the latest one

# By default, everything is shown if a recorder has at most this number of tags. Otherwise a page is slow and the user's
# own metrics are lost in it, so that only a selection is shown: the heat maps and the record files have the rest.
_WHOLE = 400
_SELECTION = 75


class TagBudget:
    """Choose whole modules so that the tags of all their sites do not exceed a limit.

    Modules that findings name come first. Those with unusual statistics follow (see
    :func:`~lightning_recorder.insight.unusual.unusualness`): values that are not finite, nearly all zeros, or a size
    far from that of the neighboring or equal modules or from their own past. The others are spread evenly over the
    model. A quarter of the tags is reserved for modules that become unusual in a later record, which are shown from
    that record on. A module that is shown stays shown.

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
        self._past: deque[tuple[tuple[Site, ...], Floats]] = deque(maxlen=_REMEMBERED)
        self._name = name
        self._stages = max(1, stages)
        self._sites: dict[Site, int] = {}  # the shown sites with their number of tags
        self._shown: set[str] = set()
        self._left_out: set[str] = set()
        self._refused: dict[str, bool] = {}
        """The unusual modules that did not fit; True if the whole reserve was open to them."""
        self._has_warned = False
        self.degrees: dict[Site, float] = {}
        """The degrees of the sites that stand out, from the latest call of :meth:`unusual`."""
        self.named: Set[str] = frozenset()
        """The modules that findings name, which come first."""
        self.has_curve_of_each = False
        """True if each module has a curve, whether or not it is shown. Only messages depend on it."""

    def clear(self) -> None:
        """Discard the choice, for another run."""
        self._sites.clear()
        self._shown.clear()
        self._left_out.clear()
        self._refused.clear()
        self._past.clear()
        self.degrees, self.named = {}, frozenset()
        self._has_warned = False
        if not self._is_given:
            self.max_tags, self.is_brief = _WHOLE, False

    def shorten(self, found: Mapping[Site, SiteStatistics], tags_of: Callable[[Site], int]) -> None:
        """Become brief if no limit was given and the sites of a record have too many tags."""
        if self._is_given or self.is_brief or self._sites.keys() >= found.keys():  # the last in nearly all records
            return
        if self._stages * sum(map(tags_of, found)) > _WHOLE:
            self.is_brief, self.max_tags = True, _SELECTION
            shown = [*self._sites]
            self._sites.clear()
            self._shown.clear()
            self._left_out |= {self.key(site) for site in shown}

    def has_room_for_curves(self, modules: int) -> bool:
        """Return True if each of so many modules may have a curve beside a brief selection."""
        return self.is_brief and self._stages * modules <= _WHOLE

    def key(self, site: Site) -> str:
        """Return what is shown as a whole: a module or, in a brief selection, a parameter, as ``fc weight``."""
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
        self._shown.update(self.key(site) for site in self._sites)
        self._left_out.update(state.get("left_out", ()))
        self._has_warned = bool(self._left_out)

    def select(
        self,
        found: Mapping[Site, SiteStatistics],
        tags_of: Callable[[Site], int],
        unusual: Mapping[str, float] | None = None,
    ) -> Mapping[Site, SiteStatistics]:
        """Return the sites of the chosen modules."""
        modules: dict[str, list[Site]] = {}
        for site in found:
            modules.setdefault(self.key(site) if self.is_brief else site.name, []).append(site)
        tags = {site: self._stages * tags_of(site) for site in found}
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
        if unusual is None:
            values = [[seen.scalars.get(name, np.nan) for name in COMPARED] for seen in found.values()]
            unusual = self.unusual(tuple(found), np.array(values))
        self._choose(new, modules, unusual, tags)
        self._warn_once()
        return {site: seen for site, seen in found.items() if site in self._sites}

    def unusual(self, sites: tuple[Site, ...], values: Floats) -> dict[str, float]:
        """Return the degrees of the modules with unusual statistics, the most unusual first.

        Call this once for each record.

        Args:
            sites: The sites of the record.
            values: The compared statistics, ``[sites, statistics]``.
        """
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
        """Return False if all of these modules are shown or did not fit before."""
        return any(
            name not in self._shown and not self._refused.get(name, degree < _BY_FAR and name in self._refused)
            for name, degree in unusual.items()
        )

    @property
    def size(self) -> int:
        """The number of sites that are shown."""
        return len(self._sites)

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
        unusual: Mapping[str, float],
        tags: Mapping[Site, int],
    ) -> None:
        """Choose among the new modules, and show the modules that have become unusual."""
        cost = {name: sum(tags[site] for site in sites) for name, sites in modules.items()}
        is_first = not self._shown and not self._left_out
        without_reserve = self.max_tags - self.max_tags // _RESERVE
        room = (without_reserve if is_first else self.max_tags) - self._used
        self._refused.clear()  # the number of tags of a module may have changed
        for name, degree in unusual.items():
            # Half of the reserve of a short selection waits for modules that stand out by far.
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
    """Return evenly spaced modules, as many as fit into the room."""
    for count in range(min(len(names), max(0, room) // max(1, min(costs, default=1))), 0, -1):
        places = [place * len(names) // count for place in range(count)]
        if sum(costs[place] for place in places) <= room:
            return [names[place] for place in places]
    return []

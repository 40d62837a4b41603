"""The layout of TensorBoard's Custom Scalars page."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_recorder.insight.unusual import choose, standing_out, unusualness
from lightning_recorder.records.table import Floats
from lightning_recorder.records.tags import make_tag, parse_tag

__all__ = ["Dashboard", "RankedScalars"]

_TAG = b"custom_scalars__config__"  # TensorBoard looks for a layout under this tag
# TensorBoard colors lines by run and tells those of one run apart by six symbols only.
_MOST_LINES = 6


_EARLIER = 0.5  # the weight of earlier records
_BY_FAR = 1.25  # a module gets into the titles if its degree exceeds that of the one there by this factor
_MOST_TITLES = 20  # the layouts that are written for the sake of the titles alone


class RankedScalars(dict[str, float]):
    """Scalars of some of the sites of a record, by tag, with the ranking of all its sites.

    Args:
        scalars: The scalars by tag.
        degrees: The degree of each site that stands out and has scalars, by one of its tags. ``None`` if all sites have
            scalars, so that these can be compared.
        named: A tag of each site whose module a finding names. Without scalars, nothing but this has changed.
    """

    def __init__(
        self, scalars: Iterable[tuple[str, float]], degrees: Mapping[str, float] | None, named: Iterable[str] = ()
    ) -> None:
        super().__init__(scalars)
        self.degrees, self.named = degrees, tuple(named)


class _Line(NamedTuple):
    """A tag in a chart."""

    tag: str
    """The tag without the index of a data loader."""
    module: str
    """The module, or the module and the parameter."""
    path: str


class _Chart:
    """The lines of one statistic in a group of tags."""

    def __init__(self, statistic: str) -> None:
        self.statistic = statistic
        self.lines: list[_Line] = []

    @property
    def sites(self) -> tuple[tuple[str, str], ...]:
        """The module and the path of each line."""
        return tuple((line.module, line.path) for line in self.lines)


class _Comparison(NamedTuple):
    """The charts of a group that show the same sites, with more lines than TensorBoard can tell apart."""

    group: str
    sites: tuple[tuple[str, str], ...]
    tags: Mapping[str, list[str]]
    """The tags of each statistic, in the order of the sites."""

    @classmethod
    def of(cls, group: str, charts: Iterable[_Chart]) -> list[_Comparison]:
        """Return the comparisons of a group."""
        found: dict[tuple[tuple[str, str], ...], dict[str, list[str]]] = {}
        for chart in charts:
            if len(chart.lines) > _MOST_LINES:
                found.setdefault(chart.sites, {})[chart.statistic] = [line.tag for line in chart.lines]
        return [cls(group, sites, tags) for sites, tags in found.items()]

    def degrees(self, values: Mapping[str, float]) -> Floats:
        """Return how unusual the values of each site are, ``[sites]``."""
        tables, bad = {}, np.zeros((len(self.sites), 1))
        for statistic, tags in self.tags.items():
            found = np.array([values.get(tag, math.nan) for tag in tags], dtype=np.float64)[:, None]
            tables[statistic] = found
            if statistic != "update_ratio":  # that of a parameter that was zero is infinite, which is no fault
                bad += np.isinf(found)
        return unusualness(self.sites, {**tables, "inf_count": bad})


class Dashboard:
    """The charts of a writer: one for each statistic in each group of tags.

    A chart has at most six lines, because TensorBoard gives all lines of a run the same color and has six symbols. They
    are those of the most unusual modules and of an even selection of the others. The layout is written again when a
    new statistic or module appears, or when a module that is not shown becomes unusual.

    Args:
        directory: The folder of the event files if the writer is shared with other code. If that folder already has a
            layout, that layout is kept and none is written.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = None if directory is None else Path(directory)
        self._charts: dict[str, dict[str, _Chart]] = {}
        self._comparisons: list[_Comparison] = []
        # The degrees of the modules that stand out, by group and module: in the latest record, and the largest one.
        self._degrees: dict[str, dict[str, tuple[float, float]]] = {}
        self._titled: dict[str, str] = {}  # the most unusual module of each group when the layout was written
        self._retitled = 0  # the number of layouts that were written for the sake of the titles alone
        self._seen: set[str] = set()
        self._may_write: bool | None = None
        self._is_changed = False
        self._lock = threading.Lock()  # recorders write in their own threads, and the last layout wins

    def update(self, scalars: Mapping[str, float], write: Callable[[dict[str, dict[str, list[str]]]], bool]) -> None:
        """Write the layout if it has changed.

        Args:
            scalars: The scalars that were written, by tag. Without a ranking, the sites are compared with each other.
            write: A callback that writes a layout, group to title to tags without the index of a data loader, and
                returns False if it failed.
        """
        with self._lock:
            if not self._seen.issuperset(scalars):  # False in nearly every call
                self._is_changed |= self._add_lines(tag for tag in scalars if tag not in self._seen)
                self._seen.update(scalars)
                self._comparisons = [
                    each for group, charts in self._charts.items() for each in _Comparison.of(group, charts.values())
                ]
            self._is_changed |= self._note_unusual(scalars)
            if self._is_changed and self._may_write:
                self._is_changed = not write(self._layout())

    def _add_lines(self, tags: Iterable[str]) -> bool:
        """Add the lines of these tags. Return True if there are any."""
        is_new = False
        for tag in tags:
            group, title, line = _parsed(tag)
            if line is not None:
                chart = self._charts.setdefault(group, {}).setdefault(title, _Chart(title.rpartition(" ")[2]))
                is_new |= line not in chart.lines
                chart.lines += [line] if line not in chart.lines else []
        if is_new and self._may_write is None:
            self._may_write = self._directory is None or not _has_layout(self._directory)
        return is_new

    def _note_unusual(self, scalars: Mapping[str, float]) -> bool:
        """Note the modules that stand out. Return True if there is a new one, or one for the titles."""
        now: dict[str, dict[str, float]] = {}  # the degrees of this record, by group and module
        if isinstance(scalars, RankedScalars) and scalars.degrees is not None:
            for tag, degree in {**dict.fromkeys(islice(scalars, 1), 0.0), **scalars.degrees}.items():
                group, _, line = _parsed(tag)
                if line is not None:
                    _raise(now.setdefault(group, {}), line.module, degree)
        else:
            for compared in self._comparisons:
                if any(tag in scalars for tags in compared.tags.values() for tag in tags):
                    degrees, modules = compared.degrees(scalars), now.setdefault(compared.group, {})
                    for place in standing_out(degrees):
                        _raise(modules, compared.sites[place][0], float(degrees[place]))
        for tag in scalars.named if isinstance(scalars, RankedScalars) else ():
            group, _, line = _parsed(tag)
            if line is not None:
                _raise(now.setdefault(group, {}), line.module, math.inf)
        is_new = False
        for group, modules in now.items():
            is_new |= self._add_degrees(group, modules, of_record=bool(scalars))
        return is_new

    def _add_degrees(self, group: str, degrees: Mapping[str, float], *, of_record: bool) -> bool:
        known = self._degrees.setdefault(group, {})
        is_new = any(degree and module not in known for module, degree in degrees.items())
        for module, (_, most) in known.items() if of_record else ():
            known[module] = degrees.get(module, 0.0), most
        for module, degree in degrees.items():
            if degree:
                known[module] = degree, max(degree, known.get(module, (0.0, 0.0))[1])
        titled = self._titled.get(group)
        if known and titled is not None and self._retitled < _MOST_TITLES and not is_new:
            first = max(known, key=lambda module: _combined(*known[module]))
            if _combined(*known[first]) > _BY_FAR * _combined(*known.get(titled, (0.0, 0.0))):
                self._retitled += 1
                return True
        return is_new

    def _layout(self) -> dict[str, dict[str, list[str]]]:
        """Return the tags of each chart, by group and title."""
        found: dict[str, dict[str, list[str]]] = {}
        for group, charts in sorted(self._charts.items()):
            found[group], known = {}, self._degrees.get(group, {})
            if known:
                self._titled[group] = max(known, key=lambda module: _combined(*known[module]))
            for title, chart in charts.items():
                degrees = np.array([_combined(*known.get(line.module, (0.0, 0.0))) for line in chart.lines])
                places = choose(degrees, _MOST_LINES)
                # The list of the lines below a chart is closed at first, so the title has the name that matters.
                first = "".join(f": {chart.lines[place].module}" for place in standing_out(degrees)[:1])
                part = f" ({len(places)} of {len(chart.lines)})" if len(places) < len(chart.lines) else ""
                found[group][title + first + part] = [chart.lines[place].tag for place in places]
        return found


def _raise(degrees: dict[str, float], module: str, degree: float) -> None:
    degrees[module] = max(degree, degrees.get(module, 0.0))


def _combined(latest: float, most: float) -> float:
    """Return the degree of a module for the charts: one that has recovered ranks behind one that is unusual now."""
    return max(latest, _EARLIER * most)


def _parsed(tag: str) -> tuple[str, str, _Line | None]:
    """Return the group, the title of the chart and the line of a tag; None for a tag without a module."""
    found = parse_tag(tag)
    if found is None:
        return "", "", None
    whole, module, path = make_tag(*found._replace(loader=None)), found.module, found.inner
    if not found.group.startswith("parameters"):
        return found.group, found.statistic, _Line(whole, module, path)
    # A parameter such as weight has related tags: weight.grad, weight.update and the optimizer states.
    of, _, part = path.rpartition(".")
    of, part = (of, part) if of else (path, "")
    return found.group, f"{part} {found.statistic}".strip(), _Line(whole, f"{module} {of}", path)


def _has_layout(directory: Path) -> bool:
    """Return True if an event file in the folder already has a layout."""
    try:
        return any(_holds_layout(path) for path in directory.glob("events.out.tfevents.*"))
    except OSError:
        return False


def _holds_layout(path: Path) -> bool:
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(_TAG) >= 0

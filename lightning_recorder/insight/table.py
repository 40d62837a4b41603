"""The records of one kind of tensor, collected one at a time in bounded memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from lightning_recorder.names import is_input
from lightning_recorder.reductions import Histogram
from lightning_recorder.taps import Site

__all__ = ["STATISTICS", "AnyFloats", "Floats", "Observed", "SiteRecords", "Table", "compact", "no_histogram"]

Floats = NDArray[np.float64]
AnyFloats = NDArray[np.float32] | NDArray[np.float64]

STATISTICS = (
    "count",
    "mean",
    "std",
    "rms",
    "min",
    "max",
    "zero_fraction",
    "nan_count",
    "inf_count",
    "update_ratio",
    "learning_rate",
    "weight_decay",
    "eval_mode",
)
"""The statistics and settings that the rules read; the columns of :attr:`SiteRecords.values`."""

_SIDES = ("in.prediction", "in.target")
_NAN, _INF = STATISTICS.index("nan_count"), STATISTICS.index("inf_count")
_MOST_ROWS = 512
_FEWEST_ROWS = 128
_MOST_VALUES = 2**21  # 16 MB; with more than 315 sites, fewer than 512 rows have them
_KEPT_AT_THE_END = 64
_MANY_SITES = 200
_MOST_COLUMNS = 6  # in memory at a time
_FEWEST_COLUMNS = 3  # if they are large; no rule compares more statistics of a table
_MOST_CELLS = 2**19  # 4 MB
_WITH_HISTOGRAMS = 2  # records, the persistence of the rules that read histograms


def no_histogram(_site: Site) -> Histogram | None:
    """Return None: the record has no histograms."""
    return None


class Observed(Protocol):
    """The statistics of one site in memory, such as a ``SiteStatistics``."""

    @property
    def scalars(self) -> Mapping[str, float]:
        """The statistics by name."""

    @property
    def dtype(self) -> Any:
        """The dtype of the tensor, or None."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the tensor, or None."""

    @property
    def histogram(self) -> Histogram:
        """The histogram of the values."""


@dataclass(frozen=True)
class SiteRecords:
    """One record of one recorder.

    Args:
        group: The kind of tensors: ``"activations"``, ``"gradients"`` or ``"parameters"``.
        recorder: The label of the recorder.
        stage: The stage, such as ``"train"``.
        step: The step.
        sites: The sites in the order of execution.
        dtypes: The dtype of each site, such as ``"float32"``; None if it is unknown.
        shapes: The shape of each site; None if it is unknown.
        values: The values of :data:`STATISTICS`, ``[sites, 13]`` float64; NaN if a site lacks a statistic.
        histogram: A function that returns the histogram of a site, called at most for the last two records.
        about: Facts that belong to no site, such as ``gradient_clip_val``; ``ranks``, and the sites that have
            ``diverged`` between them.
    """

    group: str
    recorder: str
    stage: str
    step: int
    sites: tuple[Site, ...]
    dtypes: tuple[str | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    values: Floats
    histogram: Callable[[Site], Histogram | None] = no_histogram
    about: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def members(self) -> frozenset[Site]:
        """The sites as a set."""
        return frozenset(self.sites)

    def without_losses(self) -> tuple[Self, Self | None]:
        """Return the record without the predictions and targets of losses, and the record of these, if there are any.

        Targets may be anything: the rules about layers do not apply to them.
        """
        sides = [place for place, site in enumerate(self.sites) if site.path.startswith(_SIDES)]
        if not sides or self.group != "activations":
            return self, None
        others = sorted(set(range(len(self.sites))).difference(sides))
        return self._part(others), self._part(sides)

    def split(self) -> tuple[Self, Self | None]:
        """Return the record without the inputs of modules, and the record of the inputs alone, if there are any.

        The rules compare outputs with each other.
        """
        inputs = [place for place, site in enumerate(self.sites) if site.path[:2] == "in" and is_input(site.path)]
        if not inputs or self.group == "parameters":
            return self, None
        others = sorted(set(range(len(self.sites))).difference(inputs))
        return self._part(others), self._part(inputs)

    def in_order(self, sites: Iterable[Site]) -> Self:
        """Return the record with the sites in this order; an empty order changes nothing."""
        order = tuple(sites)
        if order in ((), self.sites):
            return self
        places = {site: place for place, site in enumerate(self.sites)}
        return self._part([places[site] for site in order])

    def _part(self, places: list[int]) -> Self:
        return replace(
            self,
            sites=tuple(self.sites[place] for place in places),
            dtypes=tuple(self.dtypes[place] for place in places),
            shapes=tuple(self.shapes[place] for place in places),
            values=self.values[places],
        )

    @classmethod
    def of(
        cls,
        found: Mapping[Site, Observed],
        *,
        group: str,
        recorder: str,
        stage: str,
        step: int,
        about: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the record of statistics in memory, in the order of execution."""
        values = np.array([[seen.scalars.get(name, np.nan) for name in STATISTICS] for seen in found.values()])
        return cls(
            group=group,
            recorder=recorder,
            stage=stage,
            step=step,
            sites=tuple(found),
            dtypes=tuple(
                None if seen.dtype is None else str(seen.dtype).removeprefix("torch.") for seen in found.values()
            ),
            shapes=tuple(None if seen.shape is None else tuple(seen.shape) for seen in found.values()),
            values=values.reshape(len(found), len(STATISTICS)),
            histogram=lambda site: found[site].histogram,
            about=about or {},
        )


def compact(values: Floats) -> list[AnyFloats]:
    """Return the rows of some values, ``[statistics, sites]``, in less memory if there are many sites.

    About half of the statistics are the same for all sites, such as the number of NaN, and the smallest and the largest
    value of a float32 tensor fit into float32. Nothing is rounded.
    """
    return list(values) if values.shape[1] < _MANY_SITES else [_compact(each) for each in values]


def _compact(values: Floats) -> AnyFloats:
    if (values == values[0]).all() or np.isnan(values).all():
        return np.broadcast_to(values[0].copy(), values.shape)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values, equal_nan=True) else values.copy()


class _Cell(NamedTuple):
    """The part of a row that one recorder has written.

    Args:
        places: The places of its sites in the table, ``[sites]``.
        columns: The values of each statistic, ``[sites]``.
    """

    places: NDArray[np.intp]
    columns: list[AnyFloats]


class Table:
    """The records of one group and stage, as arrays over steps and sites.

    If several recorders have the group, their records of one step share a row. Beyond 512 rows, or beyond 16 MB and 128
    rows, older rows are dropped, evenly over the run: every second one, later three of four, and so on. The first row,
    the last 64, and those around the first value that is not finite stay.
    """

    def __init__(self) -> None:
        self.places: dict[Site, int] = {}
        """The index of each site, in the order of first appearance."""
        self.dtypes: list[str | None] = []
        self.shapes: list[tuple[int, ...] | None] = []
        self.recorders: list[str] = []
        """The label of the recorder of each site."""
        self.steps: list[int] = []
        """The steps of the rows, ascending."""
        self.about: Mapping[str, Any] = {}
        """The facts of the latest record that belong to no site."""
        self.diverged: dict[Site, int] = {}
        """The first step at which each replicated site differed between ranks, if it ever did."""
        self.ranks = 1
        """The number of ranks that the records have merged."""
        self._numbers: list[int] = []
        """The number of each row among all that were added."""
        self._every = 1
        self._rows: list[dict[str, _Cell]] = []
        self._known: dict[str, tuple[tuple[object, ...], NDArray[np.intp]]] = {}
        self._records: list[SiteRecords] = []
        self._columns: dict[str, Floats] = {}
        self._steps: NDArray[np.int64] | None = None
        self._kept: NDArray[np.intp] | None = None
        """The places in the cells of the sites of a part; None for all."""
        self._width = 0
        """The number of places in the cells."""

    def __len__(self) -> int:
        return len(self.steps)

    def order(self, row: int) -> list[Site]:
        """Return the sites of a row in the order of execution in its records."""
        kept = range(len(self.places)) if self._kept is None else self._kept.tolist()
        sites = dict(zip(kept, self.places, strict=True))
        return [sites[each] for cell in self._rows[row].values() for each in cell.places.tolist() if each in sites]

    @property
    def sites(self) -> list[Site]:
        """The sites in the order of first appearance, which is that of execution."""
        return list(self.places)

    def add(self, record: SiteRecords) -> None:
        """Add a record; it replaces an earlier one of the same step and recorder."""
        places = self._places_of(record)
        where = bisect_left(self.steps, record.step)
        if where == len(self.steps) or self.steps[where] != record.step:
            self.steps.insert(where, record.step)
            self._numbers.insert(where, self._numbers[-1] + 1 if self._numbers else 0)
            self._rows.insert(where, {})
        self._width = len(self.places)
        self._rows[where][record.recorder] = _Cell(places, compact(record.values.T))
        self.about = record.about or self.about
        self.ranks = max(self.ranks, int(record.about.get("ranks", 1)))
        for name, path in record.about.get("diverged", ()):
            self.diverged.setdefault(Site(name, path), record.step)
        same = [each for each in self._records if each.recorder == record.recorder and each.step != record.step]
        recent = sorted([*same, record], key=lambda each: each.step)[-_WITH_HISTOGRAMS:]
        self._records = [each for each in self._records if each.recorder != record.recorder] + recent
        self._columns.clear()
        self._steps = None
        most = max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_VALUES // (len(STATISTICS) * max(1, len(self.places)))))
        if len(self.steps) > most:
            self._thin(most * 3 // 4)

    def _places_of(self, record: SiteRecords) -> NDArray[np.intp]:
        """Return the places of the sites. Records in sequence nearly always share the tuples of their sites."""
        key = (record.sites, record.dtypes, record.shapes)
        known = self._known.get(record.recorder)
        if known is None or any(one is not other for one, other in zip(known[0], key, strict=True)):
            places = np.fromiter((self._place(record, index) for index in range(len(record.sites))), np.intp)
            self._known[record.recorder] = known = key, places
        return known[1]

    def _place(self, record: SiteRecords, index: int) -> int:
        site = record.sites[index]
        place = self.places.get(site)
        if place is None:
            place = self.places[site] = len(self.places)
            self.dtypes.append(None)
            self.shapes.append(None)
            self.recorders.append(record.recorder)
        self.dtypes[place], self.shapes[place] = record.dtypes[index], record.shapes[index]
        return place

    def _thin(self, most: int) -> None:
        """Drop rows until at most this many are left."""
        bad = self.first_bad_row()
        always = {0, *range(len(self.steps) - _KEPT_AT_THE_END, len(self.steps))}
        always |= set() if bad is None else {bad, max(bad - 1, 0)}
        while True:
            kept = [row for row, number in enumerate(self._numbers) if row in always or number % self._every == 0]
            if len(kept) <= most:
                break
            self._every *= 2
        self.steps = [self.steps[row] for row in kept]
        self._numbers = [self._numbers[row] for row in kept]
        self._rows = [self._rows[row] for row in kept]

    def first_bad_row(self) -> int | None:
        """Return the index of the first row with a NaN or an infinity; None if there is none."""
        for row, cells in enumerate(self._rows):
            if any(_is_bad(cell) for cell in cells.values()):
                return row
        return None

    def get(self, statistic: str) -> Floats:
        """Return one statistic, ``[steps, sites]`` float64; NaN where a site was not recorded or lacks it."""
        found = self._columns.pop(statistic, None)
        if found is None:
            place = STATISTICS.index(statistic)
            found = np.full((len(self.steps), self._width), np.nan)
            for row, cells in enumerate(self._rows):
                for cell in cells.values():
                    found[row, cell.places] = cell.columns[place]
            if self._kept is not None:
                found = found[:, self._kept]
            most = min(_MOST_COLUMNS, max(_FEWEST_COLUMNS, _MOST_CELLS // max(1, found.size)))
            while len(self._columns) >= most:
                del self._columns[next(iter(self._columns))]  # the one that was read least recently
        self._columns[statistic] = found
        return found

    def free(self) -> None:
        """Free the arrays of :meth:`get`, which the next rule that needs them makes again."""
        self._columns.clear()

    def column(self, site: Site, statistic: str) -> tuple[Floats, NDArray[np.int64]]:
        """Return the known values of one site, ``[n]``, and their steps."""
        values = self.get(statistic)[:, self.places[site]]
        known = ~np.isnan(values)
        return values[known], self._steps_array[known]

    def columns(self, site: Site, *statistics: str) -> tuple[list[Floats], NDArray[np.int64]]:
        """Return several statistics of one site in the records that have all of them, ``[n]`` each, and their steps."""
        values = [self.get(each)[:, self.places[site]] for each in statistics]
        known = ~np.isnan(values).any(axis=0)
        return [each[known] for each in values], self._steps_array[known]

    @property
    def _steps_array(self) -> NDArray[np.int64]:
        if self._steps is None or len(self._steps) != len(self.steps):
            self._steps = np.array(self.steps, dtype=np.int64)
        return self._steps

    def dtype(self, site: Site) -> str:
        """Return the dtype of a site, such as ``"float32"``; an empty string if it is unknown."""
        return self.dtypes[self.places[site]] or ""

    def histograms(self, site: Site) -> list[Histogram]:
        """Return the histograms of a site in the last two records of its recorder, where they exist."""
        label = self.recorders[self.places[site]]
        records = [each for each in self._records if each.recorder == label and site in each.members]
        found = [each.histogram(site) for each in records]
        return [each for each in found if each is not None]

    def before(self, step: int) -> Table:
        """Return the part of the table before a step."""
        part = Table()
        part.places, part.dtypes, part.shapes, part.recorders = self.places, self.dtypes, self.shapes, self.recorders
        part._kept, part._width = self._kept, self._width
        rows = bisect_left(self.steps, step)
        part.steps, part._numbers, part._rows = self.steps[:rows], self._numbers[:rows], self._rows[:rows]
        part.about, part.ranks = self.about, self.ranks
        part.diverged = {site: since for site, since in self.diverged.items() if since < step}
        part._records = [each for each in self._records if each.step < step]
        return part

    def without(self, names: Container[str]) -> Table:
        """Return the part of the table without the sites of these modules or functions."""
        kept = [(site, place) for site, place in self.places.items() if site.name not in names]
        if len(kept) == len(self.places):
            return self
        part = copy(self)
        part.places = {site: number for number, (site, _) in enumerate(kept)}
        for field_name in ("dtypes", "shapes", "recorders"):
            every = getattr(self, field_name)
            setattr(part, field_name, [every[place] for _, place in kept])
        places = np.array([place for _, place in kept], dtype=np.intp)
        part._kept = places if self._kept is None else self._kept[places]
        part._columns = {}
        return part


def _is_bad(cell: _Cell) -> bool:
    return any(bool((cell.columns[statistic] > 0).any()) for statistic in (_NAN, _INF))

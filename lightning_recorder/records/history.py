"""A history: the tables of a run over steps, in bounded memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Hashable, Mapping, Sequence
from copy import copy
from typing import Any, Generic, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self, TypeVar

from lightning_recorder.names import Site
from lightning_recorder.records.histogram import Histogram
from lightning_recorder.records.table import Floats, Schema, Table

__all__ = ["AnyFloats", "Cell", "Floats", "History", "compact"]

Key = TypeVar("Key", bound=Hashable, default=Site)
AnyFloats = NDArray[np.float32] | NDArray[np.float64]

_NOT_FINITE = ("nan_count", "inf_count")
_MOST_ROWS = 512
_FEWEST_ROWS = 128
_MOST_VALUES = 2_258_466  # 18 MB; with 14 statistics and more than 315 sites, fewer than 512 rows fit
_KEPT_AT_THE_END = 64
_MANY_SITES = 200
_MOST_COLUMNS = 6  # the most cached columns
_FEWEST_COLUMNS = 3  # the most cached columns if they are large: no rule compares more at once
_MOST_CELLS = 2**19  # the most values in cached columns, 4 MB
_WITH_HISTOGRAMS = 2  # the number of latest records with histograms, as many as the rules read


def compact(values: Floats) -> list[AnyFloats]:
    """Return the rows of an array, ``[statistics, sites]``, compressed if there are many sites.

    About half of the statistics are equal for all sites, such as the number of NaN. The minimum and the maximum of a
    float32 tensor fit into float32. Nothing is rounded.
    """
    return list(values) if values.shape[1] < _MANY_SITES else [_compact(each) for each in values]


def _compact(values: Floats) -> AnyFloats:
    if (values == values[0]).all() or np.isnan(values).all():
        return np.broadcast_to(values[0].copy(), values.shape)
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return narrow if np.array_equal(narrow, values, equal_nan=True) else values.copy()


class Cell(NamedTuple):
    """The part of a row that one recorder has written."""

    places: NDArray[np.intp]  # the index of each site in the history, ``[sites]``
    columns: list[AnyFloats]  # the values of each statistic, ``[sites]``


class History(Generic[Key]):
    """The records of one group and stage, as arrays over steps and sites.

    If several recorders have the group, their records of one step share a row. Beyond 512 rows, or beyond both 16 MB
    and 128 rows, older rows are dropped evenly over the run: every second row, later three of four, and so on. The
    first row, the last 64 rows, and the rows around the first non-finite value are kept.
    """

    def __init__(self, statistics: Sequence[str]) -> None:
        self.statistics = tuple(statistics)
        self.places: dict[Key, int] = {}
        """The index of each site, in the order of first appearance."""
        self.dtypes: list[str | None] = []
        self.shapes: list[tuple[int, ...] | None] = []
        self.recorders: list[str] = []
        """The label of the recorder of each site."""
        self.steps: list[int] = []
        """The steps of the rows, ascending."""
        self.about: Mapping[str, Any] = {}
        """The facts of the latest record that do not belong to a site."""
        self.diverged: dict[Site, int] = {}
        """The first step at which a replicated site differed between ranks, for each such site."""
        self.ranks = 1
        """The number of ranks whose statistics are merged in the records."""
        self._numbers: list[int] = []
        """The number of each row, counted over all rows that were ever added, including dropped rows."""
        self._every = 1
        self._rows: list[dict[str, Cell]] = []
        self._known: dict[str, tuple[Schema, NDArray[np.intp]]] = {}
        self._recent: dict[str, list[Table]] = {}  # the latest records by recorder
        self._columns: dict[str, Floats] = {}
        self._steps: NDArray[np.int64] | None = None
        self._kept: NDArray[np.intp] | None = None
        """For a partial history, the index in the cells of each of its sites; None if it has all sites."""
        self._width = 0
        """The number of sites in the cells, which a partial history shares with the whole history."""

    def __len__(self) -> int:
        return len(self.steps)

    def order(self, row: int) -> list[Key]:
        """Return the sites of a row in the order of execution in its records."""
        kept = range(len(self.places)) if self._kept is None else self._kept.tolist()
        sites = dict(zip(kept, self.places, strict=True))
        return [sites[each] for cell in self._rows[row].values() for each in cell.places.tolist() if each in sites]

    @property
    def sites(self) -> list[Key]:
        """The sites in the order of first appearance, which is the order of execution."""
        return list(self.places)

    def add(self, table: Table) -> None:
        """Add a record. It replaces an earlier record of the same step and recorder."""
        cell = Cell(self._places_of(table), compact(table.part(None, self.statistics).T))
        step, recorder = table.step, table.recorder
        self._put(step, recorder, cell)
        self.about = table.about or self.about
        self.ranks = max(self.ranks, int(table.about.get("ranks", 1)))
        for name, path in table.about.get("diverged", ()):
            self.diverged.setdefault(Site(name, path), step)
        others = {each.step: each for each in self._recent.get(recorder, ())}
        self._recent[recorder] = [each for _, each in sorted({**others, step: table}.items())][-_WITH_HISTOGRAMS:]
        most = max(_FEWEST_ROWS, min(_MOST_ROWS, _MOST_VALUES // (len(self.statistics) * max(1, len(self.places)))))
        if len(self.steps) > most:
            bad = self.first_bad_row()
            always = {0, *range(len(self.steps) - _KEPT_AT_THE_END, len(self.steps))}
            self._thin(most * 3 // 4, always | (set() if bad is None else {bad, max(bad - 1, 0)}))

    def _put(self, step: int, recorder: str, cell: Cell) -> None:
        where = bisect_left(self.steps, step)
        if where == len(self.steps) or self.steps[where] != step:
            self.steps.insert(where, step)
            self._numbers.insert(where, self._numbers[-1] + 1 if self._numbers else 0)
            self._rows.insert(where, {})
        self._rows[where][recorder] = cell
        self._columns.clear()
        self._steps = None

    def _places_of(self, table: Table) -> NDArray[np.intp]:
        """Return the index of each site; cached, since consecutive records nearly always share their schema."""
        schema = table.schema
        known = self._known.get(table.recorder)
        if known is None or known[0] is not schema:
            places = np.fromiter((self._place(table, row) for row in range(len(table))), np.intp)
            self._known[table.recorder] = known = schema, places
        return known[1]

    def _place(self, table: Table, row: int) -> int:
        site = cast("Key", table.sites[row])
        place = self.places.get(site)
        if place is None:
            place = self.places[site] = len(self.places)
            self.dtypes.append(None)
            self.shapes.append(None)
            self.recorders.append(table.recorder)
        self.dtypes[place], self.shapes[place] = table.schema.dtypes[row], table.schema.shapes[row]
        return place

    def _thin(self, most: int, always: set[int]) -> None:
        """Drop rows outside of ``always`` until at most ``most`` are left: every second, three of four, and so on."""
        while True:
            kept = [row for row, number in enumerate(self._numbers) if row in always or number % self._every == 0]
            if len(kept) <= most:
                break
            self._every *= 2
        if len(kept) < len(self.steps):
            self._keep(kept)

    def _keep(self, kept: Sequence[int]) -> None:
        """Drop all rows except ``kept``."""
        self.steps = [self.steps[row] for row in kept]
        self._numbers = [self._numbers[row] for row in kept]
        self._rows = [self._rows[row] for row in kept]

    def first_bad_row(self) -> int | None:
        """Return the index of the first row with a NaN or an infinity; None if there is none."""
        bad = [self.statistics.index(name) for name in _NOT_FINITE]
        for row, cells in enumerate(self._rows):
            if any(bool((cell.columns[place] > 0).any()) for cell in cells.values() for place in bad):
                return row
        return None

    def get(self, statistic: str) -> Floats:
        """Return one statistic, ``[steps, sites]`` float64; NaN where a site has no record or lacks the statistic."""
        found = self._columns.pop(statistic, None)
        if found is None:
            found = self._together(statistic, range(len(self.steps)))
            most = min(_MOST_COLUMNS, max(_FEWEST_COLUMNS, _MOST_CELLS // max(1, found.size)))
            while len(self._columns) >= most:
                del self._columns[next(iter(self._columns))]  # the least recently read column
        self._columns[statistic] = found
        return found

    def _together(self, statistic: str, rows: Sequence[int]) -> Floats:
        """Return one statistic in some rows, ``[rows, sites]``."""
        place = self.statistics.index(statistic)
        found = np.full((len(rows), len(self.places) if self._kept is None else self._width), np.nan)
        for at, row in enumerate(rows):
            for cell in self._rows[row].values():
                found[at, cell.places] = cell.columns[place]
        return found if self._kept is None else found[:, self._kept]

    def free(self) -> None:
        """Free the cached arrays of :meth:`get`."""
        self._columns.clear()

    def column(self, site: Key, statistic: str) -> tuple[Floats, NDArray[np.int64]]:
        """Return the known values of one site, ``[n]``, and their steps."""
        values = self.get(statistic)[:, self.places[site]]
        known = ~np.isnan(values)
        return values[known], self._steps_array[known]

    def columns(self, site: Key, *statistics: str) -> tuple[list[Floats], NDArray[np.int64]]:
        """Return several statistics of one site, ``[n]`` each, and their steps. Records that lack one are left out."""
        values = [self.get(each)[:, self.places[site]] for each in statistics]
        known = ~np.isnan(values).any(axis=0)
        return [each[known] for each in values], self._steps_array[known]

    @property
    def _steps_array(self) -> NDArray[np.int64]:
        if self._steps is None or len(self._steps) != len(self.steps):
            self._steps = np.array(self.steps, dtype=np.int64)
        return self._steps

    def dtype(self, site: Key) -> str:
        """Return the dtype of a site, such as ``"float32"``; an empty string if it is unknown."""
        return self.dtypes[self.places[site]] or ""

    def histograms(self, site: Key) -> list[Histogram]:
        """Return the histograms of a site from the last two records of its recorder, as far as they exist."""
        label = self.recorders[self.places[site]]
        records = [each for each in self._recent.get(label, ()) if site in each]
        found = [each.histogram(cast("Site", site)) for each in records]
        return [each for each in found if each is not None]

    def before(self, step: int) -> Self:
        """Return a partial history with the records before a step."""
        part = type(self)(self.statistics)
        part.places, part.dtypes, part.shapes, part.recorders = self.places, self.dtypes, self.shapes, self.recorders
        part._kept, part._width = self._kept, self._width
        rows = bisect_left(self.steps, step)
        part.steps, part._numbers, part._rows = self.steps[:rows], self._numbers[:rows], self._rows[:rows]
        part.about, part.ranks = self.about, self.ranks
        part.diverged = {site: since for site, since in self.diverged.items() if since < step}
        part._recent = {label: [each for each in found if each.step < step] for label, found in self._recent.items()}
        return part

    def without(self, names: Container[str]) -> Self:
        """Return a partial history without the sites of some modules or functions."""
        kept = [(site, place) for site, place in self.places.items() if cast("Site", site).name not in names]
        if len(kept) == len(self.places):
            return self
        part = copy(self)
        part.places = {site: number for number, (site, _) in enumerate(kept)}
        for name in ("dtypes", "shapes", "recorders"):
            every = getattr(self, name)
            setattr(part, name, [every[place] for _, place in kept])
        places = np.array([place for _, place in kept], dtype=np.intp)
        part._kept, part._width = (
            (places, len(self.places)) if self._kept is None else (self._kept[places], self._width)
        )
        part._columns = {}
        return part

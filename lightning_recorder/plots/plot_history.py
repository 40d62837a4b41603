"""The data of the plots: a few statistics of evenly spaced records, and histograms over time."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_recorder.bins import BINS
from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.insight.unusual import choose, compared, compared_steps, unusualness
from lightning_recorder.plots.axes import Floats, furthest, to_floats
from lightning_recorder.records.counts import SparseCounts
from lightning_recorder.records.history import Cell, History, compact
from lightning_recorder.reductions import SCALAR_STATISTICS

__all__ = ["SHOWN", "Found", "PlotHistory"]

AnySite = TypeVar("AnySite", bound=Hashable)

SHOWN = tuple(name for name in SCALAR_STATISTICS if name != "count")
"""The statistics that are kept by default."""

Found = tuple[Mapping[str, float], "Tensor | NDArray[np.int64] | None"]
"""The scalars of a site, and its counts of the fixed bins, ``[2048]``, or None."""


_OVERHEAD = 320  # bytes of a tuple and its two arrays without their data; small histograms have less data than this


class _Counts(NamedTuple):
    """The non-empty bins of a histogram, in compact form."""

    where: NDArray[np.uint16]
    counts: NDArray[np.unsignedinteger]

    @property
    def nbytes(self) -> int:
        return _OVERHEAD + self.where.nbytes + self.counts.nbytes

    def dense(self) -> NDArray[np.int64]:
        """Return the counts of all bins, ``[2048]``."""
        found = np.zeros(BINS, dtype=np.int64)
        found[self.where] = self.counts
        return found


class PlotHistory(History[Hashable]):
    """Keeps the statistics of sites in memory, at evenly spaced steps of a run.

    Every record is kept until there are ``max_steps`` records. Then every second record is dropped. From then on only
    every second new record is kept, later every fourth, and so on. The first and the latest record are always kept.

    Args:
        max_steps: The maximum number of records, at least 2.
        statistics: The scalars to keep. Others are ignored.
        conspicuous: The statistics for which :meth:`furthest` also covers the dropped records.
        max_histograms: The number of sites with plots of their counts over time: the sites that stand out, and an even
            selection of the others.
        max_count_bytes: The memory for counts over time. Counts are kept for all sites, because any site may become
            unusual. When the memory is used up, sites without such a plot lose the counts of every second record.

    Raises:
        ArgumentError: If a number is too small.

    Note:
        :attr:`nbytes` is the memory in use. A site takes ``8 * statistics + 1`` bytes for each kept record, and the
        memory of its first and latest counts. In a record of 200 or more sites, a statistic of equal values takes less.
        For each kept record after which records were dropped, a site takes ``8 * conspicuous + 1`` bytes more. The
        counts of a site in one record take 320 bytes, and 3 to 10 bytes per non-empty bin: typically 1 KB, at most
        20 KB. Beyond ``max_count_bytes``, only ``max_histograms`` sites keep the counts of ``max_steps`` records. A
        history can be pickled. It is not thread-safe.

    Example:
        >>> history = PlotHistory(max_steps=4, statistics=("rms",))
        >>> for step in range(8):
        ...     history.add_sites(step, {"head": ({"rms": step / 2}, None)})
        >>> history.steps, history.table("rms").tolist()
        ([0, 4, 7], [[0.0, 2.0, 3.5]])
    """

    def __init__(
        self,
        max_steps: int = 256,
        *,
        statistics: Sequence[str] = SHOWN,
        conspicuous: Sequence[str] = (),
        max_histograms: int = 12,
        max_count_bytes: int = 2**22,
    ) -> None:
        check_integer("max_steps", max_steps, 2)
        check_integer("max_histograms", max_histograms, 0)
        check_integer("max_count_bytes", max_count_bytes, 0)
        super().__init__(statistics)
        self.max_steps, self.max_histograms, self.max_count_bytes = max_steps, max_histograms, max_count_bytes
        self._conspicuous = [self.statistics.index(name) for name in conspicuous]
        self._last: tuple[tuple[Hashable, ...], NDArray[np.intp]] = (), np.empty(0, np.intp)
        # By step of a kept record: the values furthest from 0 in this record and the records dropped after it,
        # [conspicuous, sites], and a mask.
        self._furthest: dict[int, tuple[Floats, NDArray[np.bool_]]] = {}
        self._latest: dict[Hashable, _Counts] = {}
        self._counts: dict[int, dict[Hashable, _Counts]] = {}  # by step: counts of all sites or plotted sites
        self._count_bytes, self._thin_beyond = 0, max_count_bytes

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        over_time = {id(each) for found in self._counts.values() for each in found.values()}
        latest = sum(each.nbytes for each in self._latest.values() if id(each) not in over_time)
        cells = [cell for row in self._rows for cell in row.values()]
        values = sum(8 if each.strides == (0,) else each.nbytes for cell in cells for each in cell.columns)
        places = sum(each.nbytes for each in {id(cell.places): cell.places for cell in cells}.values())
        further = sum(each.nbytes + there.nbytes for each, there in self._furthest.values())
        return values + further + places + self._count_bytes + latest

    def add_sites(self, step: int, found: Mapping[AnySite, Found]) -> None:
        """Add a record.

        Args:
            step: The step. The record is ignored unless the step is greater than the previous one.
            found: The sites of the record in order, each with its scalars and its counts.
        """
        values = [[scalars.get(name, np.nan) for name in self.statistics] for scalars, _ in found.values()]
        taken = {site: _counts(bins) for site, (_, bins) in found.items() if bins is not None}
        self._add(step, tuple(found), np.array(values).reshape(len(found), -1), taken)

    def add_values(self, step: int, sites: Sequence[AnySite], values: Floats, counts: SparseCounts | None) -> None:
        """Add a record given as arrays, which takes much less time than :meth:`add_sites`.

        Args:
            step: The step, as for :meth:`add_sites`.
            sites: The sites of the record in order.
            values: The values of :attr:`statistics`, ``[sites, statistics]``; NaN if a site has no value.
            counts: The histograms of the sites, if there are any.
        """
        entries = [] if counts is None else [counts.entries(row) for row in range(len(sites))]
        self._add(step, sites, values, {site: _compact(*each) for site, each in zip(sites, entries, strict=False)})

    def _add(self, step: int, sites: Sequence[AnySite], values: Floats, taken: Mapping[AnySite, _Counts]) -> None:
        if self.steps and step <= self.steps[-1]:
            return
        self._put(step, "", Cell(self._places_in(tuple(sites)), compact(values.T)))
        self._take_counts(step, taken)
        self._thin(self.max_steps, {len(self.steps) - 1})
        if self._count_bytes > self._thin_beyond:
            self._thin_counts()

    def _places_in(self, sites: tuple[Hashable, ...]) -> NDArray[np.intp]:
        """Return the indices of the sites. If the sites equal those of the previous record, return the same array."""
        if sites != self._last[0]:
            places = [self.places.setdefault(site, len(self.places)) for site in sites]
            self._last = sites, np.array(places, dtype=np.intp)
        return self._last[1]

    @override
    def _keep(self, kept: Sequence[int]) -> None:
        dropped = sorted(set(range(len(self.steps))).difference(kept))
        for row in dropped:
            self._merge(max(each for each in kept if each < row), row)
        self._drop_counts([self.steps[row] for row in dropped])
        super()._keep(kept)

    def _merge(self, kept: int, dropped: int) -> None:
        """Merge the conspicuous values of a record that is dropped into the record before it, which is kept.

        The value further from 0 is kept; see :func:`furthest`.
        """
        if not self._conspicuous:
            return
        both = [self._take_conspicuous(each) for each in (kept, dropped)]
        sites = max(len(recorded) for _, recorded in both)
        values = [np.pad(each, ((0, 0), (0, sites - each.shape[1])), constant_values=np.nan) for each, _ in both]
        recorded = np.stack([np.pad(each, (0, sites - len(each))) for _, each in both], axis=-1)
        cells = furthest(np.stack(values, axis=-1), np.broadcast_to(recorded, (len(values[0]), *recorded.shape)))
        self._furthest[self.steps[kept]] = cells[0], np.asarray(recorded.any(axis=-1))

    def _take_conspicuous(self, row: int) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the furthest values of a record and the records merged into it, ``[conspicuous, sites]``, and a mask.

        The values that were merged before are removed from the history.
        """
        if (known := self._furthest.pop(self.steps[row], None)) is not None:
            return known
        (cell,) = self._rows[row].values()
        values = np.full((len(self._conspicuous), len(self.places)), np.nan)
        values[:, cell.places] = [cell.columns[place] for place in self._conspicuous]
        return values, self._recorded([row])[0]

    def _take_counts(self, step: int, taken: Mapping[Any, _Counts]) -> None:
        self._latest.update(taken)
        if self.max_histograms:
            self._counts[step] = dict(taken)
            self._count_bytes += sum(each.nbytes for each in taken.values())

    def _thin_counts(self) -> None:
        """Drop the counts of sites without a plot from every second record until the memory limit is met.

        The first and the last record stay complete.
        """
        plotted = set(self.histogram_sites)
        whole = [step for step, counts in self._counts.items() if not plotted.issuperset(counts)]
        while self._count_bytes > self.max_count_bytes and len(whole) > 2:
            for step in whole[1:-1:2]:
                kept = {site: counts for site, counts in self._counts[step].items() if site in plotted}
                self._drop_counts([step])
                self._counts[step] = kept
                self._count_bytes += sum(each.nbytes for each in kept.values())
            whole = [*whole[:-1:2], whole[-1]]
        # If the counts cannot be thinned that far, do not try again at each record, which would be slow.
        self._thin_beyond = max(self.max_count_bytes, self._count_bytes * 5 // 4)

    def _drop_counts(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._count_bytes -= sum(each.nbytes for each in self._counts.pop(step, {}).values())

    def table(self, statistic: str) -> Floats:
        """Return a statistic, ``[sites, steps]``; NaN if a site was not recorded.

        Raises:
            ArgumentError: If the statistic is not kept. The message lists the kept statistics.
        """
        if statistic not in self.statistics:
            raise ArgumentError(f"the history holds {', '.join(self.statistics)}; got {statistic!r}")
        return self._together(statistic, range(len(self.steps))).T

    def furthest(self, statistic: str) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the most conspicuous value of each kept record and the records dropped after it, ``[sites, steps]``.

        The most conspicuous value is an infinity, else NaN, else the value furthest from 0. For statistics that are not
        ``conspicuous``, the value of the kept record is returned.

        Returns:
            The values, and a mask that is True if a site was recorded in any of these records, ``[sites, steps]``.

        Raises:
            ArgumentError: As for :meth:`table`.
        """
        values, recorded = self.table(statistic), self.recorded
        place = self.statistics.index(statistic)
        if place in self._conspicuous:
            row = self._conspicuous.index(place)
            for column, step in enumerate(self.steps):
                if step in self._furthest:
                    cells, there = self._furthest[step]
                    values[: len(there), column], recorded[: len(there), column] = cells[row], there
        return values, recorded

    @property
    def recorded(self) -> NDArray[np.bool_]:
        """A mask that is True if a site was recorded at a step, ``[sites, steps]``."""
        return self._recorded(range(len(self.steps))).T

    def _recorded(self, rows: Sequence[int]) -> NDArray[np.bool_]:
        """Return a mask that is True if a site was recorded in a row, ``[rows, sites]``."""
        found = np.zeros((len(rows), len(self.places)), dtype=bool)
        for at, row in enumerate(rows):
            for cell in self._rows[row].values():
                found[at, cell.places] = True
        return found

    @property
    def has_values(self) -> NDArray[np.bool_]:
        """A mask that is True if a site has a finite value of any statistic, ``[sites]``."""
        found = np.zeros(len(self.places), dtype=bool)
        for cell in (cell for cells in self._rows for cell in cells.values()):
            found[cell.places] |= np.isfinite(cell.columns).any(axis=0)
        return found

    @property
    def degrees(self) -> Floats:
        """How unusual each site is in the kept statistics, ``[sites]``. A site stands out from 1 on."""
        rows = compared_steps(len(self.steps))
        tables = {name: self._together(name, rows).T for name in compared(self.statistics)}
        return unusualness(self.sites, tables)

    @property
    def histogram_sites(self) -> list[Hashable]:
        """The sites with plots of their counts over time: the unusual sites, and an even selection of the others."""
        return self.histogram_sites_of(self.degrees)

    def histogram_sites_of(self, degrees: Floats) -> list[Hashable]:
        """Return :attr:`histogram_sites` for degrees that are already computed, ``[sites]``."""
        sites = [site for site in self.places if site in self._latest] if self.max_histograms else []
        rows = [self.places[site] for site in sites]
        return [sites[place] for place in choose(degrees[rows], self.max_histograms)] if sites else []

    def counts(self, site: Hashable) -> NDArray[np.int64]:
        """Return the counts of a site at :meth:`count_steps`, ``[count_steps, 2048]``; zeros if it was not recorded.

        Raises:
            ArgumentError: If no counts over time are kept for the site.
        """
        over_time = [self._counts.get(step, {}).get(site) for step in self.count_steps(site).tolist()]
        counts = np.zeros((len(over_time), BINS), dtype=np.int64)
        for row, found in enumerate(over_time):
            if found is not None:
                counts[row, found.where] = found.counts
        return counts

    def count_steps(self, site: Hashable) -> NDArray[np.int64]:
        """Return the steps of :meth:`counts`, ``[count_steps]``: all :attr:`steps` except those dropped to save memory.

        Raises:
            ArgumentError: If no counts over time are kept for the site.
        """
        if not any(site in found for found in self._counts.values()):
            raise ArgumentError(f"the history holds no counts of {site!r} over time; see histogram_sites")
        recorded = self.recorded[self.places[site]].tolist()
        steps = [
            step
            for step, is_recorded in zip(self.steps, recorded, strict=True)
            if site in self._counts.get(step, ()) or not is_recorded
        ]
        return np.array(steps, dtype=np.int64)

    def latest_counts(self) -> Iterator[tuple[Hashable, NDArray[np.int64]]]:
        """Yield each site that has counts, with its latest counts, ``[2048]``."""
        return ((site, self._latest[site].dense()) for site in self.places if site in self._latest)


def _counts(bins: Tensor | NDArray[np.int64]) -> _Counts:
    counts = to_floats("bins", bins, f"[{BINS}]", 1)
    if counts.shape != (BINS,):
        raise ArgumentError(f"bins must have the shape [{BINS}], got {list(counts.shape)}")
    where = np.flatnonzero(counts)
    return _compact(where, counts[where].astype(np.uint64))


def _compact(where: NDArray[np.int64], inside: NDArray[Any]) -> _Counts:
    return _Counts(where.astype(np.uint16), inside.astype(np.min_scalar_type(int(inside.max(initial=0)))))

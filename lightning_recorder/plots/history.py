"""Recorded statistics over time, in bounded memory, and the plots that summarize them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.bins import BINS
from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.names import make_tag
from lightning_recorder.plots.axes import Floats, to_floats
from lightning_recorder.plots.canvas import Image
from lightning_recorder.plots.frame import evenly
from lightning_recorder.plots.gradient_flow import gradient_flow
from lightning_recorder.plots.heat_map import heat_map
from lightning_recorder.plots.histograms import histogram_of, histogram_over_time, ridge
from lightning_recorder.reductions import SCALAR_STATISTICS, SparseCounts
from lightning_recorder.reductions.histogram import Histogram

__all__ = ["SHOWN", "Found", "History", "overview"]

AnySite = TypeVar("AnySite", bound=Hashable)

_FEW = 16

SHOWN = tuple(name for name in SCALAR_STATISTICS if name != "count")
"""The statistics that are kept by default."""

Found = tuple[Mapping[str, float], "Tensor | NDArray[np.int64] | None"]
"""The scalars of a site, and its counts of the fixed bins, ``[2048]``, or None."""


class _Counts(NamedTuple):
    """The non-empty bins of a histogram, in compact form."""

    where: NDArray[np.uint16]
    counts: NDArray[np.unsignedinteger]

    @property
    def nbytes(self) -> int:
        return self.where.nbytes + self.counts.nbytes

    def dense(self) -> NDArray[np.int64]:
        """Return the counts of all bins, ``[2048]``."""
        found = np.zeros(BINS, dtype=np.int64)
        found[self.where] = self.counts
        return found


class History:
    """Keeps the statistics of sites at evenly spaced steps of a run, without reading files.

    Every record is kept until there are ``max_steps``. Then every second record is dropped, and from then on only every
    second new record is kept, later every fourth, and so on. The first and the latest record are always kept.

    Args:
        max_steps: The maximum number of records, at least 2.
        statistics: The scalars to keep; others are ignored.
        max_histograms: The number of sites with counts over time, evenly spaced among the sites of the first record
            with histograms. The latest counts are kept for every site.

    Raises:
        ArgumentError: If a number is too small.

    Note:
        :attr:`nbytes` is the memory in use. A site takes ``max_steps * (8 * statistics + 1)`` bytes, up to twice as
        much because the arrays grow by doubling, and its latest counts. Each of ``max_histograms`` sites also takes the
        counts of ``max_steps`` records. Counts take 3 to 10 bytes per non-empty bin: typically 1 KB, at most 20 KB. A
        history can be pickled. It is not thread-safe.

    Example:
        >>> history = History(max_steps=4, statistics=("rms",))
        >>> for step in range(8):
        ...     history.add(step, {"head": ({"rms": step / 2}, None)})
        >>> history.steps.tolist(), history.table("rms").tolist()
        ([0, 4, 7], [[0.0, 2.0, 3.5]])
    """

    def __init__(self, max_steps: int = 256, *, statistics: Sequence[str] = SHOWN, max_histograms: int = 12) -> None:
        check_integer("max_steps", max_steps, 2)
        check_integer("max_histograms", max_histograms, 0)
        self.max_steps, self.max_histograms = max_steps, max_histograms
        self.statistics = tuple(statistics)
        self._steps: list[int] = []
        self._every = 1
        self._added = 0
        self._latest_stays = True
        self._rows: dict[Hashable, int] = {}
        self._values: Floats = np.full((len(self.statistics), _FEW, min(_FEW, max_steps)), np.nan)
        self._recorded = np.zeros((_FEW, min(_FEW, max_steps)), dtype=bool)
        self._latest_counts: dict[Hashable, _Counts] = {}
        self._latest_table: tuple[Mapping[Any, int], SparseCounts] = ({}, SparseCounts(np.empty((0, BINS))))
        self._counts: dict[Hashable, list[_Counts | None]] = {}

    def __getstate__(self) -> dict[str, Any]:
        _ = self._latest  # takes the counts out of the table, which may contain many other histograms
        return {**self.__dict__, "_latest_table": ({}, SparseCounts(np.empty((0, BINS))))}

    @property
    def sites(self) -> list[Hashable]:
        """The sites in the order of first appearance."""
        return list(self._rows)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps of the kept records in ascending order, ``[steps]``."""
        return np.array(self._steps, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        counts = [*self._latest.values(), *(each for column in self._counts.values() for each in column if each)]
        return self._values.nbytes + self._recorded.nbytes + sum(each.nbytes for each in counts)

    def add(self, step: int, found: Mapping[AnySite, Found]) -> None:
        """Add a record.

        Args:
            step: The step, greater than the previous one; otherwise the record is ignored.
            found: The sites of the record in order, each with its scalars and its counts.
        """
        values = [[scalars.get(name, np.nan) for name in self.statistics] for scalars, _ in found.values()]
        taken: dict[Hashable, _Counts] = {site: _counts(bins) for site, (_, bins) in found.items() if bins is not None}
        self._add(step, tuple(found), np.array(values).reshape(len(found), -1), list(taken), taken.__getitem__)
        self._latest.update(taken)

    def add_table(self, step: int, sites: Sequence[AnySite], values: Floats, counts: SparseCounts) -> None:
        """Add a record of arrays, which takes much less time.

        Args:
            step: The step, as for :meth:`add`.
            sites: The sites of the record in order.
            values: The values of :attr:`statistics`, ``[sites, statistics]``; NaN if a site lacks one.
            counts: The histograms of the sites.
        """
        rows = {site: row for row, site in enumerate(sites)}
        self._add(step, sites, values, sites, lambda site: _compact(*counts.entries(rows[site])))
        self._latest_table = (rows, counts)

    def _add(
        self,
        step: int,
        sites: Sequence[AnySite],
        values: Floats,
        with_counts: Sequence[AnySite],
        counts: Callable[[AnySite], _Counts],
    ) -> None:
        if self._steps and step <= self._steps[-1]:
            return
        column = self._next_column()
        self._steps[column:] = [step]
        self._grow(sites, column)
        self._values[:, :, column], self._recorded[:, column] = np.nan, False
        rows = [self._rows[site] for site in sites]
        self._recorded[rows, column] = True
        self._values[:, rows, column] = values.T
        if not self._counts and with_counts:
            self._counts = {with_counts[place]: [] for place in evenly(len(with_counts), self.max_histograms)}
        known = set(with_counts) if self._counts else set()
        for site, kept in self._counts.items():
            kept[column:] = [None] * (column - len(kept)) + [counts(site) if site in known else None]
        self._latest_stays = self._added % self._every == 0
        self._added += 1

    @property
    def _latest(self) -> dict[Hashable, _Counts]:
        """The latest counts of each site. Those of the latest table are taken out of it first."""
        rows, counts = self._latest_table
        if rows:
            self._latest_counts.update({site: _compact(*counts.entries(row)) for site, row in rows.items()})
            self._latest_table = ({}, counts)
        return self._latest_counts

    def _next_column(self) -> int:
        """Return the column for the next record; drop every second record if there is no space."""
        if not self._latest_stays:
            return len(self._steps) - 1
        if len(self._steps) < self.max_steps:
            return len(self._steps)
        self._every *= 2
        self._steps = self._steps[::2]
        held = len(self._steps)
        self._values[:, :, :held] = self._values[:, :, ::2].copy()
        self._recorded[:, :held] = self._recorded[:, ::2].copy()
        self._counts = {site: column[::2] for site, column in self._counts.items()}
        return held

    def _grow(self, sites: Sequence[AnySite], column: int) -> None:
        for site in sites:
            self._rows.setdefault(site, len(self._rows))
        rows, columns = self._recorded.shape
        more_rows = max(len(self._rows) - rows, rows if len(self._rows) > rows else 0)
        more_columns = min(columns, self.max_steps - columns) if column >= columns else 0
        if more_rows or more_columns:
            more = ((0, more_rows), (0, more_columns))
            self._values = np.pad(self._values, ((0, 0), *more), constant_values=np.nan)
            self._recorded = np.pad(self._recorded, more)

    def table(self, statistic: str) -> Floats:
        """Return a statistic, ``[sites, steps]``; NaN if a site was not recorded.

        Raises:
            ArgumentError: If the statistic is not kept; the message lists those that are.
        """
        if statistic not in self.statistics:
            raise ArgumentError(f"the history holds {', '.join(self.statistics)}; got {statistic!r}")
        found = self._values[self.statistics.index(statistic), : len(self._rows), : len(self._steps)]
        return found.copy()

    @property
    def recorded(self) -> NDArray[np.bool_]:
        """A mask that is True if a site was recorded at a step, ``[sites, steps]``."""
        return self._recorded[: len(self._rows), : len(self._steps)].copy()

    @property
    def histogram_sites(self) -> list[Hashable]:
        """The sites with counts over time."""
        return list(self._counts)

    def counts(self, site: Hashable) -> NDArray[np.int64]:
        """Return the counts of a site over time, ``[steps, 2048]``; zeros if it was not recorded.

        Raises:
            ArgumentError: If no counts over time are kept for the site.
        """
        if site not in self._counts:
            raise ArgumentError(f"the history holds no counts of {site!r} over time; see histogram_sites")
        rows = [_NONE if each is None else each.dense() for each in self._counts[site]]
        return np.stack(rows)

    def latest_counts(self) -> dict[Hashable, NDArray[np.int64]]:
        """Return the latest counts of each site that has any, ``[2048]``."""
        return {site: self._latest[site].dense() for site in self._rows if site in self._latest}


_NONE: NDArray[np.int64] = np.zeros(BINS, dtype=np.int64)


def _counts(bins: Tensor | NDArray[np.int64]) -> _Counts:
    counts = to_floats("bins", bins, f"[{BINS}]", 1)
    if counts.shape != (BINS,):
        raise ArgumentError(f"bins must have the shape [{BINS}], got {list(counts.shape)}")
    where = np.flatnonzero(counts)
    return _compact(where, counts[where].astype(np.uint64))


def _compact(where: NDArray[np.int64], inside: NDArray[Any]) -> _Counts:
    return _Counts(where.astype(np.uint16), inside.astype(np.min_scalar_type(int(inside.max(initial=0)))))


def overview(
    history: History,
    *,
    group: str,
    statistics: Sequence[str] = ("rms", "mean", "zero_fraction"),
    max_images: int = 8,
) -> dict[str, Image]:
    """Draw the contents of a history; return images by tag.

    The tags are ``<group>_plots/heat_map/<statistic>`` for each statistic, ``<group>_plots/ridge`` for the latest
    histograms, ``<group>_plots/over_time/<site>`` for some evenly spaced sites and, for gradients,
    ``<group>_plots/flow`` for the latest step. Gradients of parameters have no plots over time, because their names
    would collide with those of the parameters. Statistics and histograms that were never recorded have no plots.

    Args:
        history: The recorded statistics.
        group: The group, for example ``activations``. A group that begins with ``gradients`` has a flow plot, and so
            has a group that ends with ``_grad``, the suffix for gradients of parameters.
        statistics: The statistics to draw as heat maps.
        max_images: The maximum number of plots of single sites over time.

    Raises:
        ArgumentError: If the history does not keep a statistic.
    """
    check_integer("max_images", max_images, 0)
    steps, sites = history.steps, history.sites
    found: dict[str, Image] = {}
    if not len(steps) or not sites:
        return found
    of_parameters = group.endswith("_grad")
    # The suffix is redundant, because the group already says that these are gradients.
    names = [_name(site).removesuffix(".grad") if of_parameters else _name(site) for site in sites]
    for statistic in statistics:
        values = history.table(statistic)
        if not np.isnan(values).all():
            found[make_tag(f"{group}_plots", "heat_map", statistic)] = heat_map(
                steps, names, values, statistic=statistic, title=f"{group}: {statistic}", recorded=history.recorded
            )
    latest = {names[sites.index(site)]: histogram for site, histogram in _latest_histograms(history).items()}
    if latest:
        found[make_tag(f"{group}_plots", "ridge", "")] = ridge(
            list(latest), list(latest.values()), title=f"{group}: histograms", step=int(steps[-1])
        )
    if (group.startswith("gradients") or of_parameters) and {"rms", "min", "max"} <= set(history.statistics):
        found[make_tag(f"{group}_plots", "flow", "")] = _flow(history, names, group)
    places = [] if of_parameters else history.histogram_sites
    for place in evenly(len(places), max_images):
        name = _name(places[place])
        tag = _free(make_tag(f"{group}_plots", "over_time", name), found)
        found[tag] = histogram_over_time(steps, _over_time(history, places[place]), title=f"{group}: {name}")
    return found


def _name(site: Hashable) -> str:
    """Return the display name of a site: its module, with the path unless it is the whole output."""
    if isinstance(site, tuple) and len(site) == 2:
        name, path = site
        return f"{name or '(root)'}" + (f" {path}" if path != "out" else "")
    return str(site) or "(root)"


def _free(tag: str, taken: dict[str, Image]) -> str:
    """Return the tag, with a number appended if another site has the same tag after slashes are replaced."""
    number, free = 1, tag
    while free in taken:
        number += 1
        free = f"{tag} ({number})"
    return free


def _ends(history: History) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest values, ``[sites, steps]`` each; NaN if the history does not keep them."""
    unknown = np.full(history.recorded.shape, math.nan)
    low, high = (history.table(name) if name in history.statistics else unknown for name in ("min", "max"))
    return low, high


def _latest_histograms(history: History) -> dict[Hashable, Histogram]:
    """Return the latest histogram of each site; its range is known if the site was recorded at the latest step."""
    rows = {site: row for row, site in enumerate(history.sites)}
    low, high = _ends(history)
    return {
        site: histogram_of(counts, float(low[rows[site], -1]), float(high[rows[site], -1]))
        for site, counts in history.latest_counts().items()
    }


def _over_time(history: History, site: Hashable) -> list[Histogram]:
    row = history.sites.index(site)
    low, high = (ends[row] for ends in _ends(history))
    return [histogram_of(*each) for each in zip(history.counts(site), low, high, strict=True)]


def _flow(history: History, names: list[str], group: str) -> Image:
    """Draw the gradient flow of the sites recorded at the latest step, in order."""
    rows = np.flatnonzero(history.recorded[:, -1])
    low, high = (ends[rows, -1] for ends in _ends(history))
    return gradient_flow(
        [names[row] for row in rows],
        history.table("rms")[rows, -1],
        np.maximum(np.abs(low), np.abs(high)),
        title=f"{group}: flow",
        step=int(history.steps[-1]),
        statistic="rms",
        largest="largest magnitude",
    )

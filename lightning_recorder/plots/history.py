"""What was recorded over time, in bounded memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.errors import ArgumentError, check_integer
from lightning_recorder.plots.arrays import Floats, to_floats
from lightning_recorder.plots.frame import evenly

__all__ = ["SHOWN", "Found", "History"]

AnySite = TypeVar("AnySite", bound=Hashable)

_BINS = 2048
_FEW_ROWS = 16

SHOWN = ("mean", "std", "rms", "min", "max", "zero_fraction", "nan_count", "inf_count")
"""The statistics that are held unless others are asked for."""

Found = tuple[Mapping[str, float], "Tensor | NDArray[np.int64] | None"]
"""The scalars of a site, and its counts of the fixed bins, ``[2048]``, where there are any."""


class _Counts(NamedTuple):
    """The bins that are not empty, in few bytes."""

    where: NDArray[np.uint16]
    counts: NDArray[np.unsignedinteger]

    @property
    def nbytes(self) -> int:
        return self.where.nbytes + self.counts.nbytes

    def dense(self) -> NDArray[np.int64]:
        """All bins, ``[2048]``."""
        found = np.zeros(_BINS, dtype=np.int64)
        found[self.where] = self.counts
        return found


class History:
    """Statistics of sites at steps that are evenly spread over all that were added, without reading files.

    Each record is taken until ``max_steps`` are held; then every second one is dropped, and from there on only every
    second record is taken, then every fourth, and so on. The first and the latest are always held.

    Args:
        max_steps: The most records that are held, at least 2.
        statistics: The scalars that are held; others are passed over.
        max_histograms: Of so many sites the counts of the bins are held, evenly spread over those of the first record
            that has any. The latest counts are held of every site.

    Raises:
        ArgumentError: If a number is too small.

    Note:
        :attr:`nbytes` says how much it holds: for a site ``max_steps * (8 * statistics + 1)`` bytes, up to twice that
        while there is room for more sites, and its latest counts; for each of ``max_histograms`` sites the counts of
        ``max_steps`` records. Counts take 3 to 10 bytes for each bin that is not empty, a kilobyte as a rule and at
        most 20 KB. It can be pickled. It is not for two threads at once.

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
        self._values: Floats = np.full((len(self.statistics), _FEW_ROWS, max_steps), np.nan)
        self._recorded = np.zeros((_FEW_ROWS, max_steps), dtype=bool)
        self._latest: dict[Hashable, _Counts] = {}
        self._counts: dict[Hashable, list[_Counts | None]] = {}

    @property
    def sites(self) -> list[Hashable]:
        """The sites in the order in which they were first seen."""
        return list(self._rows)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps that are held, ``[steps]``, ascending."""
        return np.array(self._steps, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes that its arrays take."""
        counts = [*self._latest.values(), *(each for column in self._counts.values() for each in column if each)]
        return self._values.nbytes + self._recorded.nbytes + sum(each.nbytes for each in counts)

    def add(self, step: int, found: Mapping[AnySite, Found]) -> None:
        """Take a record.

        Args:
            step: Greater than the one before; of a step that is not, nothing is taken.
            found: The sites of the record in their order, each with its scalars and its counts.
        """
        if self._steps and step <= self._steps[-1]:
            return
        column = self._next_column()
        self._steps[column:] = [step]
        self._grow(found)
        self._values[:, :, column], self._recorded[:, column] = np.nan, False
        for site, (scalars, _) in found.items():
            row = self._rows[site]
            self._recorded[row, column] = True
            self._values[:, row, column] = [scalars.get(name, np.nan) for name in self.statistics]
        self._take_counts(column, found)
        self._latest_stays = self._added % self._every == 0
        self._added += 1

    def _next_column(self) -> int:
        """Where the next record goes; makes room if there is none."""
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

    def _grow(self, found: Mapping[AnySite, Found]) -> None:
        for site in found:
            self._rows.setdefault(site, len(self._rows))
        more = len(self._rows) - len(self._recorded)
        if more > 0:
            more = max(more, len(self._recorded))
            self._values = np.pad(self._values, ((0, 0), (0, more), (0, 0)), constant_values=np.nan)
            self._recorded = np.pad(self._recorded, ((0, more), (0, 0)))

    def _take_counts(self, column: int, found: Mapping[AnySite, Found]) -> None:
        taken: dict[Hashable, _Counts] = {site: _counts(bins) for site, (_, bins) in found.items() if bins is not None}
        self._latest.update(taken)
        if not self._counts and taken:
            sites = list(taken)
            self._counts = {sites[place]: [] for place in evenly(len(sites), self.max_histograms)}
        for site, kept in self._counts.items():
            kept[column:] = [None] * (column - len(kept)) + [taken.get(site)]

    def table(self, statistic: str) -> Floats:
        """A statistic, ``[sites, steps]``; NaN where a site was not recorded.

        Raises:
            ArgumentError: If it is not held; names those that are.
        """
        if statistic not in self.statistics:
            raise ArgumentError(f"the history holds {', '.join(self.statistics)}; got {statistic!r}")
        found = self._values[self.statistics.index(statistic), : len(self._rows), : len(self._steps)]
        return found.copy()

    @property
    def recorded(self) -> NDArray[np.bool_]:
        """Which sites were recorded at which steps, ``[sites, steps]``."""
        return self._recorded[: len(self._rows), : len(self._steps)].copy()

    @property
    def histogram_sites(self) -> list[Hashable]:
        """The sites of which the counts are held over time."""
        return list(self._counts)

    def counts(self, site: Hashable) -> NDArray[np.int64]:
        """The counts of a site over time, ``[steps, 2048]``; zeros where it was not recorded.

        Raises:
            ArgumentError: If they are not held.
        """
        if site not in self._counts:
            raise ArgumentError(f"the history holds no counts of {site!r} over time; see histogram_sites")
        rows = [_NONE if each is None else each.dense() for each in self._counts[site]]
        return np.stack(rows)

    def latest_counts(self) -> dict[Hashable, NDArray[np.int64]]:
        """The latest counts of each site that has any, ``[2048]``."""
        return {site: self._latest[site].dense() for site in self._rows if site in self._latest}


_NONE: NDArray[np.int64] = np.zeros(_BINS, dtype=np.int64)


def _counts(bins: Tensor | NDArray[np.int64]) -> _Counts:
    counts = to_floats("bins", bins, f"[{_BINS}]", 1)
    if counts.shape != (_BINS,):
        raise ArgumentError(f"bins must have the shape [{_BINS}], got {list(counts.shape)}")
    where = np.flatnonzero(counts)
    inside = counts[where].astype(np.uint64)
    return _Counts(where.astype(np.uint16), inside.astype(np.min_scalar_type(int(inside.max(initial=0)))))

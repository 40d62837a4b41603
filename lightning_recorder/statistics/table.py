"""The statistics of all sites of a record, as arrays and as objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_recorder.errors import did_you_mean
from lightning_recorder.reductions import SCALAR_STATISTICS, Histogram, SparseCounts, to_histogram
from lightning_recorder.taps import Site

__all__ = [
    "RANK_STATISTICS",
    "SETTINGS",
    "SHOWN_STATISTICS",
    "Kind",
    "SiteStatistics",
    "StatisticsTable",
    "TableSchema",
    "dtypes_and_shapes",
    "make_schema",
]

RANK_STATISTICS = ("rank_mean_min", "rank_mean_max")
"""The smallest and the largest of the per-rank means, recorded if there are several ranks."""

SHOWN_STATISTICS = (*SCALAR_STATISTICS, *RANK_STATISTICS)
"""The statistics that can be shown for any site."""

SETTINGS = ("learning_rate", "weight_decay", "eval_mode")
"""The scalars of a site that are no statistics of its tensor. They are in the records and not shown by default."""

Kind = tuple[torch.dtype | None, "tuple[int, ...] | None"]
"""The dtype and the shape of the latest tensor of a site, or None if only another rank has seen the site."""


@dataclass(frozen=True)
class SiteStatistics:
    """The statistics of one site between two resets, on the CPU.

    Args:
        scalars: The statistics by name. The names are those of ``SHOWN_STATISTICS`` and those of the scalar statistics
            of extra reductions.
        bins: The counts of the fixed bins, int64 of shape ``[2048]``; see ``ExponentHistogram``.
        tensors: The nonscalar statistics of extra reductions by name, float64.
        dtype: The dtype of the latest tensor, or ``None`` if only another rank has seen the site.
        shape: The shape of the latest tensor.
    """

    scalars: Mapping[str, float]
    bins: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None

    @cached_property
    def histogram(self) -> Histogram:
        """The counts and edges of the bins, without the empty bins at both ends."""
        return to_histogram(self.scalars, self.bins)

    @property
    def abs_max(self) -> float:
        """The largest magnitude of the finite values, or NaN if there are none."""
        return max(abs(self.scalars["min"]), abs(self.scalars["max"]))

    def __getattr__(self, name: str) -> float:
        # Allows conditions such as `seen.rms > 10`.
        scalars = self.__dict__.get("scalars", {})
        if name in scalars:
            return float(scalars[name])
        known = dict.fromkeys([*scalars, "abs_max", "histogram", "bins", "tensors", "dtype", "shape"])
        # Without obj=self, Python does not append a suggestion of its own.
        hint = did_you_mean(name, known)
        raise AttributeError(f"a site has no {name!r}{hint or '.'} There are {', '.join(known)}", name=name)


_NO_BINS = torch.zeros(0, dtype=torch.int64, device="cpu")


@dataclass(frozen=True, eq=False)
class TableSchema:
    """The sites and columns of a table. Records of a run share a few schemas, which are compared by identity.

    Args:
        sites: The sites in module order.
        columns: The names of the scalar statistics.
        kinds: The dtype and the shape of each site.
        seen: The sites in the order in which they were first seen.
    """

    sites: tuple[Site, ...]
    columns: tuple[str, ...]
    kinds: tuple[Kind, ...]
    seen: tuple[Site, ...]

    @cached_property
    def rows(self) -> dict[Site, int]:
        """The row of each site."""
        return {site: row for row, site in enumerate(self.sites)}

    @cached_property
    def forward(self) -> NDArray[np.int64]:
        """The rows in the order of execution, if the sites are seen in the forward pass."""
        return self._rows_in(self.seen)

    @cached_property
    def backward(self) -> NDArray[np.int64]:
        """The rows in the order of execution, if the sites are seen in the backward pass, which visits them in reverse.

        Sites that only other ranks have seen come last, as in :attr:`forward`.
        """
        return self._rows_in(self.seen[::-1])

    def places_of(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """Return the column of each of these statistics; -1 for one that is not recorded."""
        places = self._places.get(names)
        if places is None:
            found = [self.columns.index(name) if name in self.columns else -1 for name in names]
            places = self._places[names] = np.array(found, dtype=np.int64)
        return places

    @cached_property
    def columns_set(self) -> frozenset[str]:
        """The columns as a set."""
        return frozenset(self.columns)

    @cached_property
    def _places(self) -> dict[tuple[str, ...], NDArray[np.int64]]:
        return {}

    def _rows_in(self, order: tuple[Site, ...]) -> NDArray[np.int64]:
        places = {site: place for place, site in enumerate(order)}
        rows = sorted(range(len(self.sites)), key=lambda row: places.get(self.sites[row], len(places)))
        return np.array(rows, dtype=np.int64)


def dtypes_and_shapes(kinds: Iterable[Kind]) -> tuple[tuple[str | None, ...], tuple[tuple[int, ...] | None, ...]]:
    """Return the names of dtypes, such as ``"float32"``, and the shapes."""
    pairs = list(kinds)
    dtypes = tuple(None if dtype is None else str(dtype).removeprefix("torch.") for dtype, _ in pairs)
    return dtypes, tuple(None if shape is None else tuple(shape) for _, shape in pairs)


make_schema = lru_cache(maxsize=64)(TableSchema)
"""Return the schema with these arguments, the same object for equal ones."""


class StatisticsTable(Mapping[Site, SiteStatistics]):
    """The statistics of the sites of a record. As a mapping, it makes the statistics of a site on first access.

    Args:
        schema: The sites and the columns.
        numbers: The scalars, ``[sites, columns]`` float64; NaN where a site lacks a statistic.
        counts: The histograms of the sites.
        lacking: A mask that is True where a site lacks a statistic, ``[sites, columns]``; None if all have all.
        tensors: The nonscalar statistics of extra reductions.
    """

    def __init__(
        self,
        schema: TableSchema,
        numbers: NDArray[np.float64],
        counts: SparseCounts,
        *,
        lacking: NDArray[np.bool_] | None = None,
        tensors: Mapping[Site, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.schema, self.numbers, self.counts, self.lacking = schema, numbers, counts, lacking
        self.tensors = tensors or {}
        self._made: dict[Site, SiteStatistics] = {}

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites in module order."""
        return self.schema.sites

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the scalar statistics."""
        return self.schema.columns

    @property
    def rows(self) -> dict[Site, int]:
        """The row of each site."""
        return self.schema.rows

    @override
    def __getitem__(self, site: Site) -> SiteStatistics:
        seen = self._made.get(site)
        if seen is None:
            seen = self._made[site] = self._of(site)
        return seen

    def _of(self, site: Site) -> SiteStatistics:
        row = self.rows[site]
        scalars = dict(zip(self.columns, self.numbers[row].tolist(), strict=True))
        if self.lacking is not None and self.lacking[row].any():
            scalars = {name: scalars[name] for name in self.names_of(row)}
        return SiteStatistics(scalars, self.counts.dense(row), self.tensors.get(site, {}), *self.schema.kinds[row])

    def histogram(self, site: Site) -> Histogram:
        """Return the histogram of a site. Access as a mapping keeps the site's statistics; this keeps nothing."""
        return self._of(site).histogram

    @override
    def __contains__(self, site: object) -> bool:
        return site in self.rows

    @override
    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    @override
    def __len__(self) -> int:
        return len(self.sites)

    @override
    def __repr__(self) -> str:
        return f"<statistics of {len(self)} sites: {', '.join(self.columns)}>"

    def without_bins(self) -> dict[Site, SiteStatistics]:
        """Return the statistics of all sites without their histograms, which takes less time and memory."""
        names = [self.names_of(row) for row in range(len(self))] if self.lacking is not None else None
        found = {}
        for row, (site, values) in enumerate(zip(self.sites, self.numbers.tolist(), strict=True)):
            scalars = dict(zip(self.columns, values, strict=True))
            if names is not None:
                scalars = {name: scalars[name] for name in names[row]}
            found[site] = SiteStatistics(scalars, _NO_BINS, {}, *self.schema.kinds[row])
        return found

    def names_of(self, row: int) -> tuple[str, ...]:
        """Return the statistics of the site in a row."""
        if self.lacking is None:
            return self.columns
        return tuple(name for name, lacks in zip(self.columns, self.lacking[row].tolist(), strict=True) if not lacks)

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one statistic of all sites, ``[sites]``; NaN if a site lacks it."""
        if name not in self.columns:
            return np.full(len(self.sites), np.nan)
        return self.numbers[:, self.columns.index(name)]

    def part(self, rows: NDArray[np.int64], names: tuple[str, ...]) -> NDArray[np.float64]:
        """Return some statistics of some rows, ``[rows, names]``; NaN where a site lacks one."""
        if not self.numbers.size:
            return np.full((len(rows), len(names)), np.nan)
        places = self.schema.places_of(names)
        found: NDArray[np.float64] = self.numbers.take(rows, axis=0).take(places, axis=1)
        if not self.schema.columns_set.issuperset(names):
            found[:, places < 0] = np.nan
        return found

    def with_column(self, name: str, values: NDArray[np.float64], has: NDArray[np.bool_]) -> StatisticsTable:
        """Return the table with another statistic.

        Args:
            name: The name of the statistic.
            values: Its values, ``[sites]``.
            has: A mask that is True for the sites that have the statistic, ``[sites]``.
        """
        lacking = np.zeros(self.numbers.shape, dtype=bool) if self.lacking is None else self.lacking
        schema = self.schema
        return StatisticsTable(
            make_schema(schema.sites, (*schema.columns, name), schema.kinds, schema.seen),
            np.column_stack((self.numbers, np.where(has, values, np.nan))),
            self.counts,
            lacking=None if self.lacking is None and has.all() else np.column_stack((lacking, ~has)),
            tensors=self.tensors,
        )

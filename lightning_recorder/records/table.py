"""The statistics of all sites in a record, as arrays and as objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_recorder.errors import did_you_mean
from lightning_recorder.names import Site, is_batch, is_input
from lightning_recorder.records.classes import class_counts
from lightning_recorder.records.counts import SparseCounts, to_histogram
from lightning_recorder.records.histogram import Histogram

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Floats", "Schema", "SiteStatistics", "Table", "is_of_data", "make_schema"]

Floats = NDArray[np.float64]

_SIDES = ("in.prediction", "in.target", "in.scores")  # the paths of loss inputs, which may have any values

_FOR_HISTOGRAM = ("count", "mean", "rms", "min", "max")
_MOST_PARTS = 64  # the most cached schemas of subsets


@cache
def _no_bins() -> Tensor:
    import torch

    return torch.zeros(0, dtype=torch.int64, device="cpu")


def is_of_data(name: str, path: str) -> bool:
    """Return True for the site of a batch tensor or of a loss input. Such tensors may have any values."""
    return path.startswith(_SIDES) or is_batch(name, path)


@dataclass(frozen=True)
class SiteStatistics:
    """The statistics of one site between two resets, on the CPU.

    Args:
        scalars: The scalar statistics by name: ``SHOWN_STATISTICS``, and the scalar statistics of extra reductions.
        bins: The counts of the fixed bins, int64 of shape ``[2048]``; see ``ExponentHistogram``. The shape is
            ``[0]`` without a histogram.
        tensors: The nonscalar statistics of extra reductions by name, float64.
        dtype: The dtype of the latest tensor, or ``None`` if only another rank has seen the site.
        shape: The shape of the latest tensor.
    """

    scalars: Mapping[str, float]
    bins: Tensor = field(default_factory=_no_bins)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None

    @cached_property
    def histogram(self) -> Histogram:
        """The counts and edges of the bins, without the empty bins at both ends."""
        return to_histogram(self.scalars, self.bins)

    @property
    def classes(self) -> dict[int, int]:
        """The count of each class that occurs, if the path of the site ends with ``.classes``."""
        counts = class_counts(self.bins) if len(self.bins) else np.zeros(0, dtype=np.int64)
        return {int(each): int(counts[each]) for each in np.flatnonzero(counts)}

    @property
    def abs_max(self) -> float:
        """The largest magnitude of the finite values, or NaN if there are none."""
        return max(abs(self.scalars["min"]), abs(self.scalars["max"]))

    def __getattr__(self, name: str) -> float:
        # Allow conditions such as `seen.rms > 10`.
        scalars = self.__dict__.get("scalars", {})
        if name in scalars:
            return float(scalars[name])
        known = dict.fromkeys([*scalars, "abs_max", "histogram", "bins", "tensors", "dtype", "shape"])
        # obj=self is left out, so that Python does not append a second suggestion.
        hint = did_you_mean(name, known)
        raise AttributeError(f"a site has no {name!r}{hint or '.'} There are {', '.join(known)}", name=name)


@dataclass(frozen=True, eq=False)
class Schema:
    """The sites and columns of a table. The records of a run share a few schemas, which are compared by identity.

    Args:
        sites: The sites, one for each row.
        columns: The names of the scalar statistics.
        dtypes: The dtype of each site, such as ``"float32"``; ``None`` if it is unknown.
        shapes: The shape of each site; ``None`` if it is unknown.
        seen: The sites in the order in which they were first seen, if this is not the order of the rows.
    """

    sites: tuple[Site, ...]
    columns: tuple[str, ...]
    dtypes: tuple[str | None, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    seen: tuple[Site, ...] = ()

    @cached_property
    def rows(self) -> dict[Site, int]:
        """The row of each site."""
        return {site: row for row, site in enumerate(self.sites)}

    def order_of(self, group: str) -> NDArray[np.int64]:
        """Return the rows in the order of execution; for gradients, in the order of the backward pass.

        The backward pass visits the sites in reverse. Sites that only other ranks have seen come last.
        """
        return self._backward if group.startswith("gradients") else self._forward

    @cached_property
    def _forward(self) -> NDArray[np.int64]:
        return self._rows_in(self.seen)

    @cached_property
    def _backward(self) -> NDArray[np.int64]:
        return self._rows_in(self.seen[::-1])

    def _rows_in(self, order: tuple[Site, ...]) -> NDArray[np.int64]:
        places = {site: place for place, site in enumerate(order)}
        rows = sorted(range(len(self.sites)), key=lambda row: places.get(self.sites[row], len(places)))
        return np.array(rows, dtype=np.int64)

    def places_of(self, names: tuple[str, ...]) -> NDArray[np.int64]:
        """Return the column index of each statistic; -1 for a statistic that was not recorded."""
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

    def take(self, rows: NDArray[np.int64]) -> Schema:
        """Return the schema of some rows, in the given order; the same object for equal rows."""
        found = self._parts.get(key := rows.tobytes())
        if found is None:
            if len(self._parts) == _MOST_PARTS:
                self._parts.clear()
            sites, dtypes, shapes = (
                tuple(each[row] for row in rows.tolist()) for each in (self.sites, self.dtypes, self.shapes)
            )
            found = self._parts[key] = Schema(sites, self.columns, dtypes, shapes)
        return found

    @cached_property
    def _parts(self) -> dict[bytes, Schema]:
        return {}

    @cached_property
    def losses(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Two arrays of rows: the rows of batch tensors and loss inputs are in the second, all others in the first."""
        are_sides = np.array([is_of_data(*site) for site in self.sites], dtype=bool)
        return np.flatnonzero(~are_sides), np.flatnonzero(are_sides)

    @cached_property
    def inputs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Two arrays of rows: the rows of module inputs are in the second, all others in the first."""
        are_inputs = np.array([site.path[:2] == "in" and is_input(site.path) for site in self.sites], dtype=bool)
        return np.flatnonzero(~are_inputs), np.flatnonzero(are_inputs)


make_schema = lru_cache(maxsize=64)(Schema)
"""Return a schema made from the arguments of :class:`Schema`; the same object for equal arguments."""


@lru_cache(maxsize=1024)
def _names_without(columns: tuple[str, ...], lacking: bytes) -> tuple[str, ...]:
    """Return the names of the columns that a row has; cached, since the rows of a model have few different sets."""
    return tuple(name for name, lacks in zip(columns, lacking, strict=True) if not lacks)


class Table(Mapping[Site, SiteStatistics]):
    """The statistics of the sites in a record. As a mapping, it creates the object of a site on first access.

    Args:
        schema: The sites and the columns.
        numbers: The scalars, ``[sites, columns]`` float64; NaN where a site lacks a statistic.
        counts: The histograms of the sites; None if there are none in memory.
        about: The facts of the record that do not belong to a site, such as ``step`` and ``stage``.
        lacking: A mask that is True where a site lacks a statistic, ``[sites, columns]``; None if nothing is missing.
        tensors: The nonscalar statistics of extra reductions.
        histogram: A function that returns the histogram of a site, instead of ``counts``.
    """

    # A long run has one table for each record, so tables are small.
    __slots__ = ("_histogram", "_made", "about", "counts", "lacking", "numbers", "schema", "tensors")

    def __init__(
        self,
        schema: Schema,
        numbers: Floats,
        counts: SparseCounts | None = None,
        *,
        about: Mapping[str, Any] | None = None,
        lacking: NDArray[np.bool_] | None = None,
        tensors: Mapping[Site, Mapping[str, Tensor]] | None = None,
        histogram: Callable[[Site], Histogram | None] | None = None,
    ) -> None:
        self.schema, self.numbers, self.counts, self.lacking = schema, numbers, counts, lacking
        self.about = about if about is not None else {}
        self.tensors = tensors or {}
        self._histogram = histogram
        self._made: dict[Site, SiteStatistics] | None = None

    @classmethod
    def of(
        cls,
        found: Mapping[Site, SiteStatistics] | Iterable[tuple[Site, SiteStatistics]],
        about: Mapping[str, Any] | None = None,
    ) -> Table:
        """Return a table from the statistics of some sites, with a column for each statistic that any site has.

        Raises:
            ArgumentError: If the bins of a site are not valid counts.
        """
        pairs = list(found.items() if isinstance(found, Mapping) else found)
        statistics = [seen for _, seen in pairs]
        columns = tuple(dict.fromkeys(name for seen in statistics for name in seen.scalars))
        numbers = np.array([[float(seen.scalars.get(name, math.nan)) for name in columns] for seen in statistics])
        lacking = np.array([[name not in seen.scalars for name in columns] for seen in statistics], dtype=bool)
        dtypes = tuple(None if seen.dtype is None else str(seen.dtype).removeprefix("torch.") for seen in statistics)
        shapes = tuple(None if seen.shape is None else tuple(seen.shape) for seen in statistics)
        return cls(
            Schema(tuple(site for site, _ in pairs), columns, dtypes, shapes),
            numbers.reshape(len(pairs), len(columns)),
            SparseCounts.of_tensors([seen.bins for seen in statistics]),
            about=about,
            lacking=lacking.reshape(len(pairs), len(columns)) if lacking.any() else None,
            tensors={site: seen.tensors for site, seen in pairs if seen.tensors},
        )

    def having(self, **changes: Any) -> Table:
        """Return a copy with new values for some arguments."""
        found = copy(self)
        found._made = None
        for name, value in changes.items():
            setattr(found, "_histogram" if name == "histogram" else name, value)
        return found

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, one for each row."""
        return self.schema.sites

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the scalar statistics."""
        return self.schema.columns

    @property
    def rows(self) -> dict[Site, int]:
        """The row of each site."""
        return self.schema.rows

    @property
    def step(self) -> int:
        """The step of the record."""
        return int(self.about["step"])

    @property
    def stage(self) -> str:
        """The stage of the record, such as ``"train"``."""
        return str(self.about.get("stage", "train"))

    @property
    def group(self) -> str:
        """The kind of tensors: ``"activations"``, ``"gradients"`` or ``"parameters"``; empty if it is unknown."""
        return str(self.about.get("group", ""))

    @property
    def recorder(self) -> str:
        """The label of the recorder; empty if it is unknown."""
        return str(self.about.get("recorder", ""))

    @override
    def __getitem__(self, site: Site) -> SiteStatistics:
        self._made = {} if self._made is None else self._made
        seen = self._made.get(site)
        if seen is None:
            seen = self._made[site] = self._of(site)
        return seen

    def _of(self, site: Site) -> SiteStatistics:
        bins = _no_bins() if self.counts is None else self.counts.dense(self.rows[site])
        return SiteStatistics(self.scalars(site), bins, self.tensors.get(site, {}), *self._kind(self.rows[site]))

    def _kind(self, row: int) -> tuple[torch.dtype | None, tuple[int, ...] | None]:
        import torch

        found = getattr(torch, self.schema.dtypes[row] or "", None)
        return found if isinstance(found, torch.dtype) else None, self.schema.shapes[row]

    def scalars(self, site: Site) -> dict[str, float]:
        """Return the scalar statistics of a site by name. Statistics that the site lacks are left out."""
        row = self.rows[site]
        scalars = dict(zip(self.columns, self.numbers[row].tolist(), strict=True))
        if self.lacking is not None and self.lacking[row].any():
            return {name: scalars[name] for name in self.names_of(row)}
        return scalars

    def histogram(self, site: Site) -> Histogram | None:
        """Return the histogram of a site; None if it has none. Unlike access as a mapping, this caches nothing.

        Raises:
            DumpError: If the histogram is read from a file and is damaged.
        """
        if self._histogram is not None:
            return self._histogram(site)
        if self.counts is None or not self.schema.columns_set.issuperset(_FOR_HISTOGRAM):
            return None
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
        """Return the statistics of all sites without histograms, to save time and memory."""
        names = [self.names_of(row) for row in range(len(self))] if self.lacking is not None else None
        found = {}
        for row, (site, values) in enumerate(zip(self.sites, self.numbers.tolist(), strict=True)):
            scalars = dict(zip(self.columns, values, strict=True))
            if names is not None:
                scalars = {name: scalars[name] for name in names[row]}
            found[site] = SiteStatistics(scalars, _no_bins(), {}, *self._kind(row))
        return found

    def names_of(self, row: int) -> tuple[str, ...]:
        """Return the names of the statistics that the site in a row has."""
        if self.lacking is None:
            return self.columns
        return _names_without(self.columns, self.lacking[row].tobytes())

    def column(self, name: str) -> Floats:
        """Return one statistic of all sites, ``[sites]``; NaN for a site without the statistic."""
        if name not in self.columns:
            return np.full(len(self.sites), np.nan)
        return self.numbers[:, self.columns.index(name)]

    def part(self, rows: NDArray[np.int64] | None, names: tuple[str, ...]) -> Floats:
        """Return some statistics of some or all rows, ``[rows, names]``; NaN where a site lacks a statistic."""
        if not self.numbers.size:
            return np.full((len(self) if rows is None else len(rows), len(names)), np.nan)
        places = self.schema.places_of(names)
        numbers = self.numbers if rows is None else self.numbers.take(rows, axis=0)
        found: Floats = numbers.take(places, axis=1)
        if not self.schema.columns_set.issuperset(names):
            found[:, places < 0] = np.nan
        return found

    def take(self, rows: NDArray[np.int64]) -> Table:
        """Return the table of some rows, in the given order."""
        return self.having(
            schema=self.schema.take(rows),
            numbers=self.numbers[rows],
            counts=None if self.counts is None else self.counts.take(rows),
            lacking=None if self.lacking is None else self.lacking[rows],
        )

    def in_order(self, sites: Iterable[Site]) -> Table:
        """Return the table with the sites in the given order; an empty order changes nothing."""
        order = tuple(sites)
        if order in ((), self.sites):
            return self
        return self.take(np.array([self.rows[site] for site in order], dtype=np.int64))

    def without_losses(self) -> tuple[Table, Table | None]:
        """Return the table without batches, predictions and targets, and a second table of these; None without any."""
        others, sides = self.schema.losses
        if not len(sides) or self.group != "activations":
            return self, None
        return self.take(others), self.take(sides)

    def split(self) -> tuple[Table, Table | None]:
        """Return the table without module inputs, and a second table of the inputs; None if there are none.

        They are separated because the rules compare outputs only with outputs.
        """
        others, inputs = self.schema.inputs
        if not len(inputs) or self.group == "parameters":
            return self, None
        return self.take(others), self.take(inputs)

    def with_column(self, name: str, values: Floats, has: NDArray[np.bool_]) -> Table:
        """Return the table with an additional statistic.

        Args:
            name: The name of the statistic.
            values: The value at each site, ``[sites]``.
            has: A mask that is True for the sites that have the statistic, ``[sites]``.
        """
        lacking = np.zeros(self.numbers.shape, dtype=bool) if self.lacking is None else self.lacking
        schema = self.schema
        return self.having(
            schema=make_schema(schema.sites, (*schema.columns, name), schema.dtypes, schema.shapes, schema.seen),
            numbers=np.column_stack((self.numbers, np.where(has, values, np.nan))),
            lacking=None if self.lacking is None and has.all() else np.column_stack((lacking, ~has)),
        )

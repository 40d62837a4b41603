"""Copies of the states of all sites, and the statistics computed from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_recorder.bins import BINS
from lightning_recorder.errors import describe_error, warn
from lightning_recorder.records.classes import CLASS_COUNTS, class_scalars
from lightning_recorder.records.counts import SparseCounts
from lightning_recorder.records.table import Table, make_schema
from lightning_recorder.reductions import SCALAR_STATISTICS, BatchSpread, Collected, CompactStates, Reduction, row_state
from lightning_recorder.reductions.row import DERIVED_STATISTICS, HISTOGRAM
from lightning_recorder.reductions.user import Results
from lightning_recorder.statistics.user_states import UserSnapshot
from lightning_recorder.taps import Site

__all__ = [
    "NOTHING",
    "RANK_STATISTICS",
    "SETTINGS",
    "SHOWN_STATISTICS",
    "Record",
    "Snapshot",
    "are_scalars_enough",
    "statistics_of",
]

RANK_STATISTICS = ("rank_mean_min", "rank_mean_max")
"""The smallest and the largest of the per-rank means, recorded if there are several ranks."""

SHOWN_STATISTICS = (*SCALAR_STATISTICS, *RANK_STATISTICS, *BatchSpread.statistics)
"""The statistics that can be shown for any site."""

SETTINGS = ("learning_rate", "weight_decay", "eval_mode")
"""The scalars of a site that are not statistics of its tensor. Records have them, but they are not shown by default."""

_BINS = "histogram"

Columns = dict[str, NDArray[np.float64]]


@dataclass(eq=False)  # not frozen, because creating a frozen dataclass takes several times as long
class Snapshot:
    """The states of the sites at one point in time.

    Args:
        names: The names of the modules, in order.
        groups: The states of the sites for each reduction, starting with the default statistics.
        left_out: The sites at which each reduction is skipped.
        rank_means: The smallest and the largest per-rank mean of the sites that several ranks have seen.
        diverged: The sites whose values should be equal on all ranks but differ.
        kinds: The dtype and shape of the latest tensor of each site, in the order in which the sites were first seen.
        settings: Scalars of sites that are not statistics of a tensor, such as the learning rate of a parameter.
        calls: The number of tensors that each site received on this rank since the last reset, in the order of the
            first tensors.
        users: The states of each function and metric of the user.
        warned: The indices of the reductions that have caused a warning because summarizing them failed. Updated in
            place.
        strict: Raise the errors of extra reductions instead of warning and skipping the reduction.
    """

    names: tuple[str, ...]
    groups: list[list[Collected[Site]]]
    left_out: Sequence[frozenset[Site]]
    rank_means: Mapping[Site, tuple[float, float]] = field(default_factory=dict)
    diverged: frozenset[Site] = frozenset()
    kinds: Mapping[Site, tuple[torch.dtype, torch.Size | None]] = field(default_factory=dict)
    settings: Mapping[Site, Mapping[str, float]] = field(default_factory=dict)
    calls: Mapping[Site, int] = field(default_factory=dict)
    users: Sequence[UserSnapshot] = ()
    warned: set[int] = field(default_factory=set)
    strict: bool = False

    @property
    def nbytes(self) -> int:
        """The size of the states of the default statistics in bytes."""
        return sum(group.nbytes for group in self.groups[0]) if self.groups else 0

    @property
    def has_arrived(self) -> bool:
        """True if reading the states does not wait for a GPU."""
        return all(group.has_arrived for groups in self.groups for group in groups)

    @property
    def is_empty(self) -> bool:
        """True if no site was seen. Waits for a GPU."""
        return not statistics_of([replace(self, groups=self.groups[:1], users=())])[0]

    def without_ranks(self) -> Snapshot:
        """Return a copy without differences between ranks, which are meaningless if rank zero loaded merged states."""
        return replace(self, rank_means={}, diverged=frozenset())

    def resembles(self, other: Snapshot) -> bool:
        """Return True if another snapshot has the same modules, dtypes and shapes, in the same order."""
        are_equal = self.names == other.names and self.kinds == other.kinds
        return are_equal and [*self.kinds] == [*other.kinds]

    def release(self) -> None:
        """Free the states. The snapshot has no statistics from then on."""
        self.groups.clear()

    def statistics(self) -> Table:
        """Return the statistics of every site that was seen, in module order."""
        return statistics_of([self])[0]

    def completed(self, table: Table) -> Table:
        """Add the statistics across ranks and of extra reductions to a table of the default statistics."""
        if self.rank_means:
            # Class indices have no meaningful mean.
            known = self.rank_means
            has = np.array([each in known and not each.path.endswith(CLASS_COUNTS) for each in table.sites], dtype=bool)
            for place, name in enumerate(RANK_STATISTICS):
                means = [self.rank_means.get(site, (math.nan, math.nan))[place] for site in table.sites]
                table = table.with_column(name, np.array(means), has)
        for name in dict.fromkeys(name for settings in self.settings.values() for name in settings):
            given = [self.settings.get(site, {}).get(name) for site in table.sites]
            has = np.array([value is not None for value in given], dtype=bool)
            if has.any():
                table = table.with_column(name, np.array([math.nan if each is None else each for each in given]), has)
        for place, groups in list(enumerate(self.groups))[1:]:
            summaries, left_out = self._summaries(place, groups), self.left_out[place]
            found = {site: (scalars, tensors) for site, scalars, tensors in summaries if site not in left_out}
            table = _extended(table, found)
        for place, user in enumerate(self.users, start=len(self.groups)):
            results = self._user_results(place, user)
            table = _extended(table, {site: (each.scalars, each.tensors) for site, each in results.items()})
        return table

    def _summaries(
        self, place: int, groups: list[Collected[Site]]
    ) -> list[tuple[Site, dict[str, float], dict[str, Tensor]]]:
        """Return the statistics of an extra reduction for its sites, or an empty list if it fails."""
        try:
            return [each for group in groups for each in _by_site(group)]
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            self._warn_of(place, f"{groups[0].reduction} is left out, because its summarize failed", error)
            return []

    def _user_results(self, place: int, user: UserSnapshot) -> dict[Site, Results]:
        """Return the results of a function or metric for its sites, or an empty mapping if it fails."""
        try:
            return {site: user.reduction.results(state) for site, state in user.states.items()}
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything
            self._warn_of(place, f"{user.reduction} is left out, because its result failed", error)
            return {}

    def _warn_of(self, place: int, what: str, error: Exception) -> None:
        if self.strict:
            raise error
        if place not in self.warned:
            self.warned.add(place)
            warn(f"{what}: {describe_error(error)}")

    def state_dict(self) -> dict[str, Any]:
        """Return the states in the format of :meth:`SiteStates.load_state_dict`, on one device."""
        return {
            "banks": [
                [
                    {"key": list(site), "device": state.device.type, "state": row_state(group.reduction, state)}
                    for group in groups
                    for site, state in zip(group.keys, group.states, strict=True)
                ]
                for groups in self.groups
            ],
            "left_out": [[list(site) for site in sorted(sites)] for sites in self.left_out],
            "calls": [[*site, number] for site, number in self.calls.items()],
            **({"users": [user.state_dict() for user in self.users]} if self.users else {}),
        }


NOTHING = Snapshot((), [], [])
"""An empty snapshot, used until the states of all ranks are merged."""


_FACTS = (
    "step",
    "epoch",
    "stage",
    "loader",
    "steps",
    "ranks",
    "overflowed",
    "overflow_steps",
    "every_n_train_steps",
    "recording_ms",
    "flush_ms",
    "is_sample",
)


@dataclass(eq=False)
class Record:
    """The statistics of one or more steps with their metadata.

    Args:
        step: The position on the step axis.
        epoch: The epoch.
        snapshot: The states.
        steps: The number of recorded steps.
        stage: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        loader: The index of the data loader, or ``None`` if there is only one.
        overflowed: True if the gradients of the step overflowed, so that the optimizer skipped the step.
        overflow_steps: The number of recorded steps with an overflow so far.
        recording_ms: The time spent in the hooks, in milliseconds.
        flush_ms: The time spent on copying and merging, in milliseconds.
        option_ms: The host time of each option, such as ``"attention"``, per step, in milliseconds.
        every_n_train_steps: The interval from now on, in steps.
        ranks: The number of merged ranks.
        is_sample: True if the record covers only the first batches of an evaluation. Such records are used for the
            record file and the findings only.
        batch: The checksums of :func:`batch_fingerprint`, ``[2]`` int64 on any device, or None.
        about: Facts about the step that belong to no site, such as ``groups``, the settings of the optimizer.
        pending: A function that waits until the ranks are merged. It returns the record with the merged states, or None
            if nothing was recorded. ``pending`` is None if the states are complete.
    """

    step: int
    epoch: int
    snapshot: Snapshot
    steps: int = 1
    stage: str = "train"
    loader: int | None = None
    overflowed: bool = False
    overflow_steps: int = 0
    recording_ms: float = 0.0
    flush_ms: float = 0.0
    option_ms: Mapping[str, float] = field(default_factory=dict)
    every_n_train_steps: int = 1
    ranks: int = 1
    is_sample: bool = False
    batch: Tensor | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    pending: Callable[[Record], Record | None] | None = None

    def facts(self, group: str) -> dict[str, Any]:
        """Return all fields but the states, for the ``about`` of a table.

        Args:
            group: The kind of tensors, which decides the order of ``calls``, the number of tensors of each site.
        """
        calls = {} if group == "parameters" else self.snapshot.calls
        return {
            **self.about,
            **{name: getattr(self, name) for name in _FACTS},
            **({"option_ms": self.option_ms} if self.option_ms else {}),
            # The history of a run keeps the facts, and a tensor would occupy device memory.
            "batch": None if self.batch is None else self.batch.tolist(),
            "diverged": self.snapshot.diverged,
            "calls": dict([*calls.items()][::-1]) if group == "gradients" else calls,
        }

    def table(self, group: str = "activations") -> Table:
        """Return the statistics of the sites with the facts of the record."""
        return self.snapshot.statistics().having(about=self.facts(group))

    def complete(self) -> Record | None:
        """Return the record with the states of all ranks, or None if nothing was recorded. May wait for other ranks."""
        return self if self.pending is None else self.pending(replace(self, pending=None))


def _extended(table: Table, found: Mapping[Site, tuple[Mapping[str, float], Mapping[str, Tensor]]]) -> Table:
    """Return the table with additional scalars and tensors of its sites."""
    found = {site: each for site, each in found.items() if site in table}
    tensors = {site: {**table.tensors.get(site, {}), **more} for site, (_, more) in found.items() if more}
    table.tensors = {**table.tensors, **tensors}
    for name in dict.fromkeys(name for scalars, _ in found.values() for name in scalars):
        has = np.array([site in found and name in found[site][0] for site in table.sites], dtype=bool)
        values = [found[site][0].get(name, math.nan) if site in found else math.nan for site in table.sites]
        table = table.with_column(name, np.array(values), has)
    return table


_MOST_ELEMENTS = 1 << 15  # numbers to summarize at once, so that the temporaries stay in the CPU caches


@torch.no_grad()
def statistics_of(snapshots: Sequence[Snapshot]) -> list[Table]:
    """Return the statistics of each snapshot. Passing many small snapshots at once is much faster than one by one."""
    groups = [(number, group) for number, each in enumerate(snapshots) for group in (each.groups or [[]])[0]]
    if not groups:
        nothing = SparseCounts(np.empty((0, BINS)))
        return [Table(make_schema((), (), (), ()), np.empty((0, 0)), nothing) for _ in snapshots]
    columns, counts = _summaries([group for _, group in groups])
    values = np.stack(list(columns.values()), axis=1)
    for row, site in enumerate(site for _, group in groups for site in group.keys):
        if site.path.endswith(CLASS_COUNTS):
            values[row] = class_scalars(counts.dense(row), columns)
    # Skip rows that were allocated for an earlier step and have received no tensor since.
    seen = ((columns["count"] != 0) | (columns["nan_count"] != 0) | (columns["inf_count"] != 0)).tolist()
    found: list[list[tuple[int, Site]]] = [[] for _ in snapshots]
    first = 0
    for number, group in groups:
        found[number] += [(first + row, site) for row, site in enumerate(group.keys) if seen[first + row]]
        first += len(group.keys)
    tables = []
    before: tuple[Snapshot, list[Site]] | None = None
    for snapshot, rows in zip(snapshots, found, strict=True):
        own = [site for _, site in rows]
        # Nearly all records have the same sites as the previous record. Comparing them is faster than a look-up.
        if before is None or own != before[1] or not snapshot.resembles(before[0]):
            sites, order = _in_module_order(snapshot.names, tuple(own))
            schema = make_schema(sites, tuple(columns), *_dtypes_and_shapes(snapshot, sites), tuple(snapshot.kinds))
        before = snapshot, own
        where = np.array([row for row, _ in rows], dtype=np.int64)[order]
        tables.append(snapshot.completed(Table(schema, values[where], counts.take(where))))
    return tables


def _summaries(groups: Sequence[Collected[Site]]) -> tuple[Columns, SparseCounts]:
    """Return the scalars and the histograms of the default statistics in all groups, one group after the other."""
    reduction = groups[0].reduction
    small = [group for group in groups if isinstance(group, CompactStates)]
    if len(small) == len(groups) and are_scalars_enough(reduction):
        others, *entries = (np.concatenate(part) for part in zip(*(group.parts for group in small), strict=True))
        return _columns(reduction, torch.from_numpy(others)), SparseCounts.of_entries(*entries)
    states = groups[0].states if len(groups) == 1 else torch.cat([group.states for group in groups])
    counts = SparseCounts(states[:, HISTOGRAM : HISTOGRAM + BINS].numpy())
    return _columns(reduction, states), counts


def _dtypes_and_shapes(
    snapshot: Snapshot, sites: tuple[Site, ...]
) -> tuple[tuple[str | None, ...], tuple[tuple[int, ...] | None, ...]]:
    """Return the dtypes and shapes of the sites. Both are None for a site that only another rank has seen."""
    kinds = [snapshot.kinds.get(site, (None, None)) for site in sites]
    dtypes = tuple(
        "int64" if site.path.endswith(CLASS_COUNTS) else None if dtype is None else str(dtype).removeprefix("torch.")
        for site, (dtype, _) in zip(sites, kinds, strict=True)
    )
    return dtypes, tuple(None if shape is None else tuple(shape) for _, shape in kinds)


@lru_cache(maxsize=64)
def _in_module_order(names: tuple[str, ...], sites: tuple[Site, ...]) -> tuple[tuple[Site, ...], NDArray[np.int64]]:
    """Return the sites in module order, and their indices in ``sites``. Functions come last in their module."""
    places: dict[str, int] = {}
    for place, name in enumerate(names):
        parts = name.split(".")
        places.update({".".join(parts[:depth]): place for depth in range(1, len(parts))})
    places |= {name: place for place, name in enumerate(names)}

    def place_of(number: int) -> int:
        name = sites[number].name
        return places.get(name, places.get(name.rpartition(".")[0], len(names)))

    order = sorted(range(len(sites)), key=place_of)
    return tuple(sites[each] for each in order), np.array(order, dtype=np.int64)


def are_scalars_enough(reduction: Reduction) -> bool:
    """Return True if no statistic is computed from the histogram. Quantiles and sampled histograms need its counts."""
    return reduction.partial is not None and {*reduction.statistics} == {*reduction.partial.statistics, _BINS}


def _columns(reduction: Reduction, states: Tensor) -> Columns:
    """Return the scalars of the default statistics, ``[sites]`` each."""
    scalars = reduction.partial
    if scalars is not None and are_scalars_enough(reduction):
        summaries = [scalars.summarize(states[:, : scalars.width])]
    else:  # quantiles or a sampled histogram, which need the counts
        some = max(1, _MOST_ELEMENTS // max(1, reduction.width))
        summaries = [reduction.summarize(part) for part in states.split(some)]
    names = [name for name in summaries[0] if name not in DERIVED_STATISTICS and name != _BINS]
    return {name: torch.cat([summary[name] for summary in summaries]).numpy() for name in names}


def _by_site(
    group: Collected[Site],
) -> Iterator[tuple[Site, dict[str, float], dict[str, Tensor]]]:
    """Yield the scalars and the tensors of each site. The states of many sites are summarized together."""
    some = max(1, _MOST_ELEMENTS // max(1, group.reduction.width))
    for first in range(0, len(group.keys), some):
        summary = group.reduction.summarize(group.states[first : first + some])
        columns = {name: value.tolist() for name, value in summary.items() if value.dim() == 1}
        tensors = {name: value.unbind() for name, value in summary.items() if value.dim() > 1}
        for row, site in enumerate(group.keys[first : first + some]):
            yield (
                site,
                {name: column[row] for name, column in columns.items()},
                {name: parts[row] for name, parts in tensors.items()},
            )

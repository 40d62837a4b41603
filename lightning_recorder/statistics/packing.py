"""The packing of all site states for the exchange between ranks."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_recorder.reductions import Collected, Reduction, Statistics
from lightning_recorder.taps import Site

__all__ = ["Key", "MergedStates", "Packed", "SharedReduction", "StatePacking", "States"]

Key = tuple[int, Site]
"""The index of the reduction and the site."""
States = Mapping[Key, tuple[Reduction, Tensor]]
"""The reduction and the state, of shape ``[width]``, of each site of a rank."""

# The status of a site on a rank: no state, a state, a copy of another rank's state, or skipped.
_ABSENT, _COUNTS, _COPY, _LEFT_OUT = 0.0, 1.0, 2.0, 3.0


class Packed(NamedTuple):
    """The packed states of one rank."""

    gathered: Tensor
    """The data needed from each rank, 1-d float64: the status of each site, and the slots that are not additive."""
    added: Tensor
    """The additive slots, 1-d float64."""


class MergedStates(NamedTuple):
    """The merged states of all ranks, on the CPU."""

    groups: dict[int, list[Collected[Site]]]
    """The states by the index of the reduction."""
    rank_means: dict[Site, tuple[float, float]]
    """The smallest and the largest per-rank mean."""
    diverged: frozenset[Site]
    """The sites whose values should be equal on all ranks but differ."""


class SharedReduction(NamedTuple):
    """The description of a site's reduction that is shared between ranks."""

    described: str
    """The reduction as text."""
    initial: Tensor
    """The state of an empty stream, of shape ``[width]``."""
    additive: Tensor
    """A mask of the slots that are merged by addition, bool of shape ``[width]``."""
    reduction: Reduction | None
    """The reduction without a state, or None if it cannot be pickled."""


class _Kind(NamedTuple):
    """A group of sites with the same reduction, stored together."""

    bank: int
    description: SharedReduction
    sites: list[Site]

    @property
    def additive(self) -> Tensor:
        """A mask of the slots that are merged by addition, bool of shape ``[width]``."""
        return self.description.additive


class StatePacking:
    """The sites whose states are packed, in an order that is the same on all ranks."""

    def __init__(self) -> None:
        self._known: dict[Key, SharedReduction] = {}
        self._refused: set[Key] = set()
        self._own: dict[str, Reduction] = {}  # this rank's reductions by description

    def unknown(self, own: States) -> list[tuple[Key, SharedReduction]]:
        """Return a rank's sites that are not in the layout, with the description for the other ranks."""
        found = []
        for key, (reduction, _) in own.items():
            if key not in self._known and key not in self._refused:
                shared = _shared(reduction)
                self._own.setdefault(shared.described, reduction)
                found.append((key, shared))
        return found

    def extend(self, shared: Sequence[Sequence[tuple[Key, SharedReduction]]]) -> list[tuple[Key, SharedReduction]]:
        """Add sites to the layout.

        Args:
            shared: The new sites of all ranks in rank order, the same on each rank.

        Returns:
            The rejected sites: those whose states differ in kind or size between ranks, and those that the first rank
            has not seen and whose reduction cannot be sent to it.
        """
        by_key: dict[Key, list[SharedReduction]] = {}
        for key, description in itertools.chain.from_iterable(shared):
            by_key.setdefault(key, []).append(description)
        seen_by_first = {key for key, _ in shared[0]}
        left_out = []
        for key, descriptions in by_key.items():
            known = self._known.get(key)
            alike = {description.described for description in (*descriptions, *([] if known is None else [known]))}
            sent = [description for description in descriptions if description.reduction is not None]
            if len(alike) > 1 or (known is None and not sent and key not in seen_by_first):
                self._refused.add(key)
                self._known.pop(key, None)
                left_out.append((key, descriptions[0]))
            elif known is None:
                self._known[key] = (sent or descriptions)[0]
        return left_out

    def pack(
        self, own: States, device: torch.device, *, copies: Collection[Site] = (), left_out: Collection[Key] = ()
    ) -> Packed:
        """Pack a rank's states in the order of the layout.

        Args:
            own: The states of the rank.
            device: The device of the result.
            copies: The sites that are copies of another rank's.
            left_out: The keys that this rank has skipped, so that they are not part of the record.
        """
        gathered, added = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64, device=device)]
        parts = [torch.zeros(0, dtype=torch.float64, device=device)]
        for kind in self._kinds():
            there = torch.zeros(len(kind.sites), dtype=torch.float64)
            states = kind.description.initial.repeat(len(kind.sites), 1).to(device)
            places = [place for place, site in enumerate(kind.sites) if (kind.bank, site) in own]
            for place in places:
                there[place] = _COPY if kind.sites[place] in copies else _COUNTS
            for place, site in enumerate(kind.sites):
                if (kind.bank, site) in left_out:
                    there[place] = _LEFT_OUT
            if places:
                rows = [own[kind.bank, kind.sites[place]][1] for place in places]
                states[torch.tensor(places, device=device)] = torch.stack(rows).to(device)
            gathered.append(there)
            additive = kind.additive.to(device)
            parts.append(states[:, ~additive].flatten())
            added.append((states[:, additive] * (there == _COUNTS).to(device, torch.float64)[:, None]).flatten())
        return Packed(torch.cat([torch.cat(gathered).to(device), *parts]), torch.cat(added))

    def merge(self, gathered: Sequence[Tensor], added: Tensor) -> MergedStates:
        """Merge the states of all ranks.

        Args:
            gathered: The ``gathered`` part of each rank, on the CPU.
            added: The sum of the ``added`` parts across ranks, on the CPU.
        """
        kinds = self._kinds()
        counts = [len(kind.sites) for kind in kinds]
        singles = [int((~kind.additive).sum()) for kind in kinds]
        sizes = [count * single for count, single in zip(counts, singles, strict=True)]
        by_rank = [_split(each, counts, sizes) for each in gathered]
        sums = added.split(
            [count * len(kind.additive) - size for count, kind, size in zip(counts, kinds, sizes, strict=True)]
        )
        groups: dict[int, list[Collected[Site]]] = {}
        means: dict[Site, tuple[float, float]] = {}
        differing: set[Site] = set()
        for place, kind in enumerate(kinds):
            ranks = []
            for there, slots in by_rank:
                states = torch.zeros(counts[place], len(kind.additive), dtype=torch.float64)
                states[:, ~kind.additive] = slots[place].view(counts[place], -1)
                ranks.append((there[place], states))
            reduction = kind.description.reduction or self._own[kind.description.described]
            merged = _merged(reduction, ranks)
            merged[:, kind.additive] = sums[place].view(counts[place], -1)
            seen = torch.stack([there for there, _ in ranks]).amax(0)
            rows = ((seen > _ABSENT) & (seen < _LEFT_OUT)).nonzero().flatten()
            sites = [kind.sites[row] for row in rows.tolist()]
            groups.setdefault(kind.bank, []).append(Collected(reduction, sites, merged[rows]))
            if isinstance(reduction, Statistics):
                means.update(_extreme_means(reduction, kind.sites, ranks))
                differing.update(_differing(reduction, kind.sites, ranks))
        return MergedStates(groups, means, frozenset(differing))

    def _kinds(self) -> list[_Kind]:
        """Group the sites by the kind of their states."""
        kinds: dict[tuple[int, str], _Kind] = {}
        for (bank, site), description in self._known.items():
            kinds.setdefault((bank, description.described), _Kind(bank, description, [])).sites.append(site)
        return list(kinds.values())


def _shared(reduction: Reduction) -> SharedReduction:
    bare = copy.copy(reduction)
    bare._state = None
    shared = SharedReduction(reduction.described, reduction.initial(), reduction.additive_slots(), bare)
    try:
        pickle.dumps(bare)
    except Exception:  # noqa: BLE001 - a local class cannot be pickled, and its parts may raise anything
        return shared._replace(reduction=None)
    return shared


def _split(gathered: Tensor, counts: list[int], sizes: list[int]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Split a rank's data into the status and the slots of each kind."""
    there, slots = gathered.split([sum(counts), sum(sizes)])
    return there.split(counts), slots.split(sizes)


def _merged(reduction: Reduction, ranks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge the counted states of the ranks, each of shape ``[sites, width]``, in rank order."""
    total = reduction.initial().repeat(len(ranks[0][1]), 1)
    for there, states in ranks:
        rows = (there == _COUNTS).nonzero().flatten()
        part = total[rows]
        reduction.merge_states(part, states[rows])
        total[rows] = part
    return total


def _extreme_means(
    reduction: Statistics, sites: Sequence[Site], ranks: Sequence[tuple[Tensor, Tensor]]
) -> dict[Site, tuple[float, float]]:
    """Return the smallest and the largest per-rank mean of each site, over the ranks that have seen it."""
    means = torch.stack([torch.where(there > 0, reduction.means(states), torch.nan) for there, states in ranks])
    low = means.nan_to_num(nan=torch.inf).amin(0)
    high = means.nan_to_num(nan=-torch.inf).amax(0)
    nowhere = means.isnan().all(0)
    low, high = (torch.where(nowhere, torch.nan, each) for each in (low, high))
    return dict(zip(sites, zip(low.tolist(), high.tolist(), strict=True), strict=True))


def _differing(reduction: Statistics, sites: Sequence[Site], ranks: Sequence[tuple[Tensor, Tensor]]) -> list[Site]:
    """Return the replicated sites whose copies differ between ranks."""
    are_copies = torch.stack([there for there, _ in ranks]).amax(0) == _COPY
    differ = torch.zeros(len(sites), dtype=torch.bool)
    first, states = ranks[0]
    for there, others in ranks[1:]:
        differ |= (there > _ABSENT) & (first > _ABSENT) & ~reduction.are_alike(states, others)
    return [site for site, flag in zip(sites, (differ & are_copies).tolist(), strict=True) if flag]

"""How the states of all sites are packed for the way between the processes of a run."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_recorder.reductions import Collected, Reduction, Statistics
from lightning_recorder.taps import Site

__all__ = ["Key", "Layout", "MergedStates", "Packed", "States"]

Key = tuple[int, Site]
"""The number of the reduction and the site."""
States = Mapping[Key, tuple[Reduction, Tensor]]
"""The state, ``[width]``, of each of a rank's sites, and what it is a state of."""

_ABSENT, _COUNTS, _COPY = 0.0, 1.0, 2.0  # what a rank says of a site of which it has nothing, a part, or a copy


class Packed(NamedTuple):
    """One rank's states."""

    apart: Tensor
    """What every rank's is needed of, 1-d float64: whether there is a state, and the words that are not added."""
    added: Tensor
    """What is only added over the ranks, 1-d float64."""


class MergedStates(NamedTuple):
    """The states of all ranks together, on the CPU."""

    groups: dict[int, list[Collected[Site]]]
    """By the number of the reduction."""
    rank_means: dict[Site, tuple[float, float]]
    """The smallest and the largest of the means of the ranks."""
    copied: frozenset[Site]
    """The sites of which a rank has a copy."""


class _Kind(NamedTuple):
    """Sites of equal states, which lie together."""

    bank: int
    reduction: Reduction
    sites: list[Site]
    additive: Tensor
    """Which words are merged by adding, ``[width]`` bool."""


class Layout:
    """The sites whose states are packed, in an order that is the same on all ranks."""

    def __init__(self) -> None:
        self._known: dict[Key, Reduction] = {}
        self._refused: set[Key] = set()

    def unknown(self, own: States) -> list[tuple[Key, Reduction]]:
        """The sites among a rank's own that are not in the layout, each with its reduction, which has no state."""
        found = []
        for key, (reduction, _) in own.items():
            if key not in self._known and key not in self._refused:
                bare = copy.copy(reduction)
                bare._state = None
                found.append((key, bare))
        return found

    def extend(self, told: Iterable[tuple[Key, Reduction]]) -> list[tuple[Key, Reduction]]:
        """Take sites into the layout.

        Args:
            told: Those of all ranks, in one order on each.

        Returns:
            Those left out, since their states differ in kind or size between the ranks.
        """
        for key, reduction in told:
            known = self._known.setdefault(key, reduction)
            if (known.width, repr(known)) != (reduction.width, repr(reduction)):
                self._refused.add(key)
        return [(key, self._known.pop(key)) for key in sorted(self._refused & self._known.keys())]

    def pack(self, own: States, copies: Collection[Site], device: torch.device) -> Packed:
        """A rank's states in the order of the layout.

        Args:
            own: Its states.
            copies: The sites that are a copy of another rank's.
            device: Where the result lies.
        """
        apart, added = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64, device=device)]
        parts = [torch.zeros(0, dtype=torch.float64, device=device)]
        for kind in self._kinds():
            there = torch.zeros(len(kind.sites), dtype=torch.float64)
            states = kind.reduction.initial().repeat(len(kind.sites), 1).to(device)
            places = [place for place, site in enumerate(kind.sites) if (kind.bank, site) in own]
            for place in places:
                there[place] = _COPY if kind.sites[place] in copies else _COUNTS
            if places:
                rows = [own[kind.bank, kind.sites[place]][1] for place in places]
                states[torch.tensor(places, device=device)] = torch.stack(rows).to(device)
            apart.append(there)
            additive = kind.additive.to(device)
            parts.append(states[:, ~additive].flatten())
            added.append((states[:, additive] * (there == _COUNTS).to(device, torch.float64)[:, None]).flatten())
        return Packed(torch.cat([torch.cat(apart).to(device), *parts]), torch.cat(added))

    def merge(self, apart: Sequence[Tensor], added: Tensor) -> MergedStates:
        """The states of all ranks together.

        Args:
            apart: What each rank has packed, on the CPU.
            added: The sum over the ranks of the other part, on the CPU.
        """
        kinds = self._kinds()
        counts = [len(kind.sites) for kind in kinds]
        singles = [int((~kind.additive).sum()) for kind in kinds]
        sizes = [count * single for count, single in zip(counts, singles, strict=True)]
        by_rank = [_split(each, counts, sizes) for each in apart]
        sums = added.split(
            [count * len(kind.additive) - size for count, kind, size in zip(counts, kinds, sizes, strict=True)]
        )
        groups: dict[int, list[Collected[Site]]] = {}
        means: dict[Site, tuple[float, float]] = {}
        copied: set[Site] = set()
        for place, kind in enumerate(kinds):
            ranks = []
            for there, words in by_rank:
                states = torch.zeros(counts[place], len(kind.additive), dtype=torch.float64)
                states[:, ~kind.additive] = words[place].view(counts[place], -1)
                ranks.append((there[place], states))
            merged = _merged(kind.reduction, ranks)
            merged[:, kind.additive] = sums[place].view(counts[place], -1)
            seen = torch.stack([there for there, _ in ranks]).amax(0)
            copied.update(site for site, flag in zip(kind.sites, seen.tolist(), strict=True) if flag == _COPY)
            rows = seen.nonzero().flatten()
            sites = [kind.sites[row] for row in rows.tolist()]
            groups.setdefault(kind.bank, []).append(Collected(kind.reduction, sites, merged[rows]))
            if isinstance(kind.reduction, Statistics):
                means.update(_extreme_means(kind.reduction, kind.sites, ranks))
        return MergedStates(groups, means, frozenset(copied))

    def _kinds(self) -> list[_Kind]:
        """The sites by the kind of their states."""
        kinds: dict[tuple[int, str, int], _Kind] = {}
        for (bank, site), reduction in self._known.items():
            kind = (bank, repr(reduction), reduction.width)
            if kind not in kinds:
                kinds[kind] = _Kind(bank, reduction, [], reduction.additive_words())
            kinds[kind].sites.append(site)
        return list(kinds.values())


def _split(apart: Tensor, counts: list[int], sizes: list[int]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """What a rank says of each kind, and its words."""
    there, words = apart.split([sum(counts), sum(sizes)])
    return there.split(counts), words.split(sizes)


def _merged(reduction: Reduction, ranks: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """States of the ranks, ``[sites, width]`` each, merged in the order of the ranks, where they count."""
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
    """The smallest and the largest of the means of the ranks that have seen a site."""
    means = torch.stack([torch.where(there > 0, reduction.means(states), torch.nan) for there, states in ranks])
    low = means.nan_to_num(nan=torch.inf).amin(0)
    high = means.nan_to_num(nan=-torch.inf).amax(0)
    nowhere = means.isnan().all(0)
    low, high = (torch.where(nowhere, torch.nan, each) for each in (low, high))
    return dict(zip(sites, zip(low.tolist(), high.tolist(), strict=True), strict=True))

"""How the states of all sites are packed for the way between the processes of a run."""

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

__all__ = ["Key", "Layout", "MergedStates", "Packed", "States", "Told"]

Key = tuple[int, Site]
"""The number of the reduction and the site."""
States = Mapping[Key, tuple[Reduction, Tensor]]
"""The state, ``[width]``, of each of a rank's sites, and what it is a state of."""

# What a rank says of a site: that it has nothing, a part, a copy of what another one has, or has left it out.
_ABSENT, _COUNTS, _COPY, _LEFT_OUT = 0.0, 1.0, 2.0, 3.0


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
    apart: frozenset[Site]
    """The sites of which ranks should have the same and do not."""


class Told(NamedTuple):
    """What the ranks have to know of a site."""

    described: str
    """Its reduction, in words."""
    initial: Tensor
    """The state of an empty stream, ``[width]``."""
    additive: Tensor
    """Which words are merged by adding, ``[width]`` bool."""
    reduction: Reduction | None
    """The reduction, without a state; none where it cannot be sent to another process."""


class _Kind(NamedTuple):
    """Sites of equal states, which lie together."""

    bank: int
    about: Told
    sites: list[Site]

    @property
    def additive(self) -> Tensor:
        """Which words are merged by adding, ``[width]`` bool."""
        return self.about.additive


class Layout:
    """The sites whose states are packed, in an order that is the same on all ranks."""

    def __init__(self) -> None:
        self._known: dict[Key, Told] = {}
        self._refused: set[Key] = set()
        self._own: dict[str, Reduction] = {}  # this rank's reductions, by their words

    def unknown(self, own: States) -> list[tuple[Key, Told]]:
        """The sites among a rank's own that are not in the layout, with what other ranks have to know of them."""
        found = []
        for key, (reduction, _) in own.items():
            if key not in self._known and key not in self._refused:
                told = _told_of(reduction)
                self._own.setdefault(told.described, reduction)
                found.append((key, told))
        return found

    def extend(self, told: Sequence[Sequence[tuple[Key, Told]]]) -> list[tuple[Key, Told]]:
        """Take sites into the layout.

        Args:
            told: Those of all ranks, the first one's first, the same on each rank.

        Returns:
            Those left out, since their states differ in kind or size between the ranks, or since the first rank has
            not seen them and cannot be sent their reduction.
        """
        by_key: dict[Key, list[Told]] = {}
        for key, about in itertools.chain.from_iterable(told):
            by_key.setdefault(key, []).append(about)
        seen_by_first = {key for key, _ in told[0]}
        left_out = []
        for key, abouts in by_key.items():
            known = self._known.get(key)
            alike = {about.described for about in (*abouts, *([] if known is None else [known]))}
            sent = [about for about in abouts if about.reduction is not None]
            if len(alike) > 1 or (known is None and not sent and key not in seen_by_first):
                self._refused.add(key)
                self._known.pop(key, None)
                left_out.append((key, abouts[0]))
            elif known is None:
                self._known[key] = (sent or abouts)[0]
        return left_out

    def pack(
        self, own: States, device: torch.device, *, copies: Collection[Site] = (), left_out: Collection[Key] = ()
    ) -> Packed:
        """A rank's states in the order of the layout.

        Args:
            own: Its states.
            device: Where the result lies.
            copies: The sites that are a copy of another rank's.
            left_out: What this rank has left out, so that there is no record of it.
        """
        apart, added = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64, device=device)]
        parts = [torch.zeros(0, dtype=torch.float64, device=device)]
        for kind in self._kinds():
            there = torch.zeros(len(kind.sites), dtype=torch.float64)
            states = kind.about.initial.repeat(len(kind.sites), 1).to(device)
            places = [place for place, site in enumerate(kind.sites) if (kind.bank, site) in own]
            for place in places:
                there[place] = _COPY if kind.sites[place] in copies else _COUNTS
            for place, site in enumerate(kind.sites):
                if (kind.bank, site) in left_out:
                    there[place] = _LEFT_OUT
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
        differing: set[Site] = set()
        for place, kind in enumerate(kinds):
            ranks = []
            for there, words in by_rank:
                states = torch.zeros(counts[place], len(kind.additive), dtype=torch.float64)
                states[:, ~kind.additive] = words[place].view(counts[place], -1)
                ranks.append((there[place], states))
            reduction = kind.about.reduction or self._own[kind.about.described]
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
        """The sites by the kind of their states."""
        kinds: dict[tuple[int, str], _Kind] = {}
        for (bank, site), about in self._known.items():
            kinds.setdefault((bank, about.described), _Kind(bank, about, [])).sites.append(site)
        return list(kinds.values())


def _told_of(reduction: Reduction) -> Told:
    bare = copy.copy(reduction)
    bare._state = None
    told = Told(reduction.described, reduction.initial(), reduction.additive_words(), bare)
    try:
        pickle.dumps(bare)
    except Exception:  # noqa: BLE001 - as of a class that is defined in a function, or whatever its parts raise
        return told._replace(reduction=None)
    return told


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


def _differing(reduction: Statistics, sites: Sequence[Site], ranks: Sequence[tuple[Tensor, Tensor]]) -> list[Site]:
    """The sites of which a rank has a copy that is not what the others have."""
    are_copies = torch.stack([there for there, _ in ranks]).amax(0) == _COPY
    differ = torch.zeros(len(sites), dtype=torch.bool)
    first, states = ranks[0]
    for there, others in ranks[1:]:
        differ |= (there > _ABSENT) & (first > _ABSENT) & ~reduction.are_alike(states, others)
    return [site for site, flag in zip(sites, (differ & are_copies).tolist(), strict=True) if flag]

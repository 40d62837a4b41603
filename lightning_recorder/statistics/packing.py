"""Packing the states of one or more ranks into one message, and merging two sets of states."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_recorder.errors import describe_error
from lightning_recorder.reductions import Collected, Reduction, Statistics
from lightning_recorder.statistics.snapshot import Snapshot
from lightning_recorder.taps import Site

__all__ = ["Contribution", "Decoder", "Encoder", "Key"]

Key = tuple[int, Site]
"""The index of the reduction and the site."""

# The flags of a site: its state is merged, or its state is a copy of another rank's state.
_COUNTS, _COPY = 1, 2
_ALIGNMENT = 8  # bytes


class _Kind(NamedTuple):
    """The states of all sites with the same reduction."""

    bank: int
    described: str
    """The reduction as text, the same on all ranks."""
    reduction: Reduction | None
    """The reduction without a state, or None if it cannot be sent to this rank."""
    sites: tuple[Site, ...]
    flags: Tensor
    """The flags of each site, combined over the ranks; uint8 of shape ``[sites]``."""
    states: Tensor
    """The merged states, ``[sites, width]`` float64. At a site where all ranks have copies, the lowest rank's state."""
    means: Tensor
    """The smallest and the largest per-rank mean, float64 of shape ``[2, sites]``; NaN if unknown."""
    diverged: Tensor
    """True for sites whose copies differ, bool of shape ``[sites]``."""


@dataclass
class Contribution:
    """The merged states of some ranks.

    Args:
        kinds: The states by the index and the text of their reduction.
        absent: The ranks without states, because their recorder has failed or because they cannot be reached.
        left_out: The sites at which a reduction is skipped on any rank.
        refused: The sites whose states cannot be merged, with the reason.
        values: A pickled object for each rank, by rank.
        error: The error that this rank raised when it packed its states.
    """

    kinds: dict[tuple[int, str], _Kind] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    left_out: frozenset[Key] = frozenset()
    refused: dict[Key, str] = field(default_factory=dict)
    values: dict[int, bytes] = field(default_factory=dict)
    error: Exception | None = None

    @classmethod
    def of(
        cls, snapshot: Snapshot | None, rank: int, *, copies: Collection[Site] = (), value: object = None
    ) -> Contribution:
        """Return the contribution of one rank. If its states cannot be packed, the rank counts as absent."""
        if snapshot is None:
            return cls(absent=(rank,))
        try:
            found = cls(values={} if value is None else {rank: pickle.dumps(value)})
            for bank, groups in enumerate(snapshot.groups):
                for group in groups:
                    found._add(_kind(bank, group, copies))
            skipped = enumerate(snapshot.left_out)
            found.left_out = frozenset((bank, site) for bank, sites in skipped for site in sites)
        except Exception as error:  # noqa: BLE001 - the caller reports the error; other ranks must not wait
            return cls(absent=(rank,), error=error)
        return found

    @property
    def is_empty(self) -> bool:
        """True if there is no state."""
        return not self.kinds

    def merge(self, other: Contribution) -> None:
        """Merge the contribution of higher ranks into this one, in place."""
        self.absent += other.absent
        self.left_out |= other.left_out
        self.values |= other.values
        for key, why in other.refused.items():
            self.refused.setdefault(key, why)
        for kind in other.kinds.values():
            self._add(kind)

    def _add(self, kind: _Kind) -> None:
        for (bank, described), mine in self.kinds.items():
            if bank == kind.bank and described != kind.described:
                for site in set(mine.sites).intersection(kind.sites):
                    self.refused[bank, site] = (
                        f"{described.partition(' ')[0]}: the tensor has another shape on each rank"
                    )
        key = kind.bank, kind.described
        mine = self.kinds.setdefault(key, kind)
        if mine is kind:
            return
        try:
            self.kinds[key] = _merged(mine, kind)
        except Exception as error:  # noqa: BLE001 - a reduction of the user may raise anything
            name = kind.described.partition(" ")[0]
            self.refused |= {
                (kind.bank, site): f"{name}: {describe_error(error)}" for site in (*mine.sites, *kind.sites)
            }

    def snapshot(self, own: Snapshot | None, refused: Collection[Key] = ()) -> Snapshot | None:
        """Return the merged states as a snapshot in the format of the first rank.

        Args:
            own: The states of the first rank, or None if its recorder has failed.
            refused: The sites to leave out.
        """
        if self.is_empty:
            return own
        banks = 1 + max(bank for bank, _ in self.kinds)
        if own is None:  # the order of the sites is unknown
            own = Snapshot((), [], [frozenset()] * banks)
        groups: list[list[Collected[Site]]] = [[] for _ in range(max(banks, len(own.groups)))]
        means: dict[Site, tuple[float, float]] = {}
        diverged: set[Site] = set()
        dropped = self.left_out.union(refused)
        for kind in self.kinds.values():
            rows = [row for row, site in enumerate(kind.sites) if (kind.bank, site) not in dropped]
            if kind.reduction is None:
                continue
            sites = [kind.sites[row] for row in rows]
            whole = len(rows) == len(kind.sites)
            groups[kind.bank].append(Collected(kind.reduction, sites, kind.states if whole else kind.states[rows]))
            if isinstance(kind.reduction, Statistics):
                means |= zip(kind.sites, zip(*kind.means.tolist(), strict=True), strict=True)
                diverged.update(site for site, flag in zip(kind.sites, kind.diverged.tolist(), strict=True) if flag)
        return Snapshot(
            own.names,
            groups,
            own.left_out,
            rank_means=means,
            diverged=frozenset(diverged),
            kinds=own.kinds,
            warned=own.warned,
            strict=own.strict,
        )


def _kind(bank: int, group: Collected[Site], copies: Collection[Site]) -> _Kind:
    reduction, states = group.reduction, group.states
    flags = torch.tensor([_COPY if site in copies else _COUNTS for site in group.keys], dtype=torch.uint8, device="cpu")
    bare = copy.copy(reduction)
    bare._state = None
    means = (
        reduction.means(states)
        if isinstance(reduction, Statistics)
        else torch.full((len(states),), torch.nan, device="cpu")
    )
    return _Kind(
        bank,
        reduction.described,
        bare,
        tuple(group.keys),
        flags,
        states,
        torch.stack([means, means]).double(),
        torch.zeros(len(states), dtype=torch.bool, device="cpu"),
    )


def _merged(one: _Kind, other: _Kind) -> _Kind:
    """Merge the states of two sets of ranks for one reduction. The ranks of ``one`` are the lower ranks."""
    if one.sites != other.sites:
        sites = tuple(dict.fromkeys((*one.sites, *other.sites)))
        one, other = _spread(one, sites), _spread(other, sites)
    reduction = one.reduction or other.reduction
    if reduction is None:
        raise TypeError("its class cannot be pickled")
    states, counts, theirs = one.states.clone(), one.flags & _COUNTS, other.flags & _COUNTS
    diverged = one.diverged | other.diverged
    if isinstance(reduction, Statistics):
        copied = ((one.flags | other.flags) & _COPY > 0) & (one.flags > 0) & (other.flags > 0)
        if copied.any():
            diverged = diverged | (copied & ~reduction.are_alike(states, other.states))
    if bool(counts.all() & theirs.all()):
        reduction.merge_ranks(states, other.states)
    else:
        both = (counts & theirs).nonzero().flatten()
        part = states[both]
        reduction.merge_ranks(part, other.states[both])
        states[both] = part
        new = ((theirs > 0) & (counts == 0) | (one.flags == 0)).nonzero().flatten()
        states[new] = other.states[new]
    means = torch.stack([torch.fmin(one.means[0], other.means[0]), torch.fmax(one.means[1], other.means[1])])
    return one._replace(
        reduction=reduction, flags=one.flags | other.flags, states=states, means=means, diverged=diverged
    )


def _spread(kind: _Kind, sites: tuple[Site, ...]) -> _Kind:
    """Return the states spread to more sites. The additional sites have no state."""
    places = {site: place for place, site in enumerate(sites)}
    rows = torch.tensor([places[site] for site in kind.sites], dtype=torch.long, device="cpu")
    flags = torch.zeros(len(sites), dtype=torch.uint8, device="cpu")
    states = torch.zeros(len(sites), kind.states.shape[1], dtype=kind.states.dtype, device="cpu")
    means = torch.full((2, len(sites)), torch.nan, dtype=torch.float64, device="cpu")
    diverged = torch.zeros(len(sites), dtype=torch.bool, device="cpu")
    flags[rows], states[rows], means[:, rows], diverged[rows] = kind.flags, kind.states, kind.means, kind.diverged
    return kind._replace(sites=sites, flags=flags, states=states, means=means, diverged=diverged)


class _Shape(NamedTuple):
    """A :class:`_Kind` without its states. Rarely differs between two messages of a rank."""

    bank: int
    described: str
    reduction: bytes | None
    width: int
    sites: tuple[Site, ...]


class Encoder:
    """Encodes contributions as messages for one receiver, which must decode them in the same order.

    The description of the sites is sent only if it has changed. Most slots of a state, such as the bins of a histogram,
    are usually zero. Only the indices and values of the nonzero slots are sent if that is shorter.
    """

    def __init__(self) -> None:
        self._known: dict[str, bytes] = {}
        self._pickled: dict[str, bytes | None] = {}

    def encode(self, scope: str, contribution: Contribution) -> bytearray:
        """Return the contribution as a message."""
        kinds = list(contribution.kinds.values())
        shapes = pickle.dumps([self._shape(kind) for kind in kinds])
        is_known = self._known.get(scope) == shapes
        self._known[scope] = shapes
        parts = [part for each in kinds for part in (each.flags, each.diverged, each.means, *_thinned(each.states))]
        about: dict[str, Any] = {
            "absent": contribution.absent,
            "left_out": contribution.left_out,
            "refused": contribution.refused,
            "values": contribution.values,
            "shapes": None if is_known else shapes,
            "sizes": [part.numel() for part in parts],
        }
        head = pickle.dumps(about)
        message = bytearray(len(head).to_bytes(8, "little") + head)
        for part in parts:
            message += bytes(-len(message) % _ALIGNMENT)
            message += part.contiguous().numpy().tobytes()
        return message

    def _shape(self, kind: _Kind) -> _Shape:
        if kind.described not in self._pickled:
            try:
                self._pickled[kind.described] = pickle.dumps(kind.reduction)
            except Exception:  # noqa: BLE001 - a local class cannot be pickled, and an attribute may raise anything
                self._pickled[kind.described] = None
        return _Shape(kind.bank, kind.described, self._pickled[kind.described], kind.states.shape[1], kind.sites)


class Decoder:
    """Decodes the messages of one sender."""

    def __init__(self) -> None:
        self._known: dict[str, list[_Shape]] = {}

    def decode(self, scope: str, message: bytearray, own: Contribution) -> Contribution:
        """Return the contribution in a message.

        Args:
            scope: The scope that the sender passed to :meth:`Encoder.encode`.
            message: The message.
            own: The states of this rank. Its reductions replace reductions that the sender could not pickle.
        """
        end = 8 + int.from_bytes(message[:8], "little")
        about = pickle.loads(message[8:end])
        if about["shapes"] is not None:
            self._known[scope] = pickle.loads(about["shapes"])
        reader = _Reader(message, end, about["sizes"])
        found = Contribution(
            absent=about["absent"], left_out=about["left_out"], refused=about["refused"], values=about["values"]
        )
        for shape in self._known.get(scope, []):
            mine = own.kinds.get((shape.bank, shape.described))
            found.kinds[shape.bank, shape.described] = reader.kind(shape, None if mine is None else mine.reduction)
        return found


class _Reader:
    """Reads the tensors of a message in order."""

    def __init__(self, message: bytearray, start: int, sizes: list[int]) -> None:
        self._message, self._start, self._sizes = message, start, iter(sizes)

    def take(self, dtype: torch.dtype) -> Tensor:
        size = next(self._sizes)
        start = -(-self._start // _ALIGNMENT) * _ALIGNMENT
        self._start = start + size * dtype.itemsize
        if not size:
            return torch.zeros(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._message, dtype=dtype, count=size, offset=start)

    def kind(self, shape: _Shape, own: Reduction | None) -> _Kind:
        sites = len(shape.sites)
        flags, diverged, means = self.take(torch.uint8), self.take(torch.bool), self.take(torch.float64).view(2, sites)
        places, states = self.take(torch.int32), self.take(torch.float64)
        if len(places):
            values, states = states, torch.zeros(sites * shape.width, dtype=torch.float64, device="cpu")
            states[places.long()] = values
        states = states.view(sites, shape.width)
        reduction = own if shape.reduction is None else pickle.loads(shape.reduction)
        return _Kind(shape.bank, shape.described, reduction, shape.sites, flags, states, means, diverged)


def _thinned(states: Tensor) -> list[Tensor]:
    """Return the int32 indices and the values of the nonzero slots; no indices and all values if that is shorter."""
    values = states.flatten()
    places = values.view(torch.int64).nonzero().flatten()  # compared as integers, so that -0.0 is kept
    if len(places) and 3 * len(places) < 2 * len(values) < 1 << 32:
        return [places.int(), values[places]]
    return [torch.zeros(0, dtype=torch.int32, device="cpu"), values]

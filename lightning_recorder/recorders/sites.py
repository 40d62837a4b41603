"""The statistics of all sites: where their tensors go, whoever brings them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_recorder.errors import ArgumentError, describe_error, tell
from lightning_recorder.reductions import (
    SCALAR_STATISTICS,
    Collected,
    Combined,
    Histogram,
    Reduction,
    StateBank,
    Statistics,
    Values,
    add_tensor,
    row_state,
    to_histogram,
)
from lightning_recorder.taps import Site
from lightning_recorder.unrecorded import unrecorded

__all__ = ["RANK_STATISTICS", "SHOWN_STATISTICS", "SiteStates", "SiteStatistics", "Snapshot"]

RANK_STATISTICS = ("rank_mean_min", "rank_mean_max")
"""The smallest and the largest of the means that the ranks have each for itself, where there are several."""

SHOWN_STATISTICS = (*SCALAR_STATISTICS, *RANK_STATISTICS)
"""What can be chosen to be shown of any site."""

_BINS = "histogram"

_UNSHOWN = ("sum", "variance")  # they follow from the others


@dataclass(frozen=True)
class SiteStatistics:
    """What one site showed between two resets, on the host.

    Args:
        scalars: Statistic to value; the names are those of ``SHOWN_STATISTICS`` and those that further reductions give
            as one number.
        bins: Counts of the fixed bins, ``[2048]`` int64; see ``ExponentHistogram``.
        tensors: Statistic to what further reductions give as more than one number, float64.
        dtype: That of the latest tensor; ``None`` if only another rank has seen one.
        shape: Its shape.
    """

    scalars: Mapping[str, float]
    bins: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None

    @cached_property
    def histogram(self) -> Histogram:
        """The counts between their edges, without the empty ends."""
        return to_histogram(self.scalars, self.bins)

    @property
    def abs_max(self) -> float:
        """The largest finite value without its sign; NaN when there is none."""
        return max(abs(self.scalars["min"]), abs(self.scalars["max"]))

    def __getattr__(self, name: str) -> float:
        # So that a condition reads as `seen.rms > 10`.
        scalars = self.__dict__.get("scalars", {})
        if name in scalars:
            return float(scalars[name])
        raise AttributeError(f"no statistic {name!r} was recorded, but {', '.join(scalars)}", name=name, obj=self)


@dataclass(frozen=True)
class Snapshot:
    """What the sites held at one time.

    Args:
        names: The modules, in order.
        groups: For each reduction, the default statistics first, the states of its sites.
        left_out: For each reduction the sites at which it is left out.
        rank_means: The smallest and the largest mean of a rank, of the sites that several ranks have seen.
        apart: The sites of which ranks should have the same and do not.
        kinds: Dtype and shape of the latest tensor of each site, in the order in which the sites were first seen.
        told: The places of the reductions of which it was said that they cannot be summarised; grows.
        strict: Raise what goes wrong in a further reduction instead of warning and leaving it out.
    """

    names: tuple[str, ...]
    groups: list[list[Collected[Site]]]
    left_out: Sequence[frozenset[Site]]
    rank_means: Mapping[Site, tuple[float, float]] = field(default_factory=dict)
    apart: frozenset[Site] = frozenset()
    kinds: Mapping[Site, tuple[torch.dtype, torch.Size | None]] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    strict: bool = False

    @torch.no_grad()
    def statistics(self) -> dict[Site, SiteStatistics]:
        """The statistics of every site that was seen, in the order of the modules."""
        found: dict[Site, SiteStatistics] = {}
        for group in self.groups[0] if self.groups else ():
            for site, scalars, tensors in _by_site(group):
                # A row that was handed out for an earlier step and has seen nothing since is no result.
                if scalars["count"] or scalars["nan_count"] or scalars["inf_count"]:
                    if site in self.rank_means:
                        scalars |= zip(RANK_STATISTICS, self.rank_means[site], strict=True)
                    kind = self.kinds.get(site, (None, None))
                    found[site] = SiteStatistics(scalars, tensors[_BINS], {}, *kind)
        for place, groups in list(enumerate(self.groups))[1:]:
            for site, scalars, tensors in self._summaries(place, groups):
                if site in found and site not in self.left_out[place]:
                    seen = found[site]
                    scalars, tensors = {**seen.scalars, **scalars}, {**seen.tensors, **tensors}
                    found[site] = replace(seen, scalars=scalars, tensors=tensors)
        order = {name: position for position, name in enumerate(self.names)}
        return {site: found[site] for site in sorted(found, key=lambda site: order.get(site.name, len(order)))}

    def _summaries(
        self, place: int, groups: list[Collected[Site]]
    ) -> list[tuple[Site, dict[str, float], dict[str, Tensor]]]:
        """What a further reduction says of its sites, nothing if it cannot."""
        try:
            return [each for group in groups for each in _by_site(group)]
        except Exception as error:
            if self.strict:
                raise
            if place not in self.told:
                self.told.add(place)
                tell(f"{groups[0].reduction} is left out, its summarize failed: {describe_error(error)}")
            return []

    def state_dict(self) -> dict[str, Any]:
        """The states as :meth:`SiteStates.load_state_dict` takes them, on one device."""
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
        }


class SiteStates:
    """A :class:`~lightning_recorder.Statistics` row, and one of each further reduction, for each site.

    Args:
        extra: Further reductions of the same tensors. One that cannot take a tensor, as by its shape, is left out at
            that site, which one warning says.
        sample: How many values of a tensor are counted in the histogram; by default all.
        quantiles: Shares for which the quantiles are read from the histogram, as scalars named ``quantile_<share>``.
        strict: Raise what goes wrong in a further reduction.

    Raises:
        ArgumentError: If an argument can never work, or two reductions give a statistic of the same name.

    Note:
        Nothing but :meth:`snapshot` and :meth:`state_dict` waits for the device.
    """

    def __init__(
        self,
        *,
        extra: Iterable[Reduction] = (),
        sample: int | None = None,
        quantiles: Iterable[float] = (),
        strict: bool = False,
    ) -> None:
        statistics = Statistics(sample=sample, quantiles=quantiles)
        reductions = [statistics, *((extra,) if isinstance(extra, Reduction) else extra)]
        Combined(reductions)  # refuses what is no reduction, and equal names
        self.strict = strict
        self._reductions = reductions
        self._sample, self._quantiles = sample, tuple(statistics.parts[-1].settings["quantiles"])
        with unrecorded():
            # Each of its own, so that one which a tensor does not suit costs none of the others.
            self._banks: list[StateBank[Site]] = [StateBank(reduction) for reduction in reductions]
        self._left_out: list[set[Site]] = [set() for _ in reductions]
        self._kinds: dict[Site, tuple[torch.dtype, torch.Size | None]] = {}
        self._rows: dict[Site, Tensor] = {}
        self._told: set[int] = set()

    def fresh(self) -> SiteStates:
        """Others of the same kind, which have seen nothing."""
        return SiteStates(
            extra=self._reductions[1:], sample=self._sample, quantiles=self._quantiles, strict=self.strict
        )

    @property
    def described(self) -> str:
        """The reductions with their settings, the same text in every process."""
        return ", ".join(reduction.described for reduction in self._reductions)

    @property
    def carries(self) -> bool:
        """Whether something is kept when a new stream begins, as the last tensor for the change to the next."""
        return any(reduction.ordered for reduction in self._reductions)

    @property
    def sites(self) -> list[Site]:
        """The sites that have a state."""
        return self._banks[0].keys

    @property
    def nbytes(self) -> int:
        """Bytes of state on all devices."""
        return sum(bank.nbytes for bank in self._banks)

    def add(self, site: Site, tensor: Tensor, factor: float = 1.0) -> None:
        """Take a tensor, multiplied by a factor, into the statistics of a site."""
        if tensor.device.type == "meta":
            return
        values = Values(tensor, factor)
        self._banks[0].add(site, values)
        self._kinds[site] = (tensor.dtype, None if tensor.is_nested else tensor.shape)
        for place in range(1, len(self._banks)):
            if site not in self._left_out[place]:
                self._add_further(place, site, values)

    def add_at_once(self, site: Site, tensor: Tensor, factor: float = 1.0) -> bool:
        """Take a tensor, which may be part of a graph, without any operation of torch, and answer whether it was taken.

        It can be where there is nothing but the default statistics, which are computed on the CPU in one pass.
        """
        row = self._rows.get(site)
        if row is None:
            row = None if len(self._banks) > 1 else self._banks[0].row(site)
            if row is None:
                return False
            self._rows[site] = row
        kind = tensor.dtype, tensor.shape  # raises before anything is taken, if it does
        if not add_tensor(row, tensor, factor, self._sample):
            return False
        self._kinds[site] = kind
        return True

    def _add_further(self, place: int, site: Site, values: Values) -> None:
        try:
            self._banks[place].add(site, values)
        except Exception as error:
            if self.strict:
                raise
            if not self._left_out[place]:
                tell(
                    f"{self._banks[place].reduction} could not take {site.path!r} of module {site.name!r}: "
                    f"{describe_error(error)}. It is left out there, and wherever else that happens."
                )
            self._left_out[place].add(site)

    def revive(self) -> None:
        """Record again what is left out."""
        for left_out in self._left_out:
            left_out.clear()

    @torch.no_grad()
    def snapshot(self, names: Iterable[str], device: torch.device | str = "cpu") -> Snapshot:
        """Copies of the states as they are now, of which another thread can make the statistics.

        Args:
            names: The modules, in order.
            device: Where the copies lie. Those on the host wait for the device of the tensors.
        """
        groups = [bank.collect(device) for bank in self._banks]
        left_out = [frozenset(sites) for sites in self._left_out]
        return Snapshot(tuple(names), groups, left_out, kinds=dict(self._kinds), told=self._told, strict=self.strict)

    @torch.no_grad()
    def saved(self) -> list[Any]:
        """A copy of all states where they lie, for :meth:`restore`."""
        return [bank.saved() for bank in self._banks]

    @torch.no_grad()
    def restore(self, saved: list[Any]) -> None:
        """Put back what was saved."""
        for bank, states in zip(self._banks, saved, strict=True):
            bank.restore(states)

    @torch.no_grad()
    def reset(self) -> None:
        """Forget what was recorded."""
        for bank in self._banks:
            bank.reset()

    @torch.no_grad()
    def forget(self) -> None:
        """Forget what was recorded, what is carried from one stream to the next as well."""
        self.restore([[] for _ in self._banks])

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The states as plain Python and tensors on the CPU; loaded again, they go on to the bit."""
        return {
            "banks": [bank.state_dict() for bank in self._banks],
            "left_out": [[list(site) for site in sorted(sites)] for sites in self._left_out],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a state.

        Args:
            state_dict: As :meth:`state_dict` gives it.
            device: Where the states go that were not on a CPU.

        Raises:
            ArgumentError: If it is not the state of these reductions.
        """
        banks = state_dict.get("banks")
        if not isinstance(banks, list) or len(banks) != len(self._banks):
            raise ArgumentError("the saved state is that of other reductions")
        for bank, rows in zip(self._banks, banks, strict=True):
            bank.load_state_dict(rows, lambda key: Site(*key), device)
        for left_out, sites in zip(self._left_out, state_dict["left_out"], strict=True):
            left_out.update(Site(*site) for site in sites)


# torch shares operations on more words than these among its threads; in the thread that writes they would compete with
# those of the training.
_FEW_WORDS = (1 << 15) - 1


def _by_site(group: Collected[Site]) -> Iterator[tuple[Site, dict[str, float], dict[str, Tensor]]]:
    """By site the numbers and the tensors of states that are summarised together."""
    some = max(1, _FEW_WORDS // max(1, group.reduction.width))
    for first in range(0, len(group.keys), some):
        summary = group.reduction.summarize(group.states[first : first + some])
        if _BINS in summary:
            summary[_BINS] = summary[_BINS].long()
        columns = {name: value.tolist() for name, value in summary.items() if value.dim() == 1 and name not in _UNSHOWN}
        tensors = {name: value.unbind() for name, value in summary.items() if value.dim() > 1}
        for row, site in enumerate(group.keys[first : first + some]):
            yield (
                site,
                {name: column[row] for name, column in columns.items()},
                {name: parts[row] for name, parts in tensors.items()},
            )

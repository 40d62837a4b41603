"""The statistics of every tapped tensor, accumulated over batches without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_recorder.errors import describe_error, tell
from lightning_recorder.reductions import (
    Collected,
    Combined,
    Histogram,
    Reduction,
    StateBank,
    Statistics,
    Values,
    to_histogram,
)
from lightning_recorder.taps import OutputTap, Site, Tap
from lightning_recorder.unrecorded import unrecorded

_UNSHOWN = ("sum", "variance")  # they follow from the others

__all__ = ["SiteStatistics", "Snapshot", "StatisticsRecorder"]


@dataclass(frozen=True)
class SiteStatistics:
    """What one site showed between two resets, on the host.

    Args:
        scalars: Statistic to value; the names are those of ``SCALAR_STATISTICS`` and those that further reductions give
            as one number.
        bins: Counts of the fixed bins, ``[2048]`` int64; see ``ExponentHistogram``.
        tensors: Statistic to what further reductions give as more than one number, float64.
    """

    scalars: Mapping[str, float]
    bins: Tensor
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def histogram(self) -> Histogram:
        """The counts between their edges, without the empty ends."""
        return to_histogram(self.scalars, self.bins)


@dataclass(frozen=True)
class Snapshot:
    """What a recorder held at one time.

    Args:
        names: The modules, in order.
        groups: The states of their sites.
        further: The same of each further reduction, with the sites at which it is left out.
        told: The places of those in ``further`` of which it was said that they cannot be summarised; grows.
        strict: Raise what goes wrong in a further reduction instead of warning and leaving it out.
    """

    names: tuple[str, ...]
    groups: list[Collected[Site]]
    further: list[tuple[Reduction, list[Collected[Site]], frozenset[Site]]] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    strict: bool = False

    @torch.no_grad()
    def statistics(self) -> dict[Site, SiteStatistics]:
        """The statistics of every site that was seen, in the order of the modules."""
        found: dict[Site, SiteStatistics] = {}
        for group in self.groups:
            for site, scalars, tensors in _by_site(group):
                # A row that was handed out for an earlier step and has seen nothing since is no result.
                if scalars["count"] or scalars["nan_count"] or scalars["inf_count"]:
                    found[site] = SiteStatistics(scalars, tensors["histogram"].long(), {})
        for place, (reduction, groups, left_out) in enumerate(self.further):
            try:
                summaries = [each for group in groups for each in _by_site(group)]
            except Exception as error:
                if self.strict:
                    raise
                if place not in self.told:
                    self.told.add(place)
                    tell(f"{reduction} is left out, its summarize failed: {describe_error(error)}")
                continue
            for site, scalars, tensors in summaries:
                if site in found and site not in left_out:
                    seen = found[site]
                    scalars, tensors = {**seen.scalars, **scalars}, {**seen.tensors, **tensors}
                    found[site] = replace(seen, scalars=scalars, tensors=tensors)
        order = {name: position for position, name in enumerate(self.names)}
        return {site: found[site] for site in sorted(found, key=lambda site: order[site.name])}


class StatisticsRecorder:
    """A tap with a :class:`~lightning_recorder.Statistics` row for each site, as a context manager.

    Leaving the context takes the hooks off and keeps what was recorded; entering it again goes on. All calls of a
    module merge into its site.

    Args:
        modules: The modules by name, as ``Selection.resolve`` gives them.
        tap: Which tensors: the class of any :class:`~lightning_recorder.Tap`.
        extra: Further reductions of the same tensors. One that cannot take a tensor, as by its shape, is left out at
            that site, which one warning says.
        sample: How many values of a tensor are counted in the histogram; by default all.
        quantiles: Shares for which the quantiles are read from the histogram, as scalars named ``quantile_<share>``.
        condition: As for :class:`~lightning_recorder.Tap`.
        strict: As for :class:`~lightning_recorder.Tap`.

    Raises:
        ArgumentError: If an argument can never work, or two reductions give a statistic of the same name.

    Note:
        While the hooks are on nothing waits for the device. :meth:`collect` does, once per device.

    Example:
        >>> from lightning_recorder import Norms
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> recorder = StatisticsRecorder({"relu": net[1]}, extra=[Norms()])
        >>> with recorder:
        ...     for batch in torch.eye(2), torch.ones(3, 2):
        ...         _ = net(batch)
        >>> scalars = recorder.collect()[Site("relu", "out")].scalars
        >>> scalars["count"], scalars["abs_max"] == scalars["max"]
        (10.0, True)
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        tap: type[Tap] = OutputTap,
        *,
        extra: Iterable[Reduction] = (),
        sample: int | None = None,
        quantiles: Iterable[float] = (),
        condition: Callable[[], object] | None = None,
        strict: bool = False,
    ) -> None:
        self.factor = 1.0
        """What each tensor is multiplied by before it is reduced: the inverse of a loss scale, for gradients."""
        statistics = Statistics(sample=sample, quantiles=quantiles)
        further = (extra,) if isinstance(extra, Reduction) else tuple(extra)
        Combined([statistics, *further])  # refuses what is no reduction, and equal names
        self.strict = strict
        with unrecorded():
            self._bank: StateBank[Site] = StateBank(statistics)
            # Of their own, so that one which a tensor does not suit costs none of the others.
            self._further: list[StateBank[Site]] = [StateBank(reduction) for reduction in further]
        self._told: set[int] = set()
        self._left_out: list[set[Site]] = [set() for _ in further]
        self._tap = tap(modules, self._receive, condition=condition, strict=strict)

    def _receive(self, site: Site, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        values = Values(tensor, self.factor)
        self._bank.add(site, values)
        for bank, left_out in zip(self._further, self._left_out, strict=True):
            if site not in left_out:
                try:
                    bank.add(site, values)
                except Exception as error:
                    if self.strict:
                        raise
                    if not left_out:
                        tell(
                            f"{bank.reduction} could not take {site.path!r} of module {site.name!r}: "
                            f"{describe_error(error)}. It is left out there, and wherever else that happens."
                        )
                    left_out.add(site)

    @property
    def failed(self) -> frozenset[str]:
        """The names of the modules that are left alone, since recording them failed."""
        return self._tap.failed

    def revive(self) -> None:
        """Record again what is left alone or left out."""
        self._tap.revive()
        for left_out in self._left_out:
            left_out.clear()

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The tapped modules by name."""
        return self._tap.modules

    @property
    def attached(self) -> bool:
        """Whether the hooks are on."""
        return self._tap.attached

    @property
    def nbytes(self) -> int:
        """Bytes of state on all devices."""
        return sum(bank.nbytes for bank in (self._bank, *self._further))

    def attach(self) -> None:
        """Put the hooks on."""
        self._tap.attach()

    def pause(self) -> None:
        """Record nothing until :meth:`attach`; the hooks stay on, which for recording every step is faster."""
        self._tap.pause()

    def remove(self) -> None:
        """Take the hooks off."""
        self._tap.remove()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """The states as they are now, on the host, of which another thread can make the statistics.

        Waits for the device, as :meth:`collect` does, but costs the copies alone.
        """
        further = [
            (bank.reduction, bank.collect(), frozenset(left_out))
            for bank, left_out in zip(self._further, self._left_out, strict=True)
        ]
        return Snapshot(tuple(self._tap.modules), self._bank.collect(), further, self._told, self.strict)

    def collect(self) -> dict[Site, SiteStatistics]:
        """The statistics of every site that was seen since the last reset, in the order of the modules."""
        return self.snapshot().statistics()

    @torch.no_grad()
    def reset(self) -> None:
        """Forget what was recorded; the hooks stay as they are."""
        for bank in (self._bank, *self._further):
            bank.reset()


def _by_site(group: Collected[Site]) -> Iterator[tuple[Site, dict[str, float], dict[str, Tensor]]]:
    """By site the numbers and the tensors of states that are summarised together."""
    summary = group.reduction.summarize(group.states)
    columns = {name: value.tolist() for name, value in summary.items() if value.dim() == 1 and name not in _UNSHOWN}
    tensors = {name: value for name, value in summary.items() if value.dim() > 1}
    for row, site in enumerate(group.keys):
        yield (
            site,
            {name: column[row] for name, column in columns.items()},
            {name: value[row] for name, value in tensors.items()},
        )

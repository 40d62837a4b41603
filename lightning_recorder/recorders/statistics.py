"""The statistics of every tapped tensor, accumulated over batches without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType

import torch
from torch import Tensor, nn
from typing_extensions import Self

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
    """

    names: tuple[str, ...]
    groups: list[Collected[Site]]

    @torch.no_grad()
    def statistics(self) -> dict[Site, SiteStatistics]:
        """The statistics of every site that was seen, in the order of the modules."""
        found = {site: statistics for group in self.groups for site, statistics in _by_site(group)}
        order = {name: position for position, name in enumerate(self.names)}
        return {site: found[site] for site in sorted(found, key=lambda site: order[site.name])}


class StatisticsRecorder:
    """A tap with a :class:`~lightning_recorder.Statistics` row for each site, as a context manager.

    Leaving the context takes the hooks off and keeps what was recorded; entering it again goes on. All calls of a
    module merge into its site.

    Args:
        modules: The modules by name, as ``Selection.resolve`` gives them.
        tap: Which tensors: the class of any :class:`~lightning_recorder.Tap`.
        extra: Further reductions of the same tensors.
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
        self._bank: StateBank[Site] = StateBank(Combined([statistics, *further]) if further else statistics)
        self._tap = tap(modules, self._receive, condition=condition, strict=strict)

    def _receive(self, site: Site, tensor: Tensor) -> None:
        if tensor.device.type != "meta":
            self._bank.add(site, Values(tensor, self.factor))

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
        return self._bank.nbytes

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
        return Snapshot(tuple(self._tap.modules), self._bank.collect())

    def collect(self) -> dict[Site, SiteStatistics]:
        """The statistics of every site that was seen since the last reset, in the order of the modules."""
        return self.snapshot().statistics()

    @torch.no_grad()
    def reset(self) -> None:
        """Forget what was recorded; the hooks stay as they are."""
        self._bank.reset()


def _by_site(group: Collected[Site]) -> Iterator[tuple[Site, SiteStatistics]]:
    """The statistics of states that are summarised together."""
    summary = group.reduction.summarize(group.states)
    bins = summary.pop("histogram").long()
    unshown = {"sum", "variance"}  # they follow from the others
    columns = {name: value.tolist() for name, value in summary.items() if value.dim() == 1 and name not in unshown}
    tensors = {name: value for name, value in summary.items() if value.dim() > 1}
    for row, site in enumerate(group.keys):
        scalars = {name: column[row] for name, column in columns.items()}
        # A row that was handed out for an earlier step and has seen nothing since is no result.
        if scalars["count"] or scalars["nan_count"] or scalars["inf_count"]:
            own = {name: value[row] for name, value in tensors.items()}
            yield site, SiteStatistics(scalars, bins[row], own)

"""The statistics of every tapped tensor, accumulated over batches without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_recorder.reductions import (
    SCALAR_STATISTICS,
    Histogram,
    Reduction,
    StateBank,
    Statistics,
    Values,
    prepare,
    to_histogram,
)
from lightning_recorder.taps import OutputTap, Site, Tap

__all__ = ["SiteStatistics", "StatisticsRecorder"]


@dataclass(frozen=True)
class SiteStatistics:
    """What one site showed between two resets, on the host.

    Args:
        scalars: Statistic to value; the names are those of ``SCALAR_STATISTICS``.
        bins: Counts of the fixed bins, ``[2048]`` int64; see ``ExponentHistogram``.
        histogram: The same counts between their edges, without the empty ends.
    """

    scalars: Mapping[str, float]
    bins: Tensor
    histogram: Histogram


class StatisticsRecorder:
    """A tap with a :class:`~lightning_recorder.Statistics` row for each site, as a context manager.

    Leaving the context takes the hooks off and keeps what was recorded; entering it again goes on. All calls of a
    module merge into its site.

    Args:
        modules: The modules by name, as ``Selection.resolve`` gives them.
        tap: Which tensors: the class of any :class:`~lightning_recorder.Tap`.
        condition: As for :class:`~lightning_recorder.Tap`.
        strict: As for :class:`~lightning_recorder.Tap`.

    Note:
        While the hooks are on nothing waits for the device. :meth:`collect` does, once per device.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> recorder = StatisticsRecorder({"relu": net[1]})
        >>> with recorder:
        ...     for batch in torch.eye(2), torch.ones(3, 2):
        ...         _ = net(batch)
        >>> recorder.collect()[Site("relu", "out")].scalars["count"]
        10.0
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        tap: type[Tap] = OutputTap,
        *,
        condition: Callable[[], object] | None = None,
        strict: bool = False,
    ) -> None:
        self.factor = 1.0
        """What each tensor is multiplied by before it is reduced: the inverse of a loss scale, for gradients."""
        self._reduction: type[Reduction] = Statistics
        self._bank: StateBank[Site] = StateBank(self._reduction)
        self._tap = tap(modules, self._receive, condition=condition, strict=strict)
        prepare()

    def _receive(self, site: Site, tensor: Tensor) -> None:
        if tensor.device.type != "meta":
            self._reduction.update_state(self._bank.row(site, tensor.device), Values(tensor, self.factor))

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
    def collect(self) -> dict[Site, SiteStatistics]:
        """The statistics of every site that was seen since the last reset, in the order of the modules."""
        order = {name: position for position, name in enumerate(self._tap.modules)}
        states = sorted(self._bank.collect().items(), key=lambda item: order[item[0].name])
        if not states:
            return {}
        summary = self._reduction.summarize(torch.stack([state for _, state in states]))
        # A row that was handed out for an earlier step and has seen nothing since is no result.
        seen = (summary["histogram"].sum(-1) > 0).tolist()
        columns = {name: summary[name].tolist() for name in SCALAR_STATISTICS}
        return {
            site: SiteStatistics(
                scalars={name: column[row] for name, column in columns.items()},
                bins=summary["histogram"][row].long(),
                histogram=to_histogram({name: value[row] for name, value in summary.items()}),
            )
            for row, (site, _) in enumerate(states)
            if seen[row]
        }

    @torch.no_grad()
    def reset(self) -> None:
        """Forget what was recorded; the hooks stay as they are."""
        self._bank.reset()

"""The statistics of every tapped tensor, accumulated over batches without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from lightning_recorder.recorders.siterecorder import SiteRecorder
from lightning_recorder.recorders.sites import SiteStates
from lightning_recorder.reductions import Reduction
from lightning_recorder.stopwatch import Stopwatch
from lightning_recorder.taps import OutputTap, Site, Tap

__all__ = ["StatisticsRecorder"]


class StatisticsRecorder(SiteRecorder):
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
        >>> import torch
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
        super().__init__(SiteStates(extra=extra, sample=sample, quantiles=quantiles, strict=strict))
        self.factor = 1.0
        """What each tensor is multiplied by before it is reduced: the inverse of a loss scale, for gradients."""
        self.tap = tap(modules, self._receive, condition=condition, strict=strict)
        """What brings the tensors."""
        self.tap.at_once = self._take_at_once

    def _take_at_once(self, site: Site, tensor: Tensor) -> bool:
        return self.states.add_at_once(site, tensor, self.factor)

    def _receive(self, site: Site, tensor: Tensor) -> None:
        self.states.add(site, tensor, self.factor)

    @property
    @override
    def modules(self) -> dict[str, nn.Module]:
        return self.tap.modules

    @property
    @override
    def failed(self) -> frozenset[str]:
        return self.tap.failed

    @override
    def revive(self) -> None:
        self.tap.revive()
        super().revive()

    @override
    def watch(self, stopwatch: Stopwatch | None) -> None:
        self.tap.stopwatch = stopwatch

    @override
    def traces(self) -> dict[str, Any]:
        without_gradient = frozenset(getattr(self.tap, "without_gradient", ()))  # taps of gradients alone have it
        return {**super().traces(), "called": frozenset(self.tap.called), "without_gradient": without_gradient}

    @property
    @override
    def attached(self) -> bool:
        return self.tap.attached

    @override
    def attach(self) -> None:
        self.prepare()
        self.tap.attach()

    @override
    def pause(self) -> None:
        self.tap.pause()

    @override
    def remove(self) -> None:
        self.tap.remove()

"""The statistics of every tapped tensor, accumulated over batches without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self

from lightning_recorder.recorders.sites import SiteStates, SiteStatistics, Snapshot
from lightning_recorder.reductions import Reduction
from lightning_recorder.stopwatch import Stopwatch
from lightning_recorder.taps import OutputTap, Site, Tap

__all__ = ["StatisticsRecorder"]


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
        self.factor = 1.0
        """What each tensor is multiplied by before it is reduced: the inverse of a loss scale, for gradients."""
        self.states = SiteStates(extra=extra, sample=sample, quantiles=quantiles, strict=strict)
        """Where the tensors go; may be replaced by others between two calls of the model."""
        self.tap = tap(modules, self._receive, condition=condition, strict=strict)
        """What brings the tensors."""

    def _receive(self, site: Site, tensor: Tensor) -> None:
        self.states.add(site, tensor, self.factor)

    @property
    def failed(self) -> frozenset[str]:
        """The names of the modules that are left alone, since recording them failed."""
        return self.tap.failed

    def revive(self) -> None:
        """Record again what is left alone or left out."""
        self.tap.revive()
        self.states.revive()

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The tapped modules by name."""
        return self.tap.modules

    @property
    def replicated(self) -> frozenset[Site]:
        """The sites of which every rank has a copy: none, since each rank has batches of its own."""
        return frozenset()

    def watch(self, stopwatch: Stopwatch | None) -> None:
        """Measure the time inside the hooks, or no more."""
        self.tap.stopwatch = stopwatch

    def traces(self) -> dict[str, Any]:
        """What the hooks have seen of the modules: ``called``, ``failed``, ``without_gradient`` and ``state_bytes``."""
        return {
            "called": frozenset(self.tap.called),
            "failed": self.tap.failed,
            "without_gradient": frozenset(getattr(self.tap, "without_gradient", ())),
            "state_bytes": self.nbytes,
        }

    @property
    def attached(self) -> bool:
        """Whether the hooks are on."""
        return self.tap.attached

    @property
    def nbytes(self) -> int:
        """Bytes of state on all devices."""
        return self.states.nbytes

    def attach(self) -> None:
        """Put the hooks on."""
        self.tap.attach()

    def pause(self) -> None:
        """Record nothing until :meth:`attach`; the hooks stay on, which for recording every step is faster."""
        self.tap.pause()

    def remove(self) -> None:
        """Take the hooks off."""
        self.tap.remove()

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def snapshot(self) -> Snapshot:
        """The states as they are now, on the host, of which another thread can make the statistics.

        Waits for the device, as :meth:`collect` does, but costs the copies alone.
        """
        return self.states.snapshot(self.tap.modules)

    def collect(self) -> dict[Site, SiteStatistics]:
        """The statistics of every site that was seen since the last reset, in the order of the modules."""
        return self.snapshot().statistics()

    def reset(self) -> None:
        """Forget what was recorded; the hooks stay as they are."""
        self.states.reset()

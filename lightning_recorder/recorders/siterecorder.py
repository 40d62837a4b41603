"""What brings tensors to the statistics of their sites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import nn
from typing_extensions import Self

from lightning_recorder.recorders.sites import SiteStates, SiteStatistics, Snapshot
from lightning_recorder.reductions import prepare_device
from lightning_recorder.stopwatch import Stopwatch
from lightning_recorder.taps import Site

__all__ = ["SiteRecorder"]


class SiteRecorder(ABC):
    """Base of the recorders of statistics, as a context manager.

    Leaving the context takes the hooks off and keeps what was recorded; entering it again goes on.

    Args:
        states: Where the tensors go.
    """

    def __init__(self, states: SiteStates) -> None:
        self.states = states
        """Where the tensors go; may be replaced by others between two calls of the model."""
        self._is_prepared = False

    @property
    @abstractmethod
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules by name."""

    @property
    @abstractmethod
    def failed(self) -> frozenset[str]:
        """The names of the modules that are left alone, since recording them failed."""

    @property
    @abstractmethod
    def attached(self) -> bool:
        """Whether the hooks are on."""

    @abstractmethod
    def attach(self) -> None:
        """Put the hooks on."""

    def prepare(self) -> None:
        """Have ready what computes the statistics where the modules' parameters are; the first :meth:`attach` does so.

        On a GPU that may take seconds, and waits for the device; there it is done once in a process. Nothing is raised.
        """
        if not self._is_prepared:
            self._is_prepared = True
            for device in {parameter.device for each in self.modules.values() for parameter in each.parameters()}:
                prepare_device(device)

    @abstractmethod
    def pause(self) -> None:
        """Record nothing until :meth:`attach`; the hooks may stay on, which for recording every step is faster."""

    @abstractmethod
    def remove(self) -> None:
        """Take the hooks off."""

    @abstractmethod
    def watch(self, stopwatch: Stopwatch | None) -> None:
        """Measure the time inside the hooks, or no more."""

    def revive(self) -> None:
        """Record again what is left alone or left out."""
        self.states.revive()

    @property
    def replicated(self) -> frozenset[Site]:
        """The sites of which another process of the run has the same: none, where each has batches of its own."""
        return frozenset()

    def traces(self) -> dict[str, Any]:
        """What is to be said of the modules, as fields of :class:`~lightning_recorder.recorders.Watched`."""
        return {"failed": self.failed, "state_bytes": self.nbytes}

    @property
    def nbytes(self) -> int:
        """Bytes of state on all devices."""
        return self.states.nbytes

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
        return self.states.snapshot(self.modules)

    def collect(self) -> dict[Site, SiteStatistics]:
        """The statistics of every site that was seen since the last reset, in the order of the modules."""
        return self.snapshot().statistics()

    def reset(self) -> None:
        """Forget what was recorded; the hooks stay as they are."""
        self.states.reset()

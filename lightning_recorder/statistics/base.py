"""The base class of all recorders that feed tensors to site statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import nn
from typing_extensions import Self

from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.reductions import prepare_device
from lightning_recorder.statistics.sites import SiteStates, SiteStatistics, Snapshot
from lightning_recorder.taps import Site

__all__ = ["BaseStatisticsRecorder"]


class BaseStatisticsRecorder(ABC):
    """Base class of the statistics recorders, usable as a context manager.

    Leaving the context removes the hooks and keeps the recorded statistics. Entering it again continues the recording.

    Args:
        states: The states that receive the tensors.
    """

    def __init__(self, states: SiteStates) -> None:
        self.states = states
        """The states that receive the tensors. They may be replaced between two calls of the model."""
        self._is_prepared = False

    @property
    @abstractmethod
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules by name."""

    @property
    @abstractmethod
    def failed(self) -> frozenset[str]:
        """The names of the modules that are no longer recorded because recording them failed."""

    @property
    @abstractmethod
    def attached(self) -> bool:
        """True while the hooks are registered."""

    @abstractmethod
    def attach(self) -> None:
        """Register the hooks."""

    def prepare(self) -> None:
        """Prepare the statistics kernels for the devices of the modules' parameters.

        The first :meth:`attach` calls this. On a GPU it may take seconds and synchronizes the device; it is done once
        per process. No errors are raised.
        """
        if not self._is_prepared:
            self._is_prepared = True
            for device in {parameter.device for each in self.modules.values() for parameter in each.parameters()}:
                prepare_device(device)

    @abstractmethod
    def pause(self) -> None:
        """Stop recording until :meth:`attach`.

        The hooks may stay registered, which is faster if every step is recorded.
        """

    @abstractmethod
    def remove(self) -> None:
        """Remove the hooks."""

    @abstractmethod
    def watch(self, stopwatch: Stopwatch | None) -> None:
        """Measure the time inside the hooks, or stop measuring if ``stopwatch`` is None."""

    def revive(self) -> None:
        """Record the failed modules and the skipped reductions again."""
        self.states.revive()

    @property
    def replicated(self) -> frozenset[Site]:
        """The sites that other ranks hold copies of. Empty if each rank has its own batches."""
        return frozenset()

    def traces(self) -> dict[str, Any]:
        """Return facts about the modules as fields of :class:`~lightning_recorder.outputs.Coverage`."""
        return {"failed": self.failed, "state_bytes": self.nbytes, "ran_eagerly": self.ran_eagerly}

    @property
    def ran_eagerly(self) -> tuple[str, ...]:
        """The names of the compiled functions that ran eagerly because this recorder's hooks were registered."""
        return ()

    def take_traces(self) -> dict[str, Any]:
        """Return :meth:`traces` and start to collect them anew."""
        return self.traces()

    @property
    def nbytes(self) -> int:
        """The size of the states on all devices, in bytes."""
        return self.states.nbytes

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def snapshot(self) -> Snapshot:
        """Return a CPU copy of the current states, from which another thread can compute the statistics.

        Synchronizes the device like :meth:`collect`, but costs only the copies.
        """
        return self.states.snapshot(self.modules)

    def collect(self) -> dict[Site, SiteStatistics]:
        """Return the statistics of every site seen since the last reset, in module order."""
        return self.snapshot().statistics()

    def reset(self) -> None:
        """Discard the recorded statistics. The hooks stay as they are."""
        self.states.reset()

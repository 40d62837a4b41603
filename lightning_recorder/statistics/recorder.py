"""Recorders of the statistics of tensors, independent of any trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self, override

from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.reductions import Reduction, prepare_device
from lightning_recorder.statistics.sites import SiteStates, Snapshot
from lightning_recorder.statistics.table import StatisticsTable
from lightning_recorder.taps import OutputTap, Site, Tap

__all__ = ["BaseStatisticsRecorder", "StatisticsRecorder"]


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

    def collect(self) -> StatisticsTable:
        """Return the statistics of every site seen since the last reset, in module order."""
        return self.snapshot().statistics()

    def reset(self) -> None:
        """Discard the recorded statistics. The hooks stay as they are."""
        self.states.reset()


class StatisticsRecorder(BaseStatisticsRecorder):
    """A tap with :class:`~lightning_recorder.reductions.Statistics` for each site, usable as a context manager.

    Leaving the context removes the hooks and keeps the recorded statistics. Entering it again continues the recording.
    All calls of a module are merged into the same sites.

    Args:
        modules: The modules by name, as returned by ``Selection.resolve``.
        tap: The class of the :class:`~lightning_recorder.taps.Tap`, which determines the tensors to record.
        extra: Additional reductions of the same tensors. A reduction that fails for a tensor, for example because of
            its shape, is skipped at that site with one warning.
        sample: The number of values of a tensor that are counted in the histogram. By default, all values are counted.
        quantiles: The quantiles to estimate from the histogram, between 0 and 1. Their scalars are named
            ``quantile_<q>``.
        condition: See :class:`~lightning_recorder.taps.Tap`.
        strict: See :class:`~lightning_recorder.taps.Tap`.

    Raises:
        ArgumentError: If an argument is invalid, or if two reductions have a statistic of the same name.

    Note:
        The hooks do not synchronize the device. :meth:`collect` does, once per device.

    Example:
        >>> import torch
        >>> from lightning_recorder.reductions import Norms
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
        """The factor that each tensor is multiplied by before the reduction: the inverse loss scale, for gradients."""
        self.tap = tap(modules, self._receive, condition=condition, strict=strict)
        """The tap that provides the tensors."""
        self.tap.fast_path = self._try_fast_path

    def _try_fast_path(self, site: Site, tensor: Tensor) -> bool:
        return self.states.try_fast_path(site, tensor, self.factor)

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
        # Only gradient taps have these two attributes.
        seen = {name: frozenset(getattr(self.tap, name, ())) for name in ("without_gradient", "changed_in_place")}
        compiled_calls = frozenset(self.tap.compiled_calls)
        return {**super().traces(), "called": frozenset(self.tap.called), "compiled_calls": compiled_calls, **seen}

    @override
    def take_traces(self) -> dict[str, Any]:
        traces = self.traces()
        self.tap.called = set()
        if traces["without_gradient"]:
            self.tap.without_gradient = set()  # type: ignore[attr-defined]  # only gradient taps have it
        return traces

    @property
    @override
    def ran_eagerly(self) -> tuple[str, ...]:
        return self.tap.ran_eagerly

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

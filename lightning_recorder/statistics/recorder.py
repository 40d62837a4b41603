"""Recorders of the statistics of tensors, independent of any trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

from torch import Tensor, nn
from typing_extensions import Self, override

from lightning_recorder.functions import (
    BatchTap,
    ChosenFunctions,
    FunctionGradientTap,
    FunctionOutputTap,
    function_of,
)
from lightning_recorder.internals.module_tree import is_training, parameters_of
from lightning_recorder.internals.stopwatch import Stopwatch
from lightning_recorder.records.classes import CLASS_COUNTS
from lightning_recorder.records.table import Table
from lightning_recorder.reductions import prepare_device
from lightning_recorder.statistics.sites import SiteStates
from lightning_recorder.statistics.snapshot import Snapshot
from lightning_recorder.taps import OutputGradientTap, OutputTap, Site, Tap, TracedTap
from lightning_recorder.taps.gradient import GradientTap

__all__ = ["BaseStatisticsRecorder", "StatisticsRecorder"]

_OF_FUNCTIONS = (FunctionOutputTap, FunctionGradientTap)


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
        """Prepare the statistics kernels for the devices of the modules' parameters. Raises no errors.

        The first :meth:`attach` calls this. On a GPU, the first call in a process may take seconds and synchronizes the
        device.
        """
        if not self._is_prepared:
            self._is_prepared = True
            for device in {parameter.device for each in self.modules.values() for parameter in parameters_of(each)}:
                prepare_device(device)

    def install(self) -> None:  # noqa: B027 - most recorders record nothing inside compiled code
        """Register the hooks that compiled code traces. Call this before the first call of the model."""

    def uninstall(self) -> None:  # noqa: B027 - as above
        """Undo :meth:`install`. Idempotent."""

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

    def observe_batch(self, batch: Any) -> None:  # noqa: B027 - most recorders do not record batches
        """Record the tensors of the batch of a step, after :meth:`attach`."""

    def end_of_model(self) -> None:  # noqa: B027 - most recorders do not observe the optimizer
        """Stop observing the model until the next :meth:`attach`, so that the optimizer runs as without a recorder."""

    def revive(self) -> None:
        """Resume recording the failed modules and the skipped reductions."""
        self.states.revive()

    waits_for_batch = False
    """True if :meth:`look` must be called before the next batch."""

    def look(self, step: int) -> None:  # noqa: B027 - most recorders have nothing to compare
        """Look at what has changed between a recorded batch and the next one."""

    @property
    def replicated(self) -> frozenset[Site]:
        """The sites whose tensors are copies of tensors on other ranks. Empty if each rank has its own batches."""
        return frozenset()

    def traces(self) -> dict[str, Any]:
        """Return facts about the modules as fields of :class:`~lightning_recorder.outputs.Coverage`."""
        return {"failed": self.failed, "state_bytes": self.nbytes, "ran_eagerly": self.ran_eagerly}

    @property
    def ran_eagerly(self) -> tuple[str, ...]:
        """The names of the compiled functions that ran eagerly because this recorder's hooks were registered."""
        return ()

    def take_traces(self) -> dict[str, Any]:
        """Return :meth:`traces` and clear them."""
        return self.traces()

    def settings(self) -> dict[Site, dict[str, float]]:
        """Return scalars of sites that are not statistics of a tensor.

        By default, the only scalar is ``eval_mode``: 1.0 at the sites of modules in eval mode, absent in training mode.
        """
        away = {name for name, module in self.modules.items() if not is_training(module)}
        return {site: {"eval_mode": 1.0} for site in self.states.sites if site.name in away} if away else {}

    def about(self) -> dict[str, Any]:
        """Return facts about the latest step that belong to no site, as JSON-serializable data."""
        return {}

    def settings_state(self) -> dict[str, Any]:
        """Return the data of earlier steps for :meth:`settings` and :meth:`about`, as plain Python objects."""
        return {}

    def load_settings(self, state: Mapping[str, Any]) -> None:  # noqa: B027 - most recorders know nothing of earlier steps
        """Load the result of :meth:`settings_state`."""

    @property
    def nbytes(self) -> int:
        """The size of the states on all devices, in bytes."""
        return self.states.nbytes

    def __enter__(self) -> Self:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def snapshot(self) -> Snapshot:
        """Return a CPU copy of the current states, from which another thread can compute the statistics.

        Synchronizes the device like :meth:`collect`, but costs only the copies.
        """
        return self.states.snapshot(self.modules)

    def collect(self) -> Table:
        """Return the statistics of every site seen since the last reset, in module order."""
        return self.snapshot().statistics()

    def reset(self) -> None:
        """Discard the recorded statistics. The hooks stay as they are."""
        self.states.reset()


class StatisticsRecorder(BaseStatisticsRecorder):
    """Record :class:`~lightning_recorder.reductions.Statistics` of the tensors of taps; usable as a context manager.

    Leaving the context removes the hooks and keeps the recorded statistics. Entering it again continues the recording.

    Args:
        modules: The modules by name, as returned by ``Selection.resolve``.
        tap: The class of the :class:`~lightning_recorder.taps.Tap`, which determines the tensors to record, or several
            classes, such as ``[InputTap, OutputTap]``.
        extra: Additional reductions of the same tensors: a :class:`~lightning_recorder.reductions.Reduction`, a
            ``torchmetrics.Metric``, a function as for ``functools.reduce``, or a list or mapping of these. A reduction
            that fails for a tensor, for example because of its shape, is skipped at that site with one warning.
        sample: The number of values of a tensor that are counted in the histogram. By default, all values are counted.
        quantiles: The quantiles to estimate from the histogram, between 0 and 1. Their scalars are named
            ``quantile_<q>``.
        condition: See :class:`~lightning_recorder.taps.Tap`.
        per_call: Keep the calls of a module apart. The paths of the second call since :meth:`attach` end with ``#2``.
            By default, all calls are merged into the same sites.
        eager: Run compiled code eagerly while the hooks are attached.
        traced: The modules whose calls are compiled and that are recorded inside the compiled code. Their hooks exist
            from :meth:`install` to :meth:`uninstall`; see :class:`~lightning_recorder.taps.TracedTap`.
        key: The key of the recording inside compiled code.
        functions: The torch functions to record as well, if ``tap`` contains the tap of outputs or output gradients.
            Functions in compiled code that stays compiled are not recorded.
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
        tap: type[Tap] | Sequence[type[Tap]] = OutputTap,
        *,
        extra: Any = (),
        sample: int | None = None,
        quantiles: Iterable[float] = (),
        condition: Callable[[], object] | None = None,
        per_call: bool = False,
        eager: bool = True,
        traced: Collection[nn.Module] = (),
        key: str = "",
        functions: ChosenFunctions | None = None,
        strict: bool = False,
    ) -> None:
        kinds = [tap] if isinstance(tap, type) else tap
        options: dict[str, Any] = {"sample": sample, "quantiles": quantiles, "strict": strict}
        super().__init__(SiteStates(extra=extra, spread=OutputTap in kinds, **options))
        self._sample = sample
        self.factor = 1.0
        """The factor that each tensor is multiplied by before the reduction: the inverse loss scale, for gradients."""
        self.ignores: Callable[[], bool] = bool
        """A function that returns True while tensors must be ignored."""
        inside = {name: module for name, module in modules.items() if module in traced} if traced else {}
        outside = {name: module for name, module in modules.items() if name not in inside} if inside else modules
        self._modules = modules
        self.taps: list[Tap] = []
        """The taps that provide the tensors."""
        options = {"condition": condition, "strict": strict}
        # Compiled code may outlive this recorder, so recorders of different modules need different keys.
        recorded = repr((sorted(inside), [kind.__name__ for kind in kinds]))
        inner: dict[str, Any] = {"key": f"{key} {crc32(recorded.encode()):08x}", "others": traced}
        of_functions: dict[type[Tap], Any] = {OutputTap: FunctionOutputTap, OutputGradientTap: FunctionGradientTap}
        if functions is not None and OutputTap in kinds:
            self.taps.append(BatchTap(functions, self._receive_from_function, **options))
        for kind in kinds:
            if functions is not None and kind in of_functions:
                self.taps.append(of_functions[kind](functions, self._receive_from_function, **options))
            if inside:
                self.taps.append(TracedTap(inside, self._receive, like=kind, **inner, **options))
            if outside or not inside:
                self.taps.append(kind(outside, self._receive, **options))
        for each in self.taps:
            each.fast_path, each.per_call, each.eager = self._try_fast_path, per_call, eager
            each.traced = traced
            if isinstance(each, _OF_FUNCTIONS):
                each.per_call = False  # each call of a function already has its own site name
            if isinstance(each, FunctionOutputTap):
                each.receive_scores, each.time_of = self._receive_scores, self._time_of

    def _try_fast_path(self, site: Site, tensor: Tensor) -> bool:
        return self.ignores() or self.states.try_fast_path(site, tensor, self.factor)

    def _receive(self, site: Site, tensor: Tensor) -> None:
        if not self.ignores():
            self.states.add(site, tensor, self.factor)

    def _receive_from_function(self, site: Site, tensor: Tensor) -> None:
        """Update the statistics of a function. Losses get only the default statistics, as most losses are scalars."""
        if self.ignores():
            return
        # Count classes without sampling: split the tensor into parts no larger than a sample.
        parts: Sequence[Tensor] = (tensor,)
        if site.path.endswith(CLASS_COUNTS) and (tensor.dim() != 1 or self._sample):
            tensor = tensor.flatten()
            parts = tensor.split(self._sample or max(1, len(tensor)))
        for part in parts:
            if not self.states.try_fast_path(site, part, self.factor):
                function = function_of(site.name)
                is_of_loss = site.path != "out" or function is None or function.kind == "losses"
                self.states.add(site, part, self.factor, extra=not is_of_loss)

    @override
    def observe_batch(self, batch: Any) -> None:
        for tap in self.taps:
            if isinstance(tap, BatchTap):
                tap.observe(batch)

    @override
    def end_of_model(self) -> None:
        for tap in self.taps:
            if isinstance(tap, _OF_FUNCTIONS):
                tap.rest()

    def _time_of(self, option: str) -> Stopwatch:
        return self.states.times[option]

    def _receive_scores(self, site: Site, tensor: Tensor | None, block: Tensor) -> None:
        """Update the statistics of the scores inside a function, and the statistics of each head or expert."""
        if not self.ignores():
            if tensor is not None:
                self.states.add(site, tensor, extra=False)
            self.states.add_scores(site, block)

    @property
    @override
    def modules(self) -> Mapping[str, nn.Module]:
        return self._modules

    @override
    def install(self) -> None:
        for tap in self.taps:
            if isinstance(tap, TracedTap):
                tap.install()

    @override
    def uninstall(self) -> None:
        for tap in self.taps:
            if isinstance(tap, TracedTap):
                tap.uninstall()

    @property
    @override
    def failed(self) -> frozenset[str]:
        return frozenset().union(*(tap.failed for tap in self.taps))

    @override
    def revive(self) -> None:
        for tap in self.taps:
            tap.revive()
        super().revive()

    @override
    def watch(self, stopwatch: Stopwatch | None) -> None:
        for tap in self.taps:
            tap.stopwatch = stopwatch

    @override
    def traces(self) -> dict[str, Any]:
        # Only gradient taps have these two attributes. With several taps, use the last one, which taps the outputs.
        last = self.taps[-1]
        seen = {name: frozenset(getattr(last, name, ())) for name in ("without_gradient", "changed_in_place")}
        for name in ("called", "compiled_calls"):
            seen[name] = frozenset().union(*(getattr(tap, name) for tap in self.taps))
        unseen = next((tap.unseen for tap in self.taps if isinstance(tap, _OF_FUNCTIONS)), "")
        return {**super().traces(), **seen, "unseen_functions": unseen}

    @override
    def take_traces(self) -> dict[str, Any]:
        traces = self.traces()
        for tap in self.taps:
            tap.called = set()
            if isinstance(tap, GradientTap):
                tap.without_gradient = set()
        return traces

    @property
    @override
    def ran_eagerly(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for tap in self.taps for name in tap.ran_eagerly))

    @property
    @override
    def attached(self) -> bool:
        return any(tap.attached for tap in self.taps)

    @override
    def attach(self) -> None:
        self.prepare()
        for tap in self.taps:
            tap.attach()

    @override
    def pause(self) -> None:
        for tap in self.taps:
            tap.pause()

    @override
    def remove(self) -> None:
        for tap in self.taps:
            tap.remove()

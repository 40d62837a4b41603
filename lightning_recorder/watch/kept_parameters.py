"""Copies of the parameters from before optimizer steps, for replays of steps whose values arrive late."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightning_recorder.internals.storage import is_uninitialized

__all__ = ["KeptParameters", "ParameterCopies"]

_LARGEST_MEMORY_SHARE = 0.1
"""The largest share of the free memory of the device that the copies may take."""
_LARGEST_TIME_SHARE = 0.01
"""The largest share of the time of a step that copying may take on average."""
_MEASURED = 6  # the number of copies whose time is measured; the first copy also allocates memory
_SETTLED = 2  # the number of steps after which the optimizer has allocated its state
_SHAPE = attrgetter("shape")
_foreach_copy = getattr(torch, "_foreach_copy_", None)


@dataclass
class KeptParameters:
    """The values of all parameters, in the order of the model, from before an optimizer step."""

    step: int
    values: list[Tensor]


class _Clock(Protocol):
    def mark(self) -> Any:
        """Return a mark of the current point in the work of the device. Does not wait."""

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the time between two marks in seconds, or None if the device has not reached the second one."""


class _HostClock:
    """A clock that measures on the host."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin


class _DeviceClock:
    """A clock that measures with events of the device."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def mark(self) -> Any:
        found = self._event(enable_timing=True)
        found.record()
        return found

    def seconds(self, begin: Any, end: Any) -> float | None:
        return float(begin.elapsed_time(end)) / 1000 if end.query() else None


@dataclass(frozen=True)
class _Measured:
    """A copy: its step, the marks before and after it, and its time on the host in seconds."""

    step: int
    begin: Any
    end: Any
    host_s: float


class ParameterCopies:
    """Copies the parameters before optimizer steps. With ``"auto"``, copying takes at most 1 % of the time.

    With ``"auto"``, two copies are kept, so that nothing waits for the device. The older copy is overwritten once the
    values of all steps before the newer copy have arrived. Copies are only kept if both together take less than a tenth
    of the free memory of the device. The time of the first copies is measured. If a copy takes more than 1 % of the
    time of a step, the parameters are copied every few steps, so that the average stays below 1 %. A step between two
    copies is run again with the older of the two copies.

    With ``True``, one copy is kept and taken before each step. The caller then waits for the values of the previous
    step.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], device: torch.device, when: Literal["auto", True] = "auto"
    ) -> None:
        self._parameters, self._device, self._is_auto = list(parameters), device, when == "auto"
        self._copies: list[KeptParameters] = []  # the newest one last
        self._turns = 0
        self._clock: _Clock = self._clock_of(device)
        self._marks: list[_Measured] = []
        self._is_measured = False
        self.waits = not self._is_auto
        """True if a copy may only be taken after the values of the previous step have arrived."""
        self.every = 1
        """The number of steps from one copy to the next; 0 if no copies are taken."""
        if self._is_auto and any(is_uninitialized(each) or hasattr(each, "_local_tensor") for each in self._parameters):
            self.every = 0  # a step with sharded parameters communicates, so it cannot be run again

    def latest(self, step: int) -> KeptParameters | None:
        """Return the newest copy that was taken before this optimizer step or an earlier one; None if there is none."""
        return next((each for each in reversed(self._copies) if each.step <= step), None)

    def is_due(self, step: int) -> bool:
        """Return True if a copy is due before this step."""
        return bool(self.every) and (not self._copies or step >= self._copies[-1].step + self.every)

    def take(self, step: int, oldest: int | None) -> None:
        """Copy the parameters, unless a step whose values have not arrived still needs the existing copies.

        ``oldest`` is the first step whose values have not arrived.
        """
        if self._is_auto and not (self._is_measured and self._turns > _SETTLED) and not self._decide(step):
            return
        slots = 2 if self._is_auto else 1
        if len(self._copies) < slots:
            target = None
        elif slots == 1 or oldest is None or oldest >= self._copies[-1].step:
            target = self._copies.pop(0)
        else:
            return
        is_measured = self._is_auto and not self._is_measured
        begin, host = (self._clock.mark() if is_measured else None), time.perf_counter()
        try:
            values = self._copy(None if target is None else target.values)
        except torch.OutOfMemoryError:
            self._stop()
            return
        self._copies.append(KeptParameters(step, values))
        if is_measured:
            host = time.perf_counter() - host
            self._marks.append(_Measured(step, begin, self._clock.mark(), host))

    def _copy(self, targets: list[Tensor] | None) -> list[Tensor]:
        sources: list[Tensor] = [*self._parameters]
        if torch.is_grad_enabled():
            sources = [each.detach() for each in sources]
        if targets is None or list(map(_SHAPE, targets)) != list(map(_SHAPE, sources)):
            return [each.detach().clone() for each in sources]
        if _foreach_copy is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        else:
            _foreach_copy(targets, sources)
        return targets

    def _decide(self, step: int) -> bool:
        """Return True if copies are affordable, and set the interval once their time is known."""
        self._turns += 1
        # The free memory is checked again once the optimizer has allocated its state.
        if self._turns in (1, 1 + _SETTLED) and not self._fits():
            self._stop()
            return False
        if not self._is_measured and len(self._marks) >= _MEASURED:
            share = self._time_share()
            if share is not None:
                self._is_measured, self._marks = True, []
                self.every = max(1, math.ceil(share / _LARGEST_TIME_SHARE))
                return self.is_due(step)
        return True

    def _fits(self) -> bool:
        size = sum(each.numel() * each.element_size() for each in self._parameters)
        free = self._free_memory(self._device)
        return free is not None and 2 * size < _LARGEST_MEMORY_SHARE * (free + len(self._copies) * size)

    def _time_share(self) -> float | None:
        """Return the time of a copy on host or device, whichever is larger, relative to a step without a copy."""
        marks = self._marks[1:]  # the first copy allocates memory
        copies = [self._clock.seconds(each.begin, each.end) for each in marks]
        between = [
            (self._clock.seconds(one.end, two.begin), two.step - one.step) for one, two in itertools.pairwise(marks)
        ]
        durations = [seconds / steps for seconds, steps in between if seconds is not None]
        known = [each for each in copies if each is not None]
        if len(durations) < len(between) or len(known) < len(copies):
            return None
        copy = max(median(known), median([each.host_s for each in marks]))
        return copy / max(median(durations), 1e-9)

    def _stop(self) -> None:
        self.every, self._copies, self._marks = 0, [], []

    @staticmethod
    def _clock_of(device: torch.device) -> _Clock:
        module = torch.get_device_module(device) if device.type in ("cuda", "xpu") else None
        event = getattr(module, "Event", None)
        return _HostClock() if event is None else _DeviceClock(event)

    @staticmethod
    def _free_memory(device: torch.device) -> int | None:
        """Return the number of free bytes on a device at its peak memory use so far; None if unknown."""
        if device.type not in ("cuda", "xpu"):
            return None
        module: Any = torch.get_device_module(device)
        try:
            free, _ = module.mem_get_info(device)
            return int(free + module.memory_reserved(device) - module.max_memory_allocated(device))
        except (AttributeError, RuntimeError):
            return None

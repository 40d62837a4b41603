"""Stopwatch for the recorder's own work on the host and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

__all__ = ["Started", "Stopwatch", "elapsed_ms"]


class Started(NamedTuple):
    """The start of a span."""

    at: float
    event: Any


class Stopwatch:
    """Accumulate spans of time across threads.

    Args:
        device: The device of the work. On a GPU, where the host only enqueues the work, the time between two CUDA
            events is measured as well.
        clock: A monotonic clock of the host, in seconds.

    Note:
        Starting and stopping never synchronize the device. :meth:`take_ms` waits for events, so call it after an
        operation that has already synchronized the device.

    Example:
        >>> ticks = iter([1.0, 1.5, 2.0, 2.25])
        >>> watch = Stopwatch(clock=lambda: next(ticks))
        >>> for _ in range(2):
        ...     with watch:
        ...         pass
        >>> watch.take_ms(), watch.take_ms()
        (750.0, 0.0)
    """

    def __init__(self, device: torch.device | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._clock = clock
        self._spans: list[float] = []  # seconds; list.append is atomic across threads
        self._events: list[tuple[Any, Any]] = []
        self._open: list[Started] = []

    def start(self) -> Started:
        """Start a span."""
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Started(self._clock(), event)

    def stop(self, started: Started) -> None:
        """End a span."""
        self._spans.append(self._clock() - started.at)
        if started.event is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((started.event, event))

    def __enter__(self) -> Self:
        self._open.append(self.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(self._open.pop())

    @property
    def host_ms(self) -> float:
        """Host time in milliseconds since the last :meth:`take_ms`."""
        return 1000 * sum(self._spans)

    def take_ms(self) -> float:
        """Return the larger of the host time and the GPU time of all spans since the last call, in milliseconds."""
        spans, self._spans = self._spans, []
        events, self._events = self._events, []
        on_gpu: float = sum(first.elapsed_time(last) for first, last in events if last.query())
        return float(max(1000 * sum(spans), on_gpu))


def elapsed_ms(first: Started, last: Started) -> float:
    """Return the milliseconds between the starts of two spans, measured on the GPU if possible. Waits for the GPU."""
    if first.event is None or last.event is None:
        return 1000 * (last.at - first.at)
    last.event.synchronize()
    return float(first.event.elapsed_time(last.event))

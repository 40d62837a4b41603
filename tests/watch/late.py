"""The CPU in the part of a device whose values arrive some steps late."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_recorder.callbacks.watched_run import WatchedRun
from lightning_recorder.watch import ParameterCopies, ReadingQueue

__all__ = ["Clock", "arrive_late"]


class Clock:
    """A clock on which each copy takes some seconds and each step the rest of a second.

    Args:
        copy: The seconds that a copy takes.
    """

    def __init__(self, copy: float) -> None:
        self._copy, self._marks = copy, 0

    def mark(self) -> float:
        self._marks += 1
        return self._marks // 2 + (self._copy if self._marks % 2 == 0 else 1)

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def arrive_late(monkeypatch: pytest.MonkeyPatch, steps: int, *, free: int | None = 2**40, copy: float = 1e-4) -> None:
    """Let the values of a step arrive some steps later.

    Args:
        monkeypatch: Restores everything.
        steps: How many steps later.
        free: The free memory of the device in bytes; None if it is not known.
        copy: The time of a copy of the parameters as a share of a step.
    """

    class LateEvent:
        recorded = 0

        def record(self) -> None:
            LateEvent.recorded += 1
            self.at = LateEvent.recorded

        def query(self) -> bool:
            return LateEvent.recorded >= self.at + steps

        def synchronize(self) -> None:
            """The values are there."""

    def begin(self: Any, *args: Any) -> None:
        initialize(self, *args)
        self._event, self._pins = LateEvent, False

    initialize = ReadingQueue.__init__
    monkeypatch.setattr(ReadingQueue, "__init__", begin)
    monkeypatch.setattr(WatchedRun, "_is_host", staticmethod(lambda device: False))
    monkeypatch.setattr(ParameterCopies, "_free_memory", staticmethod(lambda device: free))
    monkeypatch.setattr(ParameterCopies, "_clock_of", staticmethod(lambda device: Clock(copy)))

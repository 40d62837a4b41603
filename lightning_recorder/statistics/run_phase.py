"""The phases of a recorded run, and the steps since its last record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["RunPhase", "RunWindow"]


class RunPhase(Enum):
    """The phases of a :class:`RunRecorder`, which documents the transitions."""

    IDLE = "idle"
    """The current step is not recorded, and there are no unwritten statistics. :meth:`RunRecorder.end_batch` is not
    needed.
    """
    WAITING = "waiting"
    """No step is being recorded, and there are no hooks. :meth:`RunRecorder.end_batch` must still be called, because
    the window may have unwritten statistics and end with this step.
    """
    ARMED = "armed"
    """No step is being recorded, but the next one is due. The hooks may still be registered, but are paused."""
    RECORDING = "recording"
    """A step is being recorded. There are hooks if this rank records."""
    ENDED = "ended"
    """The run has ended, and its state is final."""


@dataclass
class RunWindow:
    """The recorded steps since the last record."""

    steps: int = 0
    """The number of steps whose statistics are in the states. The same on all ranks."""
    has_overflow: bool = False
    """True if a step overflowed. The same on all ranks."""
    is_covered: bool = False
    """True if the hooks were registered in one of the steps."""
    is_merged: bool = False
    """True if this rank holds the statistics of all ranks, from a checkpoint."""

    @property
    def has_states(self) -> bool:
        """True if this rank may hold statistics; False if recording was disabled in all steps."""
        return self.is_covered or self.is_merged

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to write in a record. The same on all ranks."""
        return not self.steps and not self.has_overflow

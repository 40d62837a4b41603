"""The cyclic garbage collector of Python during a recording."""

from __future__ import annotations

import gc

__all__ = ["RareCollections"]

_OBJECTS = 50_000


class RareCollections:
    """Lets the garbage collector run after 50,000 new objects instead of 700, from :meth:`hold` to :meth:`release`.

    A recording creates many objects that live until the end of the step. By default, the collector scans them
    repeatedly, and sometimes all objects of the process. This took a fifth of the time of steps with 2,000 recorded
    layers. A disabled collector stays disabled.
    """

    def __init__(self) -> None:
        self._thresholds: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None

    def hold(self) -> None:
        """Raise the threshold. A no-op if it is already raised."""
        if self._thresholds is not None:
            return
        before = gc.get_threshold()
        if 0 < before[0] < _OBJECTS:
            gc.set_threshold(_OBJECTS, *before[1:])
        self._thresholds = before, gc.get_threshold()

    def release(self) -> None:
        """Restore the threshold, unless other code has changed it meanwhile."""
        if self._thresholds is not None and gc.get_threshold() == self._thresholds[1]:
            gc.set_threshold(*self._thresholds[0])
        self._thresholds = None

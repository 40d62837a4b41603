"""The effort of a function as a number that does not depend on the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

__all__ = ["lines_run", "profiled"]

T = TypeVar("T")


def profiled(function: Callable[[], T], see: Callable[[FrameType, str, object], object]) -> T:
    """Call the function, and ``see`` for each call inside of it, without those of a garbage collection.

    A collection runs the finalizers of what earlier tests left behind, so that a count would depend on them.
    """
    before, enabled = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(see)
    try:
        return function()
    finally:
        sys.setprofile(before)
        if enabled:
            gc.enable()


def lines_run(function: Callable[[], object]) -> int:
    """Return the number of lines of this package that a call runs, with each pass of a loop."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace if "lightning_recorder" in frame.f_code.co_filename else None

    before, enabled = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        if enabled:
            gc.enable()
    return count

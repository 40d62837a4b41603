"""Time measurement of the recorder's own work."""

from __future__ import annotations

import threading

from lightning_recorder.internals.stopwatch import Stopwatch


def test_spans_of_several_threads_add_up() -> None:
    """Overlapping spans of several threads are all counted."""
    now = 0.0
    watch = Stopwatch(clock=lambda: now)
    outer = watch.start()
    now = 1.0
    thread = threading.Thread(target=lambda: watch.stop(watch.start()))
    thread.start()
    thread.join()
    inner = watch.start()
    now = 3.0
    watch.stop(inner)
    watch.stop(outer)
    assert watch.host_ms == 5000
    assert [watch.take_ms(), watch.take_ms()] == [5000, 0]

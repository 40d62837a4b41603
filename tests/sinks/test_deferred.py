"""Tests of writing from any thread to a sink that is bound to one thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from typing_extensions import override

from lightning_recorder import MemorySink, RecorderWarning, Sink
from lightning_recorder.sinks import DeferredSink, MultiSink, for_any_thread
from tests.sinks.samples import graph, histogram, picture


class OfOneThread(MemorySink):
    """A sink that records the writing thread."""

    any_thread = False

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        self.threads.add(threading.get_ident())
        return super().write_scalars(step, scalars)


def write_all(sink: Sink, path: Path) -> list[bool]:
    return [
        sink.write_scalars(1, {"s": 0.5}),
        sink.write_histograms(1, {"h": histogram()}),
        sink.write_images(1, {"i": picture()}),
        sink.write_text(1, {"t": "text"}),
        sink.write_files(1, {"f": path}),
        sink.write_graph(1, {"g": graph()}),
    ]


def kinds(sink: MemorySink) -> list[str]:
    return [kind for kind, kept in vars(sink).items() if kept and kind != "threads"]


ALL = ["scalars", "histograms", "images", "texts", "files", "graphs"]


def test_what_another_thread_writes_waits_for_the_right_one(tmp_path: Path) -> None:
    """Each write is queued and runs once, in order, in the thread that calls replay."""
    inner = OfOneThread()
    sink = DeferredSink(inner)
    thread = threading.Thread(target=write_all, args=(sink, tmp_path))
    thread.start()
    thread.join()
    assert kinds(inner) == []
    sink.replay()
    assert kinds(inner) == ALL
    assert inner.threads == {threading.get_ident()}
    inner.scalars.clear()
    sink.replay()
    assert inner.scalars == {}


def test_who_bears_any_thread_is_not_put_off() -> None:
    """A sink that accepts any thread is returned as it is; any other one is wrapped and keeps its name."""
    sink, wary = MemorySink(), OfOneThread()
    assert for_any_thread(sink) is sink
    assert str(for_any_thread(wary)) == "OfOneThread"
    assert for_any_thread(wary).any_thread


def test_what_a_sink_does_not_support_is_answered_at_once(tmp_path: Path) -> None:
    """An unsupported verb returns False at once, so that another sink can take over."""

    class Numbers(Sink):
        @override
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
            return True

    assert write_all(DeferredSink(Numbers()), tmp_path) == [True, *[False] * 5]


def test_several_sinks_are_replayed_together(tmp_path: Path) -> None:
    """A failing sink causes a warning with its name, and the other sinks are still replayed."""

    class Failing(OfOneThread):
        @override
        def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
            raise OSError("disk full")

    bad, good, now = Failing(), OfOneThread(), MemorySink()
    sink = MultiSink([MultiSink([for_any_thread(bad)]), for_any_thread(good), for_any_thread(now)])
    write_all(sink, tmp_path)
    assert (kinds(good), kinds(now)) == ([], ALL)
    with pytest.warns(RecorderWarning, match="^Failing.write_text failed, .*: OSError: disk full"):
        sink.replay()
    assert kinds(good) == ALL


def test_a_long_write_of_another_thread_is_not_waited_for(tmp_path: Path) -> None:
    """Replay does not wait for a sink that is inside a write in another thread."""
    begun, may_end = threading.Event(), threading.Event()

    class Slow(MemorySink):
        @override
        def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
            begun.set()
            return may_end.wait(60)

    waiting = OfOneThread()
    deferred = DeferredSink(waiting)
    sink = MultiSink([MultiSink([Slow()]), deferred])
    thread = threading.Thread(target=sink.write_scalars, args=(1, {"s": 0.5}))
    thread.start()
    assert begun.wait(60)
    deferred.write_scalars(0, {"before": 1.0})
    sink.replay()
    assert list(waiting.scalars) == ["before"]
    may_end.set()
    thread.join()


def test_what_the_sink_raises_comes_when_it_is_written(tmp_path: Path) -> None:
    """An error is raised at replay, and the queued writes after it are not lost."""

    class Failing(OfOneThread):
        @override
        def write_images(self, step: int, images: Mapping[str, object]) -> bool:
            raise OSError("disk full")

    inner = Failing()
    sink = DeferredSink(inner)
    assert write_all(sink, tmp_path) == [True] * 6
    with pytest.raises(OSError, match="disk full"):
        sink.replay()
    sink.replay()
    assert kinds(inner) == [kind for kind in ALL if kind != "images"]

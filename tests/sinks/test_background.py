"""Tests of the background queue, and of writing from any thread to a sink that is bound to one thread."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from typing_extensions import override

from lightning_recorder import MemorySink, RecorderWarning, Sink
from lightning_recorder.sinks import BackgroundQueue, DeferredSink, MultiSink, for_any_thread
from tests import forks
from tests.sinks.samples import graph, histogram, picture


def test_jobs_are_done_in_order_in_another_thread() -> None:
    """Jobs run one after another in one thread that is not the caller's, and are done when drain returns."""
    done: list[tuple[int, int]] = []
    jobs = BackgroundQueue()
    for number in range(100):
        jobs.submit(lambda number=number: done.append((number, threading.get_ident())))  # type: ignore[misc]  # the lambda's default
    jobs.drain()
    assert [number for number, _ in done] == list(range(100))
    threads = {thread for _, thread in done}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_draining_nothing_returns() -> None:
    """A queue without jobs has no thread, and draining it returns at once."""
    before = threading.active_count()
    BackgroundQueue().drain()
    assert threading.active_count() == before


def test_a_full_queue_makes_wait_and_loses_nothing() -> None:
    """At the limit, submitting a job blocks until another job is done; no job is dropped."""
    go = threading.Event()
    done: list[int] = []
    jobs = BackgroundQueue(limit=2)
    jobs.submit(go.wait)  # occupies the thread
    while not jobs._jobs.empty():
        pass
    for number in (1, 2):
        jobs.submit(partial(done.append, number))
    waiting = threading.Thread(target=lambda: jobs.submit(lambda: done.append(3)))
    waiting.start()
    waiting.join(timeout=0.1)
    assert waiting.is_alive()
    assert done == []
    go.set()
    waiting.join()
    jobs.drain()
    assert done == [1, 2, 3]


def fail() -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("ask", [BackgroundQueue.drain, lambda jobs: jobs.submit(int)])
def test_an_error_is_raised_where_it_can_be_handled(ask: Callable[[BackgroundQueue], None]) -> None:
    """An error of a job is raised once, at the next submit or drain; the jobs after it still run."""
    done: list[int] = []
    jobs = BackgroundQueue()
    jobs.submit(fail)
    jobs._jobs.join()
    with pytest.raises(OSError, match="disk full"):
        ask(jobs)
    jobs.submit(lambda: done.append(1))
    jobs.drain()
    assert done == [1]


def test_the_thread_ends_and_comes_again() -> None:
    """The idle thread ends, and the next job starts a new one."""
    done: list[int] = []
    jobs = BackgroundQueue(idle_s=0.01)
    for number in (1, 2):
        jobs.submit(partial(done.append, number))
        jobs.drain()
        thread = jobs._thread
        if thread is not None:
            thread.join()
        assert jobs._thread is None
    assert done == [1, 2]


def test_many_threads_hand_over() -> None:
    """Each job runs once, even if several threads submit jobs while the queue's own thread ends."""
    done: list[int] = []
    jobs = BackgroundQueue(limit=3, idle_s=0.0001)

    def hand_over(first: int) -> None:
        for number in range(first, first + 200):
            jobs.submit(partial(done.append, number))

    threads = [threading.Thread(target=hand_over, args=(first,)) for first in range(0, 1000, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jobs.drain()
    assert sorted(done) == list(range(1000))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda jobs: pickle.loads(pickle.dumps(jobs))])
def test_a_copy_begins_with_nothing_to_do(copied: Callable[[BackgroundQueue], BackgroundQueue]) -> None:
    """A copy has the same limits, but no jobs and no errors."""
    jobs = BackgroundQueue(limit=5, idle_s=0.01)
    jobs.submit(fail)
    jobs._jobs.join()
    other = copied(jobs)
    assert (other.limit, other.idle_s) == (5, 0.01)
    other.drain()
    with pytest.raises(OSError, match="disk full"):
        jobs.drain()


def test_a_job_may_wait_for_the_queue() -> None:
    """A job that waits for its own queue continues at once."""
    done: list[int] = []
    jobs = BackgroundQueue()

    def job(number: int) -> None:
        jobs.drain()
        done.append(number)

    for number in range(20):
        jobs.submit(partial(job, number))
    jobs.drain()
    assert done == list(range(20))


@pytest.mark.parametrize("cause", [RuntimeError, KeyboardInterrupt])
def test_a_thread_that_cannot_be_started_loses_no_job(
    cause: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no thread can be started, the caller runs the job; after an interrupt, the next call runs the rest."""
    done: list[int] = []
    jobs = BackgroundQueue()

    def start(self: threading.Thread) -> None:
        raise cause

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        if cause is RuntimeError:
            jobs.submit(partial(done.append, 1))
            assert done == [1]
        else:
            with pytest.raises(KeyboardInterrupt):
                jobs.submit(partial(done.append, 1))
    jobs.drain()
    jobs.submit(partial(done.append, 2))
    jobs.drain()
    assert done == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_begins_with_nothing_to_do(tmp_path: Path) -> None:
    """A process that is forked while a job runs has an empty queue, which works."""
    code = """
import os, signal, threading, warnings
from lightning_recorder.sinks import BackgroundQueue
warnings.simplefilter("ignore")  # of Python, about a fork beside a thread
go = threading.Event()
jobs = BackgroundQueue()
jobs.submit(go.wait)
jobs.submit(lambda: print("of the parent", flush=True))
if os.fork() == 0:
    signal.alarm(30)
    jobs.drain()
    jobs.submit(lambda: print("of the child", flush=True))
    jobs.drain()
    os._exit(0)
os.wait()
go.set()
jobs.drain()
"""
    assert forks.output_of("-c", code, folder=tmp_path).splitlines() == ["of the child", "of the parent"]


def test_the_thread_keeps_no_process_from_ending() -> None:
    """A process can end while its queue has a job that never ends."""
    code = """
import threading
from lightning_recorder.sinks import BackgroundQueue
jobs = BackgroundQueue()
jobs.submit(threading.Event().wait)
print("end")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["end"]


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

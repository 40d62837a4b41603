"""Tests of the background queue."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest

from lightning_recorder.sinks import BackgroundQueue


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
def test_a_forked_process_begins_with_nothing_to_do() -> None:
    """A process that is forked while a job runs has an empty queue, which works."""
    code = """
import os, signal, threading
from lightning_recorder.sinks import BackgroundQueue
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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["of the child", "of the parent"]


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

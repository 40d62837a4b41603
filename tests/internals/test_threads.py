"""Tests of the threads in which torch computes."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_recorder.internals.threads import compute_alone
from lightning_recorder.sinks import BackgroundQueue


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads() -> set[int]:
    """Return the numbers of threads of torch, of OpenMP, and of MKL if torch uses it, in the current thread."""
    found = re.findall(r"get_(?:num|max)_threads\(\) : (\d+)", torch.__config__.parallel_info())
    return {torch.get_num_threads(), *map(int, found)}


def threads_after(*jobs: Callable[[], object]) -> set[int]:
    """Return the numbers of threads in a new thread after some jobs."""
    found: set[int] = set()

    def run() -> None:
        for job in jobs:
            job()
        found.update(threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found


def test_only_the_current_thread_computes_alone() -> None:
    """The number of threads changes in the thread that asked for it, and in no other one."""
    assert threads_after(compute_alone) == {1}
    assert threads_after(lambda: torch.ones(3).sum(), compute_alone) == {1}
    assert threads() == {2}
    assert threads_after(torch.get_num_threads) == {2}


def test_background_jobs_compute_alone() -> None:
    """A job of the writer uses one thread, because more of them would slow the training down."""
    background, found = BackgroundQueue(), set[int]()
    background.submit(lambda: found.update(threads()))
    background.drain()
    assert found == {1}
    assert threads() == {2}

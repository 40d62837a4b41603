"""Work that is done off the training thread, in order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from functools import partial

__all__ = ["BackgroundQueue"]

Job = Callable[[], object]


class BackgroundQueue:
    """Does jobs one after another in a thread of its own, which is there while there is something to do.

    What a job raises is raised in the thread that hands over the next one or waits; the jobs between are done all the
    same.

    Args:
        limit: How many jobs may wait. Where there are more, handing one over waits: nothing is left out.
        idle_s: How long the thread waits for another job before it ends.

    Note:
        The thread does not keep a process from ending, so :meth:`drain` belongs before the end. A copy of a queue, also
        one in a process that was forked, begins with nothing to do. A job that never ends keeps :meth:`drain` waiting.
    """

    def __init__(self, limit: int = 16, *, idle_s: float = 1.0) -> None:
        self.limit = limit
        self.idle_s = idle_s
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._jobs: queue.Queue[Job] = queue.Queue(self.limit)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._doing: int | None = None  # the thread that is inside a job

    def __reduce__(self) -> tuple[Callable[[], BackgroundQueue], tuple[()]]:
        return partial(BackgroundQueue, self.limit, idle_s=self.idle_s), ()

    def submit(self, job: Job) -> None:
        """Have a job done.

        Raises:
            BaseException: What an earlier job raised; this one is done nevertheless.
        """
        error = None
        if self._process == os.getpid():
            error, self._error = self._error, None
        self.put(job)
        if error is not None:
            raise error

    def put(self, job: Job) -> None:
        """Have a job done, and leave what an earlier one raised to be raised elsewhere."""
        self._leave_parent()
        self._jobs.put(job)
        self._see_to_it()

    def wait(self) -> None:
        """Wait until nothing is left to do; from inside a job, return at once."""
        self._leave_parent()
        if threading.get_ident() != self._doing:
            self._see_to_it()
            self._jobs.join()

    def drain(self) -> None:
        """Wait until nothing is left to do; from inside a job, return at once.

        Raises:
            BaseException: What a job raised.
        """
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _leave_parent(self) -> None:
        """In a process that was forked neither the thread nor the jobs of the other are ours."""
        if self._process != os.getpid():
            self._begin()

    def _see_to_it(self) -> None:
        """Have a thread for the jobs; where none can be started, do them here."""
        with self._lock:
            if self._jobs.unfinished_tasks == 0 or (self._thread is not None and self._thread.is_alive()):
                return
            thread = threading.Thread(target=self._work, name="lightning_recorder", daemon=True)
            try:
                thread.start()
                self._thread = thread
                return
            except RuntimeError:  # too many threads, or the interpreter is ending
                pass
        while not self._jobs.empty():
            self._do(self._jobs.get())

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self.idle_s)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            self._do(job)
            del job  # which may hold what takes much memory, until the next one comes

    def _do(self, job: Job) -> None:
        self._doing = threading.get_ident()
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - it is raised again, where it can be handled
            self._error = self._error or error
        finally:
            self._doing = None
            self._jobs.task_done()

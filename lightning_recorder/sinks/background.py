"""Work that is done off the training thread, in order."""

from __future__ import annotations

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
        one in a process that was forked, begins with nothing to do.
    """

    def __init__(self, limit: int = 16, *, idle_s: float = 1.0) -> None:
        self.limit = limit
        self.idle_s = idle_s
        self._jobs: queue.Queue[Job] = queue.Queue(self.limit)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> tuple[Callable[[], BackgroundQueue], tuple[()]]:
        return partial(BackgroundQueue, self.limit, idle_s=self.idle_s), ()

    def submit(self, job: Job) -> None:
        """Have a job done.

        Raises:
            BaseException: What an earlier job raised; this one is done nevertheless.
        """
        error, self._error = self._error, None
        self._jobs.put(job)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lightning_recorder", daemon=True)
                self._thread.start()
        if error is not None:
            raise error

    def drain(self) -> None:
        """Wait until nothing is left to do.

        Raises:
            BaseException: What a job raised.
        """
        self._jobs.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

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
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - it is raised again, where it can be handled
                self._error = self._error or error
            finally:
                self._jobs.task_done()

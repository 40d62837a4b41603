"""A job queue in a background thread, and a sink that defers writes until the right thread runs them."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from typing_extensions import override

from lightning_recorder.internals.threads import compute_alone
from lightning_recorder.sinks.base import Sink, UniformSink

__all__ = ["BackgroundQueue", "DeferredSink", "for_any_thread"]

Job = Callable[[], object]


class BackgroundQueue:
    """Run jobs in order in a daemon thread that exists only while there is work.

    An exception of a job is raised again in the next :meth:`submit` or :meth:`drain`. Jobs queued after the failed job
    still run.

    Args:
        limit: The maximum number of waiting jobs. At the limit, :meth:`submit` and :meth:`put` block. No job is
            dropped.
        idle_s: The time in seconds that the idle thread waits for another job before it ends.

    Note:
        The thread does not keep the process alive, so call :meth:`drain` before the process ends. A copy of a queue
        and a queue in a forked process start empty. A job that never ends blocks :meth:`drain`.
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
        self._working_thread: int | None = None  # the identifier of the thread that is running a job

    def __getstate__(self) -> dict[str, float]:
        return {"limit": self.limit, "idle_s": self.idle_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def submit(self, job: Job) -> None:
        """Queue a job.

        Raises:
            BaseException: The exception of an earlier job. The new job is queued nevertheless.
        """
        try:
            self.raise_error()
        finally:
            self.put(job)

    def raise_error(self) -> None:
        """Raise the exception of an earlier job, once."""
        if self._process == os.getpid():
            error, self._error = self._error, None
            if error is not None:
                raise error

    def put(self, job: Job) -> None:
        """Queue a job without raising the exception of an earlier job. That exception stays pending."""
        self._reset_after_fork()
        self._jobs.put(job)
        self._ensure_thread()

    def wait(self) -> None:
        """Wait until all jobs are done. Return at once when called from inside a job."""
        self._reset_after_fork()
        if threading.get_ident() != self._working_thread:
            self._ensure_thread()
            self._jobs.join()

    def drain(self) -> None:
        """Wait until all jobs are done. Return at once when called from inside a job.

        Raises:
            BaseException: The first exception of a job.
        """
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _reset_after_fork(self) -> None:
        """Reset the queue after a fork: the thread and the jobs belong to the parent process."""
        if self._process != os.getpid():
            self._begin()

    def _ensure_thread(self) -> None:
        """Start a thread if there are jobs. If no thread can be started, run the jobs in the calling thread."""
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
            self._run_job(self._jobs.get())

    def _work(self) -> None:
        compute_alone()
        while True:
            try:
                job = self._jobs.get(timeout=self.idle_s)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            self._run_job(job)
            del job  # release the memory of the job while waiting for the next job

    def _run_job(self, job: Job) -> None:
        self._working_thread = threading.get_ident()
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._error = self._error or error
        finally:
            self._working_thread = None
            self._jobs.task_done()


class DeferredSink(UniformSink):
    """Queue the writes from any thread, and run them when :meth:`replay` is called.

    A verb that the wrapped sink does not override returns ``False``. Other verbs return ``True``, because the return
    value of the wrapped sink is not known yet.

    Args:
        sink: The wrapped sink.
    """

    any_thread = True

    def __init__(self, sink: Sink) -> None:
        self.verb = ""
        """The verb that :meth:`replay` is running or ran last."""
        self._sink = sink
        self._queue: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()

    def __str__(self) -> str:
        return str(self._sink)

    @property
    def written_bytes(self) -> int | None:  # type: ignore[override]  # read-only here: the wrapped sink counts
        """The number of bytes that the wrapped sink counted."""
        return self._sink.written_bytes

    @override
    def supports(self, verb: str) -> bool:
        return self._sink.supports(verb)

    @property
    def is_idle(self) -> bool:
        """True if no writes are queued."""
        return self._queue.empty()

    def replay(self) -> None:
        """Run the queued writes. Call this from the thread that may write to the wrapped sink."""
        while not self._queue.empty():
            self.verb, write = self._queue.get()
            write()

    @override
    def _write(self, verb: str, step: int, values: Mapping[str, Any]) -> bool:
        if not self.supports(verb):
            return False
        self._queue.put((verb, partial(self._write_later, verb, step, values)))
        return True

    def _write_later(self, verb: str, step: int, values: Mapping[str, Any]) -> None:
        if verb == "write_files":
            values = {name: path for name, path in values.items() if path.exists()}  # without pruned files
            if not values:
                return
        getattr(self._sink, verb)(step, values)

    @override
    def flush(self) -> None:
        self._queue.put(("flush", self._sink.flush))

    @override
    def close(self) -> None:
        self.replay()
        self._sink.close()


def for_any_thread(sink: Sink) -> Sink:
    """Return the sink itself if it accepts writes from any thread; otherwise wrap it in a :class:`DeferredSink`."""
    return sink if sink.any_thread else DeferredSink(sink)

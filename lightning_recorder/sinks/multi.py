"""A composite sink that isolates its sinks from each other's errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from typing_extensions import override

from lightning_recorder.disk import UNKNOWN_BYTES, has_room, is_full, warn_of_error
from lightning_recorder.errors import warn
from lightning_recorder.sinks.background import DeferredSink
from lightning_recorder.sinks.base import Sink, UniformSink

__all__ = ["Destination", "MultiSink"]

_log = logging.getLogger("lightning_recorder")


@dataclass(eq=False)
class Destination:
    """A sink of a :class:`MultiSink`, with its state.

    Args:
        sink: The sink.
        folder: A folder on the disk that the back end writes to. While this disk is full, the sink is skipped, with one
            warning. ``None`` if the sink checks the disk space itself or does not write to a local disk.
    """

    sink: Sink
    folder: Path | None = None
    has_failed: bool = False
    """True if the sink has raised. After that, no verb of the sink is called except ``close``."""
    lock: threading.RLock = field(init=False, repr=False)
    """The lock that a thread holds while it writes. All destinations of a sink share it."""

    def __post_init__(self) -> None:
        self.lock = _lock_of(self.sink)

    def has_room(self, verb: str, values: Mapping[str, Any]) -> bool:
        """Return True if the disk has enough space for the values. Otherwise warn, once per disk and run."""
        nbytes = sum(Path(path).stat().st_size for path in values.values()) if verb == "write_files" else 0
        return self.folder is None or has_room(self.folder, UNKNOWN_BYTES + nbytes)


class MultiSink(UniformSink):
    """Write to several sinks. A verb returns True if any of them supports that kind of result.

    A sink that raises causes one warning. After that, only its ``close`` is called, while the other sinks continue. If
    the error means that the disk is full, only the current write is skipped. With ``strict``, the first error is raised
    after all other sinks have been called.

    Args:
        sinks: The sinks in writing order.
        fallback: A sink for the kinds of results that none of ``sinks`` supports. Its first use for each kind is
            logged.
        additional: Sinks that receive all results, even results that no sink of ``sinks`` supports. They are written
            last.
        strict: Raise the first error instead of warning.
    """

    def __init__(
        self,
        sinks: Iterable[Sink | Destination],
        *,
        fallback: Sink | Destination | None = None,
        additional: Iterable[Sink | Destination] = (),
        strict: bool = False,
    ) -> None:
        self.strict = strict
        self._sinks = [_as_destination(each) for each in sinks]
        self._fallback = [] if fallback is None else [_as_destination(fallback)]
        self._additional = [_as_destination(each) for each in additional]
        self._all = [*self._sinks, *self._fallback, *self._additional]
        self._deferred = [each for each in self._all if isinstance(each.sink, (DeferredSink, MultiSink))]
        self._fallen_back: set[str] = set()

    @property
    def sinks(self) -> list[Sink]:
        """All sinks in writing order."""
        return [each.sink for each in self._all]

    def without_fallback(self) -> MultiSink:
        """Return a sink for the same destinations without the fallback. The two share the state of failed sinks."""
        return MultiSink(self._sinks, additional=self._additional, strict=self.strict)

    @property
    def any_thread(self) -> bool:  # type: ignore[override]  # read-only here: derived from the sinks
        """True if all sinks accept writes from any thread."""
        return all(sink.any_thread for sink in self.sinks)

    @property
    def written_bytes(self) -> int | None:  # type: ignore[override]  # read-only here: derived from the sinks
        """The number of bytes written by the sinks that count bytes, or ``None`` if no sink counts them."""
        total = None
        for each in self._all:  # a loop is faster than sum(), and this is read twice per record
            written = each.sink.written_bytes
            if written is not None:
                total = (total or 0) + written
        return total

    @override
    def supports(self, verb: str) -> bool:
        return any(sink.supports(verb) for sink in self.sinks)

    @property
    def is_idle(self) -> bool:
        """True if no sink has queued writes."""
        # A loop is faster than a generator, and this is read several times in each step.
        for each in self._deferred:  # noqa: SIM110
            if not each.sink.is_idle:  # type: ignore[attr-defined]  # only sinks that have it are listed
                return False
        return True

    def replay(self) -> None:
        """Run the queued writes of the deferred sinks. Call this from the thread that may write to them."""
        errors: list[Exception] = []
        for each in self._deferred:
            if each.has_failed:
                continue
            try:
                # Do not take the lock: this thread must not wait for a long write in another thread.
                each.sink.replay()  # type: ignore[attr-defined]  # only sinks that have it are listed
            except Exception as error:  # noqa: BLE001 - a back end may raise anything
                self._on_error(each, getattr(each.sink, "verb", "replay"), error, errors)
        if errors:
            raise errors[0]

    @override
    def _write(self, verb: str, step: int, values: Mapping[str, Any]) -> bool:
        errors: list[Exception] = []
        is_written = self._call(self._sinks, errors, verb, step, values)
        if not is_written and not errors and self._fallback:
            is_written = self._call(self._fallback, errors, verb, step, values)
            if is_written and verb not in self._fallen_back:
                self._fallen_back.add(verb)
                sink = self._fallback[0].sink
                place = getattr(sink, "directory", type(sink).__name__)  # FilesSink has a directory
                _log.info("no logger takes %s: look in %s", verb.removeprefix("write_"), place)
        if self._additional:
            is_written |= self._call(self._additional, errors, verb, step, values)
        if errors:
            raise errors[0]
        return is_written

    def _call(self, destinations: Iterable[Destination], errors: list[Exception], verb: str, *args: Any) -> bool:
        """Call a verb of each sink. Return True if any call returned True. ``errors`` collects the errors to raise."""
        result = False
        for each in destinations:
            if each.has_failed and verb != "close":
                continue
            try:
                if each.folder is None or not args or each.has_room(verb, args[1]):
                    with each.lock:
                        result |= bool(getattr(each.sink, verb)(*args))
                else:
                    result |= each.sink.supports(verb)
            except Exception as error:  # noqa: BLE001 - a back end may raise anything
                result |= self._on_error(each, verb, error, errors)
        return result

    def _on_error(self, destination: Destination, verb: str, error: Exception, errors: list[Exception]) -> bool:
        """Handle the error of a sink. Return True if the disk is full; then the fallback should not be tried."""
        if self.strict:
            errors.append(error)
        elif is_full(error):
            warn_of_error(destination.folder or Path(), error)
            return True
        elif not destination.has_failed:
            cause = f"{type(error).__name__}: {error}"
            warn(f"{destination.sink}.{verb} failed, and nothing more is written to it: {cause}")
        destination.has_failed = True
        return False

    @override
    @contextmanager
    def joined(self) -> Iterator[None]:
        errors: list[Exception] = []
        with ExitStack() as stack:
            for each in self._all:
                if not each.has_failed and type(each.sink).joined is not Sink.joined:
                    stack.enter_context(self._joined(each, errors))
            yield
        if errors:
            raise errors[0]

    @contextmanager
    def _joined(self, destination: Destination, errors: list[Exception]) -> Iterator[None]:
        """Enter the ``joined`` context of a sink. An error when the context ends is handled like an error of a verb."""
        context = destination.sink.joined()
        context.__enter__()
        try:
            yield
        finally:
            try:
                context.__exit__(None, None, None)
            except Exception as error:  # noqa: BLE001 - a back end may raise anything
                self._on_error(destination, "joined", error, errors)

    @override
    def flush(self) -> None:
        self._call_all("flush")

    @override
    def close(self) -> None:
        self._call_all("close")

    def _call_all(self, verb: str) -> None:
        errors: list[Exception] = []
        self._call(self._all, errors, verb)
        if errors:
            raise errors[0]


def _as_destination(sink: Sink | Destination) -> Destination:
    return sink if isinstance(sink, Destination) else Destination(sink)


# The locks are shared by sink, because two callbacks with the same sink write to it from different threads.
_LOCKS: WeakKeyDictionary[Sink, threading.RLock] = WeakKeyDictionary()
_LOCK = threading.RLock()


def _lock_of(sink: Sink) -> threading.RLock:
    with _LOCK:
        try:
            return _LOCKS.setdefault(sink, threading.RLock())
        except TypeError:  # all sinks that are unhashable or allow no weak references share one lock
            return _LOCK

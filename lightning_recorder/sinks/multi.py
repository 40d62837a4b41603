"""A composite sink that isolates its sinks from each other's errors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from typing_extensions import override

from lightning_recorder.disk import UNKNOWN_BYTES, has_room, is_full, warn_of_full
from lightning_recorder.errors import warn
from lightning_recorder.reductions.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.deferred import DeferredSink

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["MultiSink"]

_log = logging.getLogger("lightning_recorder")


class MultiSink(Sink):
    """Write to several sinks. A verb returns True if any of them supports that kind of result.

    A sink that raises causes one warning and is skipped from then on, except that it is still closed. The other sinks
    continue. An error that means a full disk only skips the current write. With ``strict``, the first error is raised
    after all other sinks have been called.

    Args:
        sinks: The sinks in writing order.
        fallback: A sink for the kinds that none of the sinks supports. Its first use for each kind is logged.
        strict: Raise the first error instead of warning.
        folder: A folder on the disk that the back ends of the sinks write to. While that disk is full, nothing is
            written to the sinks, with one warning.
    """

    def __init__(
        self,
        sinks: Iterable[Sink],
        *,
        fallback: Sink | None = None,
        strict: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.sinks = list(sinks)
        self.fallback = fallback
        self.strict = strict
        self.folder = folder
        self._failed: set[int] = set()
        self._fallen_back: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """True if there is no sink, including inside nested sinks."""
        return all(isinstance(sink, MultiSink) and sink.is_empty for sink in self._all())

    @property
    def any_thread(self) -> bool:  # type: ignore[override]  # read-only here: derived from the sinks
        """True if all sinks accept writes from any thread."""
        return all(sink.any_thread for sink in self._all())

    @property
    def written_bytes(self) -> int | None:  # type: ignore[override]  # read-only here: derived from the sinks
        """The bytes written by the sinks that count them, or ``None`` if none of them does."""
        counted = [each.written_bytes for each in self._all() if each.written_bytes is not None]
        return sum(counted) if counted else None

    @override
    def supports(self, verb: str) -> bool:
        return any(sink.supports(verb) for sink in self._all())

    def deferred(self) -> list[DeferredSink]:
        """Return the deferred sinks, including those inside nested sinks."""
        found: list[DeferredSink] = []
        for sink in self._all():
            if isinstance(sink, DeferredSink):
                found.append(sink)
            elif isinstance(sink, MultiSink):
                found += sink.deferred()
        return found

    def replay(self) -> None:
        """Run the queued writes of the deferred sinks. Call this from the thread that may write to them."""
        # Without locks: another thread may be inside a long write, and this thread must not wait for it.
        putting_off = [sink for sink in self._all() if isinstance(sink, (DeferredSink, MultiSink))]
        self._each("replay", _replay, putting_off, in_turn=False)

    def _write(self, verb: str, call: Callable[[Sink], bool], nbytes: int = 0) -> bool:
        if self.folder is not None and not has_room(self.folder, UNKNOWN_BYTES + nbytes):
            return self.supports(verb)
        shown = self._each(verb, call, self.sinks)
        if not shown and self.fallback is not None:
            shown = self._each(verb, call, [self.fallback])
            if shown and verb not in self._fallen_back:
                self._fallen_back.add(verb)
                _log.info("no logger takes what %s gives; it is written by %s", verb, type(self.fallback).__name__)
        return shown

    def _each(
        self,
        verb: str,
        call: Callable[[Sink], bool | None],
        sinks: Iterable[Sink],
        *,
        closing: bool = False,
        in_turn: bool = True,
    ) -> bool:
        shown, errors = False, []
        for sink in sinks:
            if id(sink) in self._failed and not closing:
                continue
            try:
                with _turn(sink) if in_turn else nullcontext():
                    shown |= bool(call(sink))
            except Exception as error:  # noqa: BLE001 - a back end may raise anything
                if is_full(error) and not self.strict:
                    warn_of_full(self.folder or Path(), error)
                    shown = True
                    continue
                errors.append(error)
                if not self.strict and id(sink) not in self._failed:
                    cause = f"{type(error).__name__}: {error}"
                    what = sink.verb if isinstance(sink, DeferredSink) else verb
                    warn(f"{sink}.{what} failed, nothing more is written there: {cause}")
                self._failed.add(id(sink))
        if errors and self.strict:
            raise errors[0]
        return shown

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        return self._write("write_scalars", lambda sink: sink.write_scalars(step, scalars))

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        return self._write("write_histograms", lambda sink: sink.write_histograms(step, histograms))

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        return self._write("write_images", lambda sink: sink.write_images(step, images))

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return self._write("write_text", lambda sink: sink.write_text(step, texts))

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        nbytes = 0 if self.folder is None else sum(Path(path).stat().st_size for path in files.values())
        return self._write("write_files", lambda sink: sink.write_files(step, files), nbytes)

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        return self._write("write_graph", lambda sink: sink.write_graph(step, graphs))

    @override
    def flush(self) -> None:
        self._each("flush", lambda sink: sink.flush(), self._all())

    @override
    def close(self) -> None:
        self._each("close", lambda sink: sink.close(), self._all(), closing=True)

    def _all(self) -> list[Sink]:
        return self.sinks if self.fallback is None else [*self.sinks, self.fallback]


def _replay(sink: Sink) -> None:
    if isinstance(sink, (DeferredSink, MultiSink)):
        sink.replay()


# Two callbacks with the same sink write to it from their own threads.
_TURNS: WeakKeyDictionary[Sink, threading.RLock] = WeakKeyDictionary()
_LOCK = threading.RLock()


def _turn(sink: Sink) -> threading.RLock:
    """Return the lock that a thread holds while it writes to the sink."""
    with _LOCK:
        try:
            return _TURNS.setdefault(sink, threading.RLock())
        except TypeError:  # an unhashable or not weakly referenceable sink shares one lock with others of its kind
            return _LOCK

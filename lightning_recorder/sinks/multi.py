"""A sink made of sinks, none of which can harm another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from typing_extensions import override

from lightning_recorder.errors import tell
from lightning_recorder.reductions.binned import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.deferred import DeferredSink

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["MultiSink"]

_log = logging.getLogger("lightning_recorder")


class MultiSink(Sink):
    """Writes to all of several sinks; the answer of a verb is whether any of them shows that kind.

    A sink that raises is told about once and left out from then on, except that it is still closed; the others go on.
    With ``strict`` the error is raised after all others have had their turn.

    Args:
        sinks: The sinks, in the order in which they are written to.
        fallback: Gets what none of the sinks shows; it is logged once per kind that it does.
        strict: Raise the first error instead of telling it.
    """

    def __init__(self, sinks: Iterable[Sink], *, fallback: Sink | None = None, strict: bool = False) -> None:
        self.sinks = list(sinks)
        self.fallback = fallback
        self.strict = strict
        self._failed: set[int] = set()
        self._fallen_back: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether there is no sink in it, nor in those that are in it."""
        return all(isinstance(sink, MultiSink) and sink.is_empty for sink in self._all())

    @property
    def any_thread(self) -> bool:  # type: ignore[override]  # read-only here: it follows from the sinks
        """Whether all of the sinks may be written to from another thread."""
        return all(sink.any_thread for sink in self._all())

    @property
    def written_bytes(self) -> int | None:  # type: ignore[override]  # read-only here: it follows from the sinks
        """Bytes that those of the sinks have written which count them; ``None`` if none does."""
        counted = [each.written_bytes for each in self._all() if each.written_bytes is not None]
        return sum(counted) if counted else None

    @override
    def supports(self, verb: str) -> bool:
        return any(sink.supports(verb) for sink in self._all())

    def replay(self) -> None:
        """Have what was put off written, by the thread that may."""
        # Without their turns: another thread may be inside a long write, for which this one must not wait.
        putting_off = [sink for sink in self._all() if isinstance(sink, (DeferredSink, MultiSink))]
        self._each("replay", _replay, putting_off, in_turn=False)

    def _write(self, verb: str, call: Callable[[Sink], bool]) -> bool:
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
                errors.append(error)
                if not self.strict and id(sink) not in self._failed:
                    cause = f"{type(error).__name__}: {error}"
                    what = sink.verb if isinstance(sink, DeferredSink) else verb
                    tell(f"{sink}.{what} failed, nothing more is written there: {cause}")
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
        return self._write("write_files", lambda sink: sink.write_files(step, files))

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


# Two callbacks that were given one sink write to it in threads of their own.
_TURNS: WeakKeyDictionary[Sink, threading.RLock] = WeakKeyDictionary()
_LOCK = threading.RLock()


def _turn(sink: Sink) -> threading.RLock:
    """What a thread holds while it writes to the sink."""
    with _LOCK:
        try:
            return _TURNS.setdefault(sink, threading.RLock())
        except TypeError:  # a sink that cannot be a key shares its turns with others of the kind
            return _LOCK

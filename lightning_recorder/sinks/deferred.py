"""A sink that accepts writes from any thread for a sink that is bound to one thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_recorder.reductions.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["DeferredSink", "for_any_thread"]


class DeferredSink(Sink):
    """Queue the writes from any thread, and run them when :meth:`replay` is called.

    A verb that the wrapped sink does not override returns ``False``. Any other verb returns ``True``, because the
    return value of the wrapped sink is not known yet.

    Args:
        sink: The wrapped sink.
    """

    any_thread = True

    def __init__(self, sink: Sink) -> None:
        self.verb = ""
        """The verb that is running or that ran last."""
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

    def _defer(self, verb: str, step: int, values: Mapping[str, object]) -> bool:
        if not self.supports(verb):
            return False
        self._queue.put((verb, partial(getattr(self._sink, verb), step, values)))
        return True

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        return self._defer("write_scalars", step, scalars)

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        return self._defer("write_histograms", step, histograms)

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        return self._defer("write_images", step, images)

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return self._defer("write_text", step, texts)

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        if not self.supports("write_files"):
            return False
        self._queue.put(("write_files", partial(self._write_files, step, files)))
        return True

    def _write_files(self, step: int, files: Mapping[str, Path]) -> None:
        there = {name: path for name, path in files.items() if path.exists()}  # others were pruned in the meantime
        if there:
            self._sink.write_files(step, there)

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        return self._defer("write_graph", step, graphs)

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

"""A sink that lets any thread write to one which only a certain thread may write to."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from lightning_recorder.reductions.binned import Histogram
from lightning_recorder.sinks.base import Image, Sink

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["DeferredSink", "for_any_thread"]


class DeferredSink(Sink):
    """Takes what is written from any thread, and writes it when :meth:`replay` is called.

    A verb that the sink does not override is answered with ``False`` at once; any other with ``True``, since it is not
    known yet what the sink will answer.

    Args:
        sink: What is written to.
    """

    any_thread = True

    def __init__(self, sink: Sink) -> None:
        self.verb = ""
        """What is written or was written last."""
        self._sink = sink
        self._waiting: queue.SimpleQueue[tuple[str, Callable[[], object]]] = queue.SimpleQueue()

    def __str__(self) -> str:
        return str(self._sink)

    @property
    def written_bytes(self) -> int | None:  # type: ignore[override]  # read-only here: it is the sink's
        """As the sink counts them."""
        return self._sink.written_bytes

    @override
    def supports(self, verb: str) -> bool:
        return self._sink.supports(verb)

    def replay(self) -> None:
        """Write what was put off; to be called by the thread that may."""
        while not self._waiting.empty():
            self.verb, write = self._waiting.get()
            write()

    def _put_off(self, verb: str, step: int, values: Mapping[str, object]) -> bool:
        if not self.supports(verb):
            return False
        self._waiting.put((verb, partial(getattr(self._sink, verb), step, values)))
        return True

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        return self._put_off("write_scalars", step, scalars)

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        return self._put_off("write_histograms", step, histograms)

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        return self._put_off("write_images", step, images)

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return self._put_off("write_text", step, texts)

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        if not self.supports("write_files"):
            return False
        self._waiting.put(("write_files", partial(self._write_files, step, files)))
        return True

    def _write_files(self, step: int, files: Mapping[str, Path]) -> None:
        there = {name: path for name, path in files.items() if path.exists()}  # others were pruned meanwhile
        if there:
            self._sink.write_files(step, there)

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        return self._put_off("write_graph", step, graphs)

    @override
    def flush(self) -> None:
        self._waiting.put(("flush", self._sink.flush))

    @override
    def close(self) -> None:
        self.replay()
        self._sink.close()


def for_any_thread(sink: Sink) -> Sink:
    """The sink itself if it bears any thread, else one that puts off what is written to it."""
    return sink if sink.any_thread else DeferredSink(sink)

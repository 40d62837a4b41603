"""A sink that keeps everything in memory, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from lightning_recorder.reductions.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["MemorySink"]

Value = TypeVar("Value")


class MemorySink(Sink):
    """Keep results in memory as ``tag -> step -> value``. Writing a tag again at a step replaces the value.

    Example:
        >>> sink = MemorySink()
        >>> sink.write_scalars(3, {"activations/fc/mean": 0.5})
        True
        >>> sink.scalars
        {'activations/fc/mean': {3: 0.5}}
    """

    any_thread = True

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        self.histograms: dict[str, dict[int, Histogram]] = {}
        self.images: dict[str, dict[int, Image]] = {}
        self.texts: dict[str, dict[int, str]] = {}
        self.files: dict[str, dict[int, Path]] = {}
        self.graphs: dict[str, dict[int, Graph]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Copied in one expression, because another thread may be writing.
        return {
            kind: {tag: dict(by_step) for tag, by_step in dict(by_tag).items()} for kind, by_tag in vars(self).items()
        }

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        return _add(self.scalars, step, scalars)

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        return _add(self.histograms, step, histograms)

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        return _add(self.images, step, images)

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        return _add(self.texts, step, texts)

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        return _add(self.files, step, files)

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        return _add(self.graphs, step, graphs)


def _add(kept: dict[str, dict[int, Value]], step: int, values: Mapping[str, Value]) -> bool:
    for tag, value in values.items():
        kept.setdefault(tag, {})[step] = value
    return True

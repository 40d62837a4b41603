"""A sink that keeps everything in memory, for tests and notebooks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.records.histogram import Histogram
from lightning_recorder.sinks.base import Image, UniformSink

if TYPE_CHECKING:
    from lightning_recorder.graph.model import Graph

__all__ = ["MemorySink"]

_RESULTS = {
    "write_scalars": "scalars",
    "write_histograms": "histograms",
    "write_images": "images",
    "write_text": "texts",
    "write_files": "files",
    "write_graph": "graphs",
}


class MemorySink(UniformSink):
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
        # Copy the dictionaries, because another thread may be writing to them.
        return {
            kind: {tag: dict(by_step) for tag, by_step in dict(by_tag).items()} for kind, by_tag in vars(self).items()
        }

    @override
    def _write(self, verb: str, step: int, values: Mapping[str, Any]) -> bool:
        by_tag = vars(self)[_RESULTS[verb]]
        for tag, value in values.items():
            by_tag.setdefault(tag, {})[step] = value
        return True

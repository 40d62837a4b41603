"""A sink that writes plain files to a folder."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_recorder.disk import append, attempt
from lightning_recorder.reductions.histogram import Histogram
from lightning_recorder.sinks.base import Image, Sink
from lightning_recorder.sinks.safe_names import copy_file, path_below, path_of_tag
from lightning_recorder.temporary import write_whole

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

    from lightning_recorder.graph.model import Graph

__all__ = ["FilesSink", "histogram_to_json", "to_pillow"]


class FilesSink(Sink):
    """Write every kind of result to one folder.

    ``scalars.jsonl`` and ``histograms.jsonl`` receive one line per call. Each line is a JSON object, so a killed run
    leaves at most one incomplete line, at the end. ``images/`` contains a PNG file per tag and step, ``texts/`` a
    Markdown file and ``graphs/`` a JSON file. Files are copied to their target names. Numbers that JSON lacks are
    written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``.

    If the disk is full, results are skipped with one warning.

    Args:
        directory: The folder, created by the first result. A second run with the same folder appends.

    Raises:
        ArgumentError: From ``write_files``, if a name points outside the folder.
        OSError: From any verb, if the folder cannot be written.
    """

    any_thread = True

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.written_bytes: int = 0

    @override
    def write_scalars(self, step: int, scalars: Mapping[str, float]) -> bool:
        self._append("scalars.jsonl", {"step": step, "scalars": {tag: _plain(value) for tag, value in scalars.items()}})
        return True

    @override
    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> bool:
        self._append(
            "histograms.jsonl",
            {"step": step, "histograms": {tag: histogram_to_json(each) for tag, each in histograms.items()}},
        )
        return True

    @override
    def write_images(self, step: int, images: Mapping[str, Image]) -> bool:
        for tag, pixels in images.items():
            file = io.BytesIO()
            to_pillow(pixels).save(file, "png")
            self._write("images", tag, step, ".png", file.getvalue())
        return True

    @override
    def write_text(self, step: int, texts: Mapping[str, str]) -> bool:
        for tag, text in texts.items():
            self._write("texts", tag, step, ".md", text.encode("utf-8"))
        return True

    @override
    def write_files(self, step: int, files: Mapping[str, Path]) -> bool:
        for name, source in files.items():
            target = path_below(self.directory, name)
            attempt(target, source.stat().st_size, partial(copy_file, source, target))
        return True

    @override
    def write_graph(self, step: int, graphs: Mapping[str, Graph]) -> bool:
        for tag, graph in graphs.items():
            self._write("graphs", tag, step, ".json", json.dumps(graph.to_json()).encode("utf-8"))
        return True

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        path = self.directory / name
        if attempt(path, len(line), partial(append, path, line, is_line=True)):
            self.written_bytes += len(line)

    def _write(self, folder: str, tag: str, step: int, suffix: str, data: bytes) -> None:
        def put() -> None:
            path = path_of_tag(self.directory / folder, tag, step, suffix)
            write_whole(path, lambda file: file.write(data))
            self.written_bytes += len(data)

        attempt(self.directory, len(data), put)


def _plain(value: float) -> float | str:
    return float(value) if math.isfinite(value) else repr(float(value))


def to_pillow(pixels: Image) -> Picture:
    """Return the pixels as a Pillow image, which several back ends accept."""
    from PIL import Image as Pictures

    return Pictures.fromarray(pixels)


def histogram_to_json(histogram: Histogram) -> dict[str, Any]:
    """Return a histogram as JSON-compatible data. NaN and infinities become strings."""
    return {
        "edges": histogram.edges.tolist(),
        "counts": histogram.counts.tolist(),
        **{name: _plain(getattr(histogram, name)) for name in ("min", "max", "sum", "sum_squares", "fraction")},
    }
